"""Wrong plans: each ends in one sentence that says what to change."""

from pathlib import Path

import pytest

from convoy.errors import ConvoyError
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan

LINES = [
    ("", "the plan is empty"),
    ("   ", "the plan is empty"),
    ("sample", "write sample=2"),
    ("height,sample=2", "write height=2"),
    ("4", "write sample=4"),
    ("sample=", "the size of sample is empty"),
    ("sample=two", "the size of sample is two"),
    ("sample=2.0", "the size of sample is 2.0"),
    ("sample=0", "the size of sample is 0"),
    ("sample=-1", "the size of sample is -1"),
    ("sample=1e1", "the size of sample is 1e1"),
    ("sample=٢", "the size of sample"),
    ("sample=" + "9" * 5000, "the size of sample"),
    ("sample=999999999", "the size of axis sample"),
    ("sampel=2", "did you mean sample?"),
    ("Sample=2", "did you mean sample?"),
    ("data=2", "did you mean sample?"),
    ("dp=2,tp=2", "did you mean sample?"),
    ("model=2", "did you mean filter?"),
    ("sample=2,filters=2", "did you mean filter?"),
    ("spatial=2", "did you mean height?"),
    ("cols=2", "did you mean width?"),
    ("weird=2", "did you mean owt?"),
    ("pipeline=2", "did you mean stage?"),
    ("pp=2,dp=2", "did you mean stage?"),
    ("sample=2,stages=2", "did you mean stage?"),
    ("Stage=2", "did you mean stage?"),
    ("stage", "write stage=2"),
    ("sample=2,stage", "write stage=2"),
    ("stage=", "the size of stage is empty"),
    ("stage=0", "the size of stage is 0"),
    ("stage:2", "write stage=2 instead"),
    ("stage=2,sample=2,stage=2", "two axes stage: write one"),
    ("nothing=2", "replicate, owt or stage"),
    ("=2", "empty is no strategy"),
    ("sample=2,", "nothing between two commas or at an end"),
    (",sample=2", "nothing between two commas or at an end"),
    ("sample=2,,filter=2", "nothing between two commas"),
    ("sample=2 filter=2", "put a comma"),
    ("sample=2;filter=2", "put a comma"),
    ("sample=2xfilter=2", "put a comma"),
    ("sample=2 × filter=2", "put a comma"),
    ("sample==2", "write sample=2 instead"),
    ("sample:2", "write sample=2 instead"),
    ("sample: 2", "write sample=2 instead"),
    ("sample 2", "write sample=2 instead"),
    ("sample+2", "is no part of a plan"),
    ("auto", "auto stands for what the planner finds"),
    ("auto=2", "auto takes no number"),
    ("auto,sample=2", "auto stands alone"),
    ("serial=1", "serial takes no number"),
    ("serial,sample=2", "serial stands alone"),
    ("plan.yaml", "there is no plan file plan.yaml"),
    ("plans/fast", "there is no plan file plans/fast"),
    ("mesh: {sample: 2}", "is no part of a plan"),
]

