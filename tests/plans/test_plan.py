"""The forms of a plan, what they mean, and that each reads back as it was written."""

import itertools
import pickle
import random

import pytest
import yaml

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


@pytest.mark.parametrize(
    ("text", "names", "sizes", "strategies"),
    [
        ("sample=4", ("sample",), (4,), ("sample",)),
        ("filter=2", ("filter",), (2,), ("filter",)),
        ("channel=2", ("channel",), (2,), ("channel",)),
        ("height=3", ("height",), (3,), ("height",)),
        ("width=2", ("width",), (2,), ("width",)),
        ("replicate=2", ("replicate",), (2,), ("replicate",)),
        ("sample=2,filter=2", ("sample", "filter"), (2, 2), ("sample", "filter")),
        ("filter=2,sample=3", ("filter", "sample"), (2, 3), ("filter", "sample")),
        (" sample = 2 , height = 2 ", ("sample", "height"), (2, 2), ("sample", "height")),
        ("sample=2,sample=2", ("sample", "sample2"), (2, 2), ("sample", "sample")),
        ("filter=2,sample=2,filter=2,filter=1", ("filter", "sample", "filter2", "filter3"), (2, 2, 2, 1), None),
        ("sample=1", ("sample",), (1,), ("sample",)),
        ("stage=2", ("stage",), (2,), ("replicate",)),
        ("stage=2,sample=3", ("stage", "sample"), (2, 3), ("replicate", "sample")),
        (
            "sample=2,filter=2,stage=3,sample=2",
            ("sample", "filter", "stage", "sample2"),
            (2, 2, 3, 2),
            ("sample", "filter", "replicate", "sample"),
        ),
        ("serial", (), (), ()),
        (" serial\n", (), (), ()),
    ],
)
def test_one_line(text, names, sizes, strategies):
    plan = Plan.parse(text)
    assert plan.mesh == Mesh(names, sizes)
    for layer in ("", "conv1", "features.0.conv"):
        for op in ("conv", "linear"):
            assert strategies is None or plan.strategy(layer, op) == strategies
    assert Plan.parse(str(plan)) == Plan.parse(plan_text(plan)) == plan
    assert Plan.parse(plan.to_yaml()) == plan


def test_one_weird_trick_is_samples_for_convolutions_and_filters_for_linear_layers():
    plan = Plan.parse("owt=4")
    assert plan.strategy("features.0", "conv") == ("sample",)
    assert plan.strategy("classifier.1", "linear") == ("filter",)
    assert plan.strategy("features.1", "batch_norm") == ("sample",)
    assert str(plan) == "owt=4"
    both = Plan.parse("owt=2,sample=2")
    assert both.strategy("features.0", "conv") == ("sample", "sample")
    assert both.strategy("classifier.1", "linear") == ("filter", "sample")


def test_the_first_pattern_that_matches_wins():
    plan = Plan.parse(MIXED)
    assert plan.mesh == Mesh(("node", "gpu"), (2, 3))
    assert plan.strategy("features.0", "conv") == ("sample", "channel")
    assert plan.strategy("features.1", "conv") == ("sample", "filter")
    assert plan.strategy("features.0.conv", "conv") == ("sample", "filter")
    assert plan.strategy("classifier.6", "linear") == ("filter", "filter")
    assert plan.pattern("features.3") == "features.*"


@pytest.mark.parametrize("layer", ["", "stem", "features", "Features.0", "classifier"])
def test_a_layer_that_nothing_matches_is_replicated(layer):
    plan = Plan.parse(MIXED)
    assert plan.pattern(layer) is None
    assert plan.strategy(layer, "conv") == ("replicate", "replicate")


def test_an_axis_that_is_not_named_is_replicated():
    plan = Plan(Mesh(("node", "gpu"), (2, 2)), (("fc*", {"gpu": "filter"}), ("*", {"node": "sample"})))
    assert plan.strategy("fc1", "linear") == ("replicate", "filter")
    assert plan.strategy("conv1", "conv") == ("sample", "replicate")


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        ("*", ["", "a", "a.b.c"], []),
        ("features.*", ["features.0", "features.0.conv", "features."], ["features", "feature.0", "x.features.0"]),
        ("features.?", ["features.0"], ["features.10", "features"]),
        ("layer[12].*", ["layer1.0.conv1", "layer2.x"], ["layer3.0"]),
        ("*.conv1", ["layer1.0.conv1", "a.conv1"], ["conv1", "a.conv12"]),
        ("*.fc[!1]", ["a.fc2"], ["a.fc1"]),
        ("head", ["head"], ["head.0", "Head"]),
    ],
)
def test_patterns(pattern, matches, others):
    plan = Plan.parse({"mesh": {"x": 2}, "layers": {pattern: {"x": "filter"}}})
    assert [name for name in matches + others if plan.pattern(name)] == matches


