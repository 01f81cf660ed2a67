"""The forms of a plan, what they mean, that each reads back as it was written, and what is refused."""

import itertools
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

import convoy
from convoy.errors import ConvoyError
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan, plan_text
from convoy.plans.strategies import STRATEGIES, WORDS

MIXED = """
mesh: {node: 2, gpu: 3}
layers:                      # first match wins, patterns over module names
  features.0:   {node: sample, gpu: channel}
  features.*:   {node: sample, gpu: filter}
  classifier.*: {node: filter, gpu: filter}
"""
STAGED = """
mesh: {stage: 3, gpu: 2}
layers:
  '*': {gpu: sample}
stages: [conv1, layer2, 10]  # a layer's name may be a number
"""

MEANINGS: dict[str, tuple[dict[str, int], tuple[str, ...], tuple[str, ...], int]] = {
    "serial": ({}, (), (), 1),
    " serial\n": ({}, (), (), 1),
    "sample=1": ({"sample": 1}, ("sample",), ("sample",), 1),
    " sample = 2 , height = 2 ": ({"sample": 2, "height": 2}, ("sample", "height"), ("sample", "height"), 2),
    "filter=2,sample=3": ({"filter": 2, "sample": 3}, ("filter", "sample"), ("filter", "sample"), 3),
    "sample=2,sample=2": ({"sample": 2, "sample2": 2}, ("sample", "sample"), ("sample", "sample"), 4),
    "owt=4": ({"owt": 4}, ("sample",), ("filter",), 4),
    "owt=2,sample=2": ({"owt": 2, "sample": 2}, ("sample", "sample"), ("filter", "sample"), 4),
    "stage=2,sample=3": ({"stage": 2, "sample": 3}, ("replicate", "sample"), ("replicate", "sample"), 3),
    '{"mesh": {"sample": 2}, "layers": {"*": {"sample": "sample"}}}': ({"sample": 2}, ("sample",), ("sample",), 2),
    MIXED: ({"node": 2, "gpu": 3}, ("sample", "channel"), ("sample", "channel"), 2),
    STAGED: ({"stage": 3, "gpu": 2}, ("replicate", "sample"), ("replicate", "sample"), 2),
}
"""Text: axes and their sizes, strategies of `features.0` as a convolution and as a linear layer, parts of the batch."""


def test_texts_have_their_meanings_and_read_back() -> None:
    for text, (axes, conv, linear, parts) in MEANINGS.items():
        plan = Plan.parse(text)
        assert (plan.mesh, plan.parts) == (Mesh(tuple(axes), tuple(axes.values())), parts), text
        assert (plan.strategy("features.0", "conv"), plan.strategy("features.0", "linear")) == (conv, linear), text
        for again in (plan_text(plan), plan.to_yaml(), plan.to_dict(), plan, pickle.loads(pickle.dumps(plan))):
            assert Plan.parse(again) == plan and hash(Plan.parse(again)) == hash(plan), text
    assert len({Plan.parse(text) for text in MEANINGS}) == len(MEANINGS) - 1  # one twice, with spaces


def test_every_line_of_strategies_reads_back() -> None:
    for count in (1, 2, 3):
        for chosen in itertools.permutations([*STRATEGIES, *WORDS], count):
            text = ",".join(f"{strategy}={size}" for size, strategy in enumerate(chosen, 1))
            plan = Plan.parse(text)
            assert str(plan) == text and Plan.parse(plan.to_dict()) == plan
            assert plan.strategy("a", "matmul") == tuple(
                {"owt": "sample", "stage": "replicate"}.get(s, s) for s in chosen
            )


def test_the_first_pattern_that_matches_wins_and_what_nothing_matches_is_replicated() -> None:
    plan = Plan.parse(MIXED)
    for layer, strategies in {
        "features.1": ("sample", "filter"),
        "features.0.conv": ("sample", "filter"),
        "classifier.6": ("filter", "filter"),
        **dict.fromkeys(("", "features", "Features.0", "classifier"), ("replicate", "replicate")),
    }.items():
        assert plan.strategy(layer, "conv") == strategies, layer
    some = Plan(Mesh(("node", "gpu"), (2, 2)), (("fc*", {"gpu": "filter"}), ("*", {"node": "sample"})))
    assert (some.strategy("fc1", "linear"), some.strategy("conv1", "conv")) == (
        ("replicate", "filter"), ("sample", "replicate"),
    )  # fmt: skip
    for pattern, matches, misses in (
        ("*", ["", "a", "a.b.c"], []),
        ("features.*", ["features.0.conv", "features."], ["features", "x.features.0"]),
        ("features.?", ["features.0"], ["features.10", "features"]),
        ("layer[12].*", ["layer1.0.conv1", "layer2.x"], ["layer3.0"]),
        ("*.fc[!1]", ["a.fc2"], ["a.fc1", "fc2"]),
        ("head", ["head"], ["head.0", "Head"]),
    ):
        one = Plan.parse({"mesh": {"x": 2}, "layers": {pattern: {"x": "filter"}}})
        assert [name for name in matches + misses if one.pattern(name)] == matches