DOCUMENTS = [
    ("# nothing\n", ["this is empty", "mesh and layers"]),
    ("- sample\n- filter\n", ["this is a list"]),
    ("sample\nfilter\n", ["this is the word sample filter"]),
    ("layers: {}\n\n", ["mesh is missing"]),
    ("mesh: {a: 2}\n#\n", ["layers is missing", "{a: sample}"]),
    ("\nmesh: {a: 2}\nlayer: {}\n", ["line 3", "the key layer is unknown: did you mean layers?"]),
    ("mesh: {a: 2}\nlayers: {}\ndevices: 4\n", ["line 3", "the key devices is unknown", "mesh and layers"]),
    ("mesh: 4\nlayers: {}\n", ["line 1", "mesh is the word 4", "{sample: 2}"]),
    ("mesh: [2, 2]\nlayers: {}\n", ["line 1", "mesh is a list"]),
    ("mesh:\nlayers: {}\n", ["line 1", "mesh is empty"]),
    ("mesh: sample=2\nlayers: {}\n", ["line 1", "mesh is the word sample=2"]),
    ("mesh:\n  a: 2\n  b: two\nlayers: {}\n", ["line 3", "the size of axis b is two"]),
    ("mesh: {a: 0}\nlayers: {}\n", ["the size of axis a is 0"]),
    ("mesh: {a: -2}\nlayers: {}\n", ["the size of axis a is -2"]),
    ("mesh: {a: 2.0}\nlayers: {}\n", ["the size of axis a is 2.0"]),
    ("mesh: {a: true}\nlayers: {}\n", ["the size of axis a is true"]),
    ("mesh: {a: }\nlayers: {}\n", ["the size of axis a is empty"]),
    ("mesh: {a: '2'}\nlayers: {}\n", ["the size of axis a is 2 in quotes"]),
    ("mesh: {a: [2]}\nlayers: {}\n", ["the size of axis a is"]),
    ("mesh: {0: 2}\nlayers: {}\n", ["'0' is no name for a mesh axis"]),
    ("mesh: {a b: 2}\nlayers: {}\n", ["'a b' is no name for a mesh axis"]),
    ("mesh: {a: 2, a: 3}\nlayers: {}\n", ["line 1", "the key a is there twice"]),
    ("mesh: {a: 2}\nmesh: {b: 2}\n", ["line 2", "the key mesh is there twice"]),
    ("mesh: {a: 2}\nlayers:\n", ["line 2", "layers is empty"]),
    ("mesh: {a: 2}\nlayers: filter\n", ["line 2", "layers is the word filter"]),
    ("mesh: {a: 2}\nlayers:\n  - fc: {a: filter}\n", ["line 2", "layers is a list"]),
    ("mesh: {a: 2}\nlayers:\n  fc: filter\n", ["line 3", "fc has filter", "{a: sample}"]),
    ("mesh: {a: 2}\nlayers:\n  fc:\n", ["line 3", "fc has nothing"]),
    ("mesh: {a: 2}\nlayers:\n  fc: [filter]\n", ["line 3", "fc has"]),
    ("mesh: {a: 2}\nlayers:\n  fc: {b: filter}\n", ["line 3", "an axis b that is not in the mesh", "the mesh has a"]),
    ("mesh: {gpu: 2}\nlayers:\n  fc:\n    gpus: filter\n", ["line 4", "axis gpus", "did you mean gpu?"]),
    ("mesh: {}\nlayers: {fc: {b: filter}}\n", ["an axis b", "the mesh has no axes"]),
    ("mesh: {a: 2}\nlayers:\n  fc: {a: fliter}\n", ["line 3", "fc on axis a", "did you mean filter?"]),
    ("mesh: {a: 2}\nlayers:\n  fc: {a: 2}\n", ["line 3", "2 is no strategy"]),
    ("mesh: {a: 2}\nlayers:\n  fc: {a: }\n", ["line 3", "empty is no strategy"]),
    ("mesh: {a: 2}\nlayers:\n  fc: {a: {b: c}}\n", ["line 3", "is no strategy"]),
    ("mesh: {a: 2}\nlayers:\n  fc: {a: [filter, sample]}\n", ["line 3", "is no strategy"]),
    ("mesh: {a: 2}\nlayers:\n  '': {a: filter}\n", ["line 3", "a pattern must be text"]),
    ("mesh: {a: 2}\nlayers:\n  ? [x]\n  : {a: filter}\n", ["line 3", "a key must be a plain word"]),
    ("mesh: {a: 2}\nlayers:\n  fc: {a: filter}\n  fc: {a: sample}\n", ["line 4", "the key fc is there twice"]),
    (
        "mesh: {a: 2}\nlayers:\n  '*': {a: filter}\n  fc.*: {a: sample}\n",
        ["line 4", "fc.* comes after *", "put fc.* above it"],
    ),
    ("mesh: {a: 2}\nlayers:\n  *: {a: filter}\n", ["line 3", "no YAML", "in quotes: '*'"]),
    ("mesh: {a: 2\nlayers: {}\n", ["line", "no YAML"]),
    ("mesh: {a: 2}\nlayers:\n\tfc: {a: filter}\n", ["line 3", "no YAML"]),
    ("mesh: {a: 2}\n---\nlayers: {}\n", ["line 2", "no YAML"]),
    ("mesh: &m {a: *m}\nlayers: {}\n", ["the size of axis a"]),
    ("mesh: \x00\nlayers: {}\n", ["no YAML"]),
    ("a: &a [*a]\nb: *a\n", ["the key a is unknown"]),
    ("[" * 5000 + "\n", ["no YAML"]),
    ("mesh: {stage: 2, a: 2}\n#\n", ["layers is missing", "{a: sample}"]),
    ("mesh: {stage: 2, a: 2}\nlayers: {fc: filter}\n", ["fc has filter", "write {a: sample}"]),
    ("mesh: {stage: 2}\nlayers:\n  '*': {stage: sample}\n", ["line 3", "* has sample on axis stage", "leave it out"]),
    ("mesh: {a: 2}\nlayers:\n  fc: {a: stage}\n", ["line 3", "fc on axis a", "as in stage=2"]),
    ("mesh: {a: 2}\nlayers:\n  fc: {a: pipeline}\n", ["line 3", "pipeline is no strategy of a layer", "stage=2"]),
    ("mesh: {stage: 2}\nstage: [fc]\n", ["line 2", "the key stage is unknown: did you mean stages?"]),
    ("mesh: {stage: 2}\nstages:\n", ["line 2", "stages is empty", "[conv1, layer3]"]),
    ("mesh: {stage: 2}\nstages: fc\n", ["line 2", "stages is the word fc", "[conv1, layer3]"]),
    ("mesh: {stage: 2}\nstages: {fc: 2}\n", ["line 2", "stages is a mapping"]),
    ("mesh: {a: 2}\nlayers: {}\nstages: [x, y]\n", ["line 3", "needs an axis stage", "{stage: 2}"]),
    ("mesh: {a: 2}\nlayers: {}\nstages: [fc]\n", ["line 3", "needs an axis stage", "{stage: 2}"]),
    ("mesh: {stage: 2}\nstages: [a, b, c]\n", ["line 2", "names 3 layers", "has size 2", "2 of them, or 1 without"]),
    ("mesh: {stage: 4}\nstages: [a, b]\n", ["line 2", "names 2 layers", "has size 4", "4 of them, or 3 without"]),
    ("mesh: {stage: 1}\nstages: [a, b]\n", ["line 2", "names 2 layers", "has size 1"]),
    ("mesh: {stage: 2}\nstages: [a, a]\n", ["line 2", "two stages begin at a"]),
    ("mesh: {stage: 2}\nstages: [a, ~]\n", ["line 2", "a stage begins at empty", "e.g. layer3"]),
    ("mesh: {stage: 2}\nstages: ['']\n", ["line 2", "a stage begins at empty"]),
    ("mesh: {stage: 2}\nstages: [a, [b]]\n", ["line 2", "is no layer's name"]),
    ("mesh: {stage: 2}\nstages: [a, 'b*']\n", ["line 2", "a stage begins at b*, which is no layer's name"]),
]