def test_a_plan_is_read_from_a_file(tmp_path):
    path = tmp_path / "mixed.yaml"
    path.write_text(MIXED)
    assert Plan.parse(path) == Plan.parse(str(path)) == Plan.parse(MIXED) == Plan.parse(yaml.safe_load(MIXED))
    other = tmp_path / "lr=0.1.yml"
    other.write_text(MIXED)
    assert Plan.parse(str(other)) == Plan.parse(MIXED)
    bare = tmp_path / "plan"
    bare.write_text(MIXED)
    assert Plan.parse(str(bare)) == Plan.parse(MIXED)


def test_a_file_beside_us_with_the_name_of_a_plan_does_not_hide_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sample=2").write_text("no plan")
    (tmp_path / "serial").write_text("no plan")
    assert str(Plan.parse("sample=2")) == "sample=2"
    assert str(Plan.parse("serial")) == "serial"


def test_json_is_yaml():
    assert Plan.parse('{"mesh": {"sample": 2}, "layers": {"*": {"sample": "sample"}}}') == Plan.parse("sample=2")


def test_words_that_other_yaml_readers_take_for_something_else(tmp_path):
    text = (
        "mesh: {on: 2, no: 2}\nlayers:\n  y: {on: filter}\n  'no': {no: sample}\n  1e3: {no: height}\n  0: {on: owt}\n"
    )
    plan = Plan.parse(text)
    assert plan.mesh.names == ("on", "no")
    assert [pattern for pattern, _ in plan.layers] == ["y", "no", "1e3", "0"]
    assert Plan.parse(plan.to_yaml()) == plan


def test_auto_needs_the_planner_unless_there_is_one_device():
    assert Plan.parse("auto", 1) == Plan.parse("serial")
    for num_devices in (None, 2):
        with pytest.raises(ConvoyError, match="planner"):
            Plan.parse("auto", num_devices)


def test_a_plan_is_itself_and_can_be_compared_hashed_and_sent():
    plan = Plan.parse(MIXED)
    assert Plan.parse(plan) is plan
    assert hash(plan) == hash(Plan.parse(MIXED))
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert plan != Plan.parse("sample=6")


def test_a_plan_does_not_change_with_what_it_was_made_of():
    strategies = {"x": "filter"}
    plan = Plan(Mesh(("x",), (2,)), (("*", strategies),))
    strategies["x"] = "sample"
    assert plan.strategy("a", "conv") == ("filter",)


def test_the_yaml_reads_as_people_would_write_it():
    assert Plan.parse(MIXED).to_yaml() == (
        "mesh: {node: 2, gpu: 3}\n"
        "layers:\n"
        "  features.0: {node: sample, gpu: channel}\n"
        "  features.*: {node: sample, gpu: filter}\n"
        "  classifier.*: {node: filter, gpu: filter}\n"
    )
    assert Plan.parse("sample=2").to_yaml() == "mesh: {sample: 2}\nlayers:\n  '*': {sample: sample}\n"


def test_a_plan_without_a_text_of_its_own_is_one_line_for_people():
    assert str(Plan.parse(MIXED)) == (
        "node=2 × gpu=3: features.0 node:sample,gpu:channel; features.* node:sample,gpu:filter; "
        "classifier.* node:filter,gpu:filter"
    )
    assert str(Plan(Mesh(("x",), (2,)))) == "x=2: every layer replicate"


def test_every_line_reads_back():
    words = [*STRATEGIES, *WORDS]
    for count in (1, 2, 3):
        for chosen in set(itertools.permutations(words, count)):
            text = ",".join(f"{strategy}={size}" for size, strategy in enumerate(chosen, 1))
            plan = Plan.parse(text)
            assert str(plan) == text
            assert Plan.parse(plan.to_dict()) == plan
            assert plan.strategy("a", "matmul") == tuple(
                {"owt": "sample", "stage": "replicate"}.get(s, s) for s in chosen
            )