def test_people_read_a_plan_as_one_line_and_write_it_as_yaml() -> None:
    assert Plan.parse(MIXED).to_yaml() == (
        "mesh: {node: 2, gpu: 3}\nlayers:\n  features.0: {node: sample, gpu: channel}\n"
        "  features.*: {node: sample, gpu: filter}\n  classifier.*: {node: filter, gpu: filter}\n"
    )
    assert str(Plan.parse(MIXED)) == (
        "node=2 × gpu=3: features.0 node:sample,gpu:channel; features.* node:sample,gpu:filter; "
        "classifier.* node:filter,gpu:filter"
    )
    assert str(Plan(Mesh(("x",), (2,)))) == "x=2: every layer replicate"
    assert str(Plan.parse(STAGED)) == "stage=3 × gpu=2: * gpu:sample; stages begin at conv1, layer2, 10"
    assert str(convoy.Plan(convoy.Mesh((), ()))) == "serial"


def test_files_are_plans_and_none_hides_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mixed.yaml", "lr=0.1.yml", "plan"):
        path = tmp_path / name
        path.write_text(MIXED)
        assert Plan.parse(path) == Plan.parse(str(path)) == Plan.parse(yaml.safe_load(MIXED)) == Plan.parse(MIXED)
    for line in ("sample=2", "serial"):
        (tmp_path / line).write_text("no plan")
        assert str(Plan.parse(line)) == line


def test_auto_needs_the_planner_unless_there_is_one_device() -> None:
    assert Plan.parse("auto", 1) == Plan.parse("serial")
    for num_devices in (None, 2):
        with pytest.raises(ConvoyError, match="planner"):
            Plan.parse("auto", num_devices)


def test_a_plan_does_not_change_with_what_it_was_made_of() -> None:
    strategies = {"x": "filter"}
    plan = Plan(Mesh(("x",), (2,)), (("*", strategies),))
    strategies["x"] = "sample"
    assert plan.strategy("a", "conv") == ("filter",)


def test_stages_begin_at_layers_or_at_equal_work() -> None:
    plan = Plan.parse(STAGED)
    assert (plan.stages, plan.mesh.stage_axis, Mesh(("a",), (2,)).stage_axis) == (("conv1", "layer2", "10"), 0, None)
    assert plan != Plan(plan.mesh, plan.layers) != Plan(plan.mesh, plan.layers, ("conv1", "layer3", "10"))
    first = Plan.parse({"mesh": {"stage": 2}, "stages": ["layer3"]})
    assert first.stages == ("", "layer3")  # the first stage begins with the network
    assert first.to_dict() == {"mesh": {"stage": 2}, "layers": {}, "stages": ["layer3"]}
    assert Plan(first.mesh, (), first.stages) == Plan(first.mesh, (), ("layer3",)) == first
    for text in ("mesh: {stage: 2}\n#", "mesh: {stage: 2}\nlayers: {}", "mesh: {stage: 2}\nstages: []"):
        assert Plan.parse(text) == Plan.parse("stage=2") and Plan.parse(text).stages == ()


def test_every_yaml_reads_back() -> None:
    """Names that YAML readers take for something else, too."""
    draw, total = random.Random(3), 0
    names = ["node", "gpu", "no", "on", "yes", "null", "true", "x-1", "_", "E5", "owt", "stage"]
    pieces = ["features", "0", "1e3", "*", "?", "[1-3]", ".", "no", "~", "#", ": ", "-", "é", "'", '"', "!", "&", "  "]
    for _ in range(120):
        axes = draw.sample(names, draw.randint(0, 3))
        mesh = Mesh(tuple(axes), tuple(draw.choice([1, 2, 3, 8, 1000]) for _ in axes))
        layers = tuple(
            (
                "".join(draw.choices(pieces, k=draw.randint(1, 5))),
                {axis: draw.choice(list(STRATEGIES)) for axis in axes if axis != "stage" and draw.random() < 0.8},
            )
            for _ in range(draw.randint(0, 4))
        )
        number = mesh.sizes[mesh.stage_axis] if mesh.stage_axis is not None and draw.random() < 0.8 else 0
        stages = tuple(draw.choice(["", "7."]) + f"layer{place}.0" for place in range(number))
        try:
            plan = Plan(mesh, layers, stages[draw.randint(0, bool(stages)) :])
        except ConvoyError as error:
            assert any(words in str(error) for words in ("twice", "comes after", "must be text"))
            continue
        total += 1
        again = Plan.parse(plan.to_yaml() + "\n# a plan\n")
        assert again == plan and again.to_yaml() == plan.to_yaml() and "\n" not in str(plan)
        assert [pattern for pattern, _ in again.layers] == [pattern for pattern, _ in plan.layers]
    assert total > 60