MAPPINGS = [
    {},
    {"mesh": {}},
    {"mesh": {"a": 2}, "layers": []},
    {"mesh": {"a": 2.0}, "layers": {}},
    {"mesh": {"a": True}, "layers": {}},
    {"mesh": {1: 2}, "layers": {}},
    {"mesh": {"a": 2}, "layers": {3: {"a": "filter"}}},
    {"mesh": {"a": 2}, "layers": {"x": {3: "filter"}}},
    {"mesh": {"a": 2}, "layers": {"x": {"a": None}}},
    {"mesh": {"a": 2}, "layers": {"x": "filter"}},
    {1: 2},
    {"mesh": {"stage": 2}, "stages": "fc"},
    {"mesh": {"stage": 2}, "stages": [1.5]},
    {"mesh": {"stage": 2}, "stages": [True]},
    {"mesh": {"stage": 2}, "stages": {"fc"}},
    {"mesh": {"stage": 2}, "layers": None},
]


def _sentence(plan) -> str:
    with pytest.raises(ConvoyError) as caught:
        Plan.parse(plan)
    text = str(caught.value)
    assert "\n" not in text, text
    assert len(text) < 330, text
    assert ": " in text, text
    return text


def test_there_are_enough():
    assert len(LINES) + len(DOCUMENTS) + len(MAPPINGS) >= 100