def test_every_yaml_reads_back():
    rng = random.Random(3)
    names = ["node", "gpu", "no", "yes", "null", "true", "x-1", "_", "E5", "owt", "stage"]
    pieces = [
        "features",
        "0",
        "*",
        "?",
        "[1-3]",
        ".",
        "layer",
        "no",
        "~",
        "#",
        ": ",
        "-",
        "é",
        "'",
        '"',
        "!",
        "&",
        "  ",
    ]
    made = 0
    for _ in range(400):
        axes = rng.sample(names, rng.randint(0, 3))
        mesh = Mesh(tuple(axes), tuple(rng.choice([1, 2, 3, 8, 1000]) for _ in axes))
        layers = []
        for _ in range(rng.randint(0, 4)):
            pattern = "".join(rng.choices(pieces, k=rng.randint(1, 5)))
            given = {axis: rng.choice(list(STRATEGIES)) for axis in axes if axis != "stage" and rng.random() < 0.8}
            layers.append((pattern, given))
        number = mesh.sizes[mesh.stage_axis] if mesh.stage_axis is not None and rng.random() < 0.8 else 0
        stages = tuple(rng.choice(["", "7."]) + f"layer{place}.0" for place in range(number))
        try:
            plan = Plan(mesh, tuple(layers), stages[rng.randint(0, bool(stages)) :])
        except ConvoyError as error:
            assert any(words in str(error) for words in ("twice", "comes after", "must be text"))
            continue
        made += 1
        again = Plan.parse(plan.to_yaml() + "\n# a plan\n")
        assert again == plan
        assert [pattern for pattern, _ in again.layers] == [pattern for pattern, _ in plan.layers]
        assert again.to_yaml() == plan.to_yaml()
        assert "\n" not in str(plan)
    assert made > 200


@pytest.mark.parametrize(
    ("plan", "parts"),
    [
        ("serial", 1),
        ("sample=3", 3),
        ("sample=2,filter=2", 2),
        ("filter=2,owt=3", 3),
        ("sample=2,height=2,sample=3", 6),
        ("filter=4", 1),
        ("stage=3", 1),
        ("stage=3,sample=2", 2),
        ({"mesh": {"a": 2, "b": 5}, "layers": {"conv": {"a": "filter"}, "*": {"a": "sample", "b": "filter"}}}, 2),
    ],
)
def test_parts_of_the_batch(plan, parts):
    assert Plan.parse(plan).parts == parts


STAGED = """
mesh: {stage: 3, gpu: 2}
layers:
  '*': {gpu: sample}
stages: [conv1, layer2, 10]  # a layer's name may be a number
"""


def test_stages_begin_at_layers() -> None:
    plan = Plan.parse(STAGED)
    assert plan.stages == ("conv1", "layer2", "10")
    assert plan.mesh.stage_axis == 0
    assert plan.strategy("layer2.0", "conv") == ("replicate", "sample")
    assert str(plan) == "stage=3 × gpu=2: * gpu:sample; stages begin at conv1, layer2, 10"
    assert (
        plan_text(plan)
        == plan.to_yaml()
        == ("mesh: {stage: 3, gpu: 2}\nlayers:\n  '*': {gpu: sample}\nstages: [conv1, layer2, '10']\n")
    )
    assert Plan.parse(plan_text(plan)) == Plan.parse(plan.to_dict()) == plan
    assert hash(Plan.parse(plan_text(plan))) == hash(plan)
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert plan != Plan(plan.mesh, plan.layers)
    assert plan != Plan(plan.mesh, plan.layers, ("conv1", "layer3", "10"))


def test_the_first_stage_begins_with_the_network() -> None:
    plan = Plan.parse({"mesh": {"stage": 2}, "stages": ["layer3"]})
    assert plan.stages == ("", "layer3")
    assert plan.to_dict() == {"mesh": {"stage": 2}, "layers": {}, "stages": ["layer3"]}
    assert Plan(plan.mesh, (), plan.stages) == Plan(plan.mesh, (), ("layer3",)) == plan
    assert str(plan) == "stage=2; stages begin at layer3"
    assert Plan.parse({"mesh": {"stage": 2}, "stages": [0, 3]}).stages == ("0", "3")


def test_cuts_of_equal_work_are_not_written() -> None:
    for text in ("mesh: {stage: 2}\n#", "mesh: {stage: 2}\nlayers: {}", "mesh: {stage: 2}\nstages: []"):
        assert Plan.parse(text) == Plan.parse("stage=2")
    assert Plan.parse("stage=2").stages == ()
    assert Plan.parse({"mesh": {"stage": 1}, "stages": ["conv1"]}).stages == ("conv1",)


def test_a_mesh_has_one_axis_of_stages_or_none() -> None:
    assert Mesh(("sample", "stage"), (2, 3)).stage_axis == 1
    assert Mesh(("sample", "filter"), (2, 3)).stage_axis is None
    assert Mesh((), ()).stage_axis is None


def test_plans_are_public() -> None:
    import convoy

    assert convoy.Plan is Plan
    assert str(convoy.Plan(convoy.Mesh((), ()))) == "serial"