LINES = {
    "the plan is empty": ("", "   "),
    "write sample=2": ("sample", "sample==2", "sample: 2", "sample 2"),
    "write sample=4": ("4",),
    "the size of sample is empty": ("sample=",),
    "the size of sample": ("sample=2.0", "sample=-1", "sample=two", "sample=٢", "sample=" + "9" * 5000),
    "the size of axis sample": ("sample=999999999",),
    "the size of stage is 0": ("stage=0",),
    "did you mean sample?": ("sampel=2", "Sample=2", "dp=2,tp=2"),
    "did you mean filter?": ("model=2", "sample=2,filters=2"),
    "did you mean height?": ("spatial=2",),
    "did you mean stage?": ("pp=2,dp=2", "sample=2,stages=2"),
    "two axes stage: write one": ("stage=2,sample=2,stage=2",),
    "replicate, owt or stage": ("nothing=2",),
    "empty is no strategy": ("=2",),
    "nothing between two commas": ("sample=2,", ",sample=2", "sample=2,,filter=2"),
    "put a comma": ("sample=2 filter=2", "sample=2;filter=2", "sample=2 × filter=2"),
    "is no part of a plan": ("sample+2", "mesh: {sample: 2}"),
    "auto stands for what the planner finds": ("auto",),
    "takes no number": ("auto=2", "serial=1"),
    "stands alone": ("auto,sample=2", "serial,sample=2"),
    "there is no plan file plan": ("plan.yaml", "plans/fast"),
}
"""What the refusal says: lines that are no plan."""

DOCUMENTS = {
    "this is empty": ("# nothing\n",),
    "this is a list": ("- sample\n- filter\n",),
    "this is the word": ("sample\nfilter\n",),
    "mesh is missing": ("layers: {}\n\n",),
    "layers is missing": ("mesh: {a: 2}\n#\n",),
    "line 3: the key layer is unknown: did you mean layers?": ("\nmesh: {a: 2}\nlayer: {}\n",),
    "line 1: mesh is": ("mesh: 4\nlayers: {}\n", "mesh: [2, 2]\nlayers: {}\n", "mesh:\nlayers: {}\n"),
    "line 3: the size of axis b is two": ("mesh:\n  a: 2\n  b: two\nlayers: {}\n",),
    "the size of axis a is": tuple(f"mesh: {{a: {size}}}\nlayers: {{}}\n" for size in ("true", "", "'2'", "0", "[2]")),
    "is no name for a mesh axis": ("mesh: {a b: 2}\nlayers: {}\n", "mesh: {0: 2}\nlayers: {}\n"),
    "line 2: the key mesh is there twice": ("mesh: {a: 2}\nmesh: {b: 2}\n",),
    "line 4: the key fc is there twice": ("mesh: {a: 2}\nlayers:\n  fc: {a: filter}\n  fc: {a: sample}\n",),
    "line 2: layers is": tuple(f"mesh: {{a: 2}}\nlayers: {layers}\n" for layers in ("", "filter", "[fc]")),
    "line 3: fc has": tuple(f"mesh: {{a: 2}}\nlayers:\n  fc: {value}\n" for value in ("filter", "", "[filter]")),
    "fc names an axis b": ("mesh: {a: 2}\nlayers:\n  fc: {b: filter}\n",),
    "did you mean gpu?": ("mesh: {gpu: 2}\nlayers:\n  fc:\n    gpus: filter\n",),
    "the mesh has no axes": ("mesh: {}\nlayers: {fc: {b: filter}}\n",),
    "did you mean filter?": ("mesh: {a: 2}\nlayers:\n  fc: {a: fliter}\n",),
    "is no strategy": tuple(
        f"mesh: {{a: 2}}\nlayers:\n  fc: {{a: {word}}}\n" for word in ("2", "", "{b: c}", "pipeline")
    ),
    "a pattern must be text": ("mesh: {a: 2}\nlayers:\n  '': {a: filter}\n",),
    "a key must be a plain word": ("mesh: {a: 2}\nlayers:\n  ? [x]\n  : {a: filter}\n",),
    "put fc.* above it": ("mesh: {a: 2}\nlayers:\n  '*': {a: filter}\n  fc.*: {a: sample}\n",),
    "in quotes: '*'": ("mesh: {a: 2}\nlayers:\n  *: {a: filter}\n",),
    "no YAML": ("mesh: {a: 2\nlayers: {}\n", "mesh: {a: 2}\n---\nlayers: {}\n", "mesh: \x00\n", "[" * 1500 + "\n"),
    "* has sample on axis stage": ("mesh: {stage: 2}\nlayers:\n  '*': {stage: sample}\n",),
    "did you mean stages?": ("mesh: {stage: 2}\nstage: [fc]\n",),
    "line 2: stages is": tuple(f"mesh: {{stage: 2}}\nstages: {stages}\n" for stages in ("", "fc", "{fc: 2}")),
    "needs an axis stage": ("mesh: {a: 2}\nlayers: {}\nstages: [x, y]\n",),
    "2 of them, or 1 without": ("mesh: {stage: 2}\nstages: [a, b, c]\n",),
    "two stages begin at a": ("mesh: {stage: 2}\nstages: [a, a]\n",),
    "a stage begins at empty": ("mesh: {stage: 2}\nstages: [a, ~]\n",),
    "is no layer's name": ("mesh: {stage: 2}\nstages: [a, [b]]\n", "mesh: {stage: 2}\nstages: [a, 'b*']\n"),
}
"""The same of files; where a line is named, it comes first."""