@pytest.mark.parametrize(("text", "words"), LINES)
def test_wrong_lines(text, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in _sentence(text)


@pytest.mark.parametrize(("text", "words"), DOCUMENTS)
def test_wrong_documents(text, words, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    sentence = _sentence(path)
    assert sentence.startswith(str(path))
    for part in words:
        assert part in sentence


@pytest.mark.parametrize("document", MAPPINGS)
def test_wrong_mappings(document):
    assert _sentence(document).startswith("the plan: ")


@pytest.mark.parametrize("plan", [None, 4, 2.5, ["sample=2"], ("sample",), object, b"sample=2"])
def test_what_is_no_plan_at_all(plan):
    assert "a plan is text, a YAML file or a mapping" in _sentence(plan)


def test_files_that_cannot_be_read(tmp_path):
    assert "is a folder" in _sentence(tmp_path)
    assert "there is no plan file" in _sentence(tmp_path / "none.yaml")
    assert "cannot read the plan file" in _sentence(Path("a\x00b.yaml"))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not a text file in UTF-8" in _sentence(tmp_path / "binary.yaml")
    (tmp_path / "picture.yaml").write_bytes(b"\x89PNG")
    assert "not a text file in UTF-8" in _sentence(tmp_path / "picture.yaml")


@pytest.mark.parametrize(
    ("mesh", "layers", "words"),
    [
        (Mesh(("a",), (2, 2)), (), "1 names and 2 sizes"),
        (Mesh(("a", "a"), (2, 2)), (), "two axes a"),
        (Mesh(("a",), (0,)), (), "the size of axis a is 0"),
        (Mesh(("a,b",), (2,)), (), "no name for a mesh axis"),
        (Mesh(("a",), (2,)), (("*", {"b": "filter"}),), "an axis b"),
        (Mesh(("a",), (2,)), (("*", {"a": "filters"}),), "did you mean filter?"),
        (Mesh(("a",), (2,)), (("x", {"a": "filter"}), ("x", {"a": "sample"})), "twice"),
        (Mesh(("a",), (2,)), (("x.*", {"a": "filter"}), ("x.y.*", {"a": "sample"})), "comes after"),
        (Mesh(("stage",), (2,)), (("*", {"stage": "replicate"}),), "has replicate on axis stage"),
    ],
)
def test_wrong_plans_in_python(mesh, layers, words):
    with pytest.raises(ConvoyError, match=words):
        Plan(mesh, layers)


@pytest.mark.parametrize("stages", [("a", "b", "c"), ("a", "a"), ("a", ""), (None,), "ab"])
def test_wrong_stages_in_python(stages) -> None:
    with pytest.raises(ConvoyError, match="stage"):
        Plan(Mesh(("stage",), (2,)), (), stages)


@pytest.mark.parametrize("patterns", [("x.?", "x.*"), ("x.[12]", "x.*"), ("x.*", "*"), ("a.*", "b.*"), ("a", "*a")])
def test_patterns_that_can_both_match_are_not_refused(patterns):
    Plan(Mesh(("a",), (2,)), tuple((pattern, {"a": "filter"}) for pattern in patterns))


def test_aliases_cannot_blow_up(tmp_path):
    levels = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12))
    assert "unknown" in _sentence(f"a0: &a0 [x]\n{levels}\n")
    maps = "\n".join(f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(10))}}}" for i in range(1, 12))
    assert "unknown" in _sentence(f"a0: &a0 {{x: y}}\n{maps}\n")