MAPPINGS: list[Any] = [
    *({}, {"mesh": {}}, {1: 2}, {"mesh": {1: 2}, "layers": {}}, {"mesh": {"a": 2.0}, "layers": {}}),
    *({"mesh": {"a": True}, "layers": {}}, {"mesh": {"a": 2}, "layers": []}, {"mesh": {"stage": 2}, "layers": None}),
    *({"mesh": {"a": 2}, "layers": {name: value}} for name, value in ((3, {"a": "filter"}), ("x", {3: "filter"}))),
    *({"mesh": {"a": 2}, "layers": {"x": value}} for value in ({"a": None}, "filter")),
    *({"mesh": {"stage": 2}, "stages": stages} for stages in ("fc", [1.5], [True], {"fc"})),
]


def refusal(plan: Any) -> str:
    """The sentence that refuses a plan: one line that says what to change."""
    with pytest.raises(ConvoyError) as caught:
        Plan.parse(plan)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 330 and ": " in text, text
    return text


def test_what_is_no_plan_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, lines in LINES.items():
        for line in lines:
            assert words in refusal(line), line
    path = tmp_path / "plan.yaml"
    for words, documents in DOCUMENTS.items():
        for document in documents:
            path.write_text(document)
            sentence = refusal(path)
            assert sentence.startswith(str(path)) and words in sentence, document
    for mapping in MAPPINGS:
        assert refusal(mapping).startswith("the plan: "), mapping
    for value in (None, 4, 2.5, ["sample=2"], object, b"sample=2"):
        assert "a plan is text, a YAML file or a mapping" in refusal(value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "is a folder" in refusal(tmp_path)
    assert "there is no plan file" in refusal(tmp_path / "none.yaml")
    assert "cannot read the plan file" in refusal(Path("a\x00b.yaml"))
    assert "not a text file in UTF-8" in refusal(tmp_path / "binary.yaml")


def test_plans_in_python_are_looked_at_too() -> None:
    one: Any = {"a": "filter"}
    for names, sizes, layers, words in (
        (("a",), (2, 2), (), "1 names and 2 sizes"),
        (("a", "a"), (2, 2), (), "two axes a"),
        (("a",), (0,), (), "the size of axis a is 0"),
        (("a,b",), (2,), (), "no name for a mesh axis"),
        (("a",), (2,), (("*", {"b": "filter"}),), "an axis b"),
        (("a",), (2,), (("x", one), ("x", one)), "twice"),
        (("a",), (2,), (("x.*", one), ("x.y.*", one)), "comes after"),
    ):
        with pytest.raises(ConvoyError, match=words):
            Plan(Mesh(names, sizes), layers)
    stages: Any
    for stages in (("a", "b", "c"), ("a", "a"), ("a", ""), (None,), "ab"):
        with pytest.raises(ConvoyError, match="stage"):
            Plan(Mesh(("stage",), (2,)), (), stages)
    for patterns in (("x.?", "x.*"), ("x.[12]", "x.*"), ("x.*", "*"), ("a", "*a")):  # which can both match
        Plan(Mesh(("a",), (2,)), tuple((pattern, one) for pattern in patterns))


def test_aliases_cannot_blow_up() -> None:
    lists = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12))
    maps = "\n".join(f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(10))}}}" for i in range(1, 12))
    assert "unknown" in refusal(f"a0: &a0 [x]\n{lists}\n")
    assert "unknown" in refusal(f"a0: &a0 {{x: y}}\n{maps}\n")
