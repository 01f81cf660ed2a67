"""The forms of a plan, what they mean, that each reads back as it was written, and what is refused."""

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convoy.errors import ConvoyError
from convoy.plans.mesh import Mesh
from convoy.plans.plan import STRATEGIES, WORDS, Plan, plan_text

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

Meaning = tuple[dict[str, int], tuple[str, ...], tuple[str, ...], int]
MEANINGS: dict[str, Meaning] = {
    "serial": ({}, (), (), 1),
    " sample = 2 , height = 2 ": ({"sample": 2, "height": 2}, ("sample", "height"), ("sample", "height"), 2),
    "sample=2,sample=2": ({"sample": 2, "sample2": 2}, ("sample", "sample"), ("sample", "sample"), 4),
    "owt=2,sample=2": ({"owt": 2, "sample": 2}, ("sample", "sample"), ("filter", "sample"), 4),
    "stage=2,sample=3": ({"stage": 2, "sample": 3}, ("replicate", "sample"), ("replicate", "sample"), 3),
    '{"mesh": {"sample": 2}, "layers": {"*": {"sample": "sample"}}}': ({"sample": 2}, ("sample",), ("sample",), 2),
    MIXED: ({"node": 2, "gpu": 3}, ("sample", "channel"), ("sample", "channel"), 2),
    STAGED: ({"stage": 3, "gpu": 2}, ("replicate", "sample"), ("replicate", "sample"), 2),
}
"""Text: axes and their sizes, strategies of `features.0` as a convolution and as a linear layer, parts of the batch."""


def test_texts_have_their_meanings_and_every_form_reads_back() -> None:
    for text, (axes, conv, linear, parts) in MEANINGS.items():
        plan = Plan.parse(text)
        assert (plan.mesh, plan.parts) == (Mesh(tuple(axes), tuple(axes.values())), parts), text
        assert (plan.strategy("features.0", "conv"), plan.strategy("features.0", "linear")) == (conv, linear), text
        for again in (plan_text(plan), plan.to_yaml(), plan.to_dict(), plan, pickle.loads(pickle.dumps(plan))):
            assert Plan.parse(again) == plan and hash(Plan.parse(again)) == hash(plan), text
    for strategies in itertools.permutations([*STRATEGIES, *WORDS], 2):
        text = ",".join(f"{strategy}={size}" for size, strategy in enumerate(strategies, 1))
        if strategies != ("stage", "stage"):
            assert str(Plan.parse(text)) == text and Plan.parse(Plan.parse(text).to_dict()) == Plan.parse(text)
    layers = {"features.0.conv": ("sample", "filter"), "features": ("replicate", "replicate")}  # the first pattern wins
    assert {layer: Plan.parse(MIXED).strategy(layer, "conv") for layer in layers} == layers
    assert Plan.parse("auto", 1) == Plan.parse("serial") == Plan(Mesh((), ()))
    assert str(Plan.parse(MIXED)) == (
        "node=2 × gpu=3: features.0 node:sample,gpu:channel; features.* node:sample,gpu:filter; "
        "classifier.* node:filter,gpu:filter"
    )
    assert str(Plan(Mesh(("x",), (2,)))) == "x=2: every layer replicate"
    assert str(Plan.parse(STAGED)) == "stage=3 × gpu=2: * gpu:sample; stages begin at conv1, layer2, 10"
    mesh: Any = Mesh(["node", "gpu"], [2, np.int64(3)])
    rows = {pattern: dict(strategies) for pattern, strategies in Plan.parse(MIXED).layers}
    again: Any = Plan(mesh, rows)
    assert (
        again == Plan.parse(MIXED) and hash(again) == hash(Plan.parse(MIXED)) and Plan.parse(again.to_yaml()) == again
    )
    first = Plan.parse({"mesh": {"stage": 2}, "stages": ["layer3"]})
    assert first.stages == ("", "layer3") and Plan(first.mesh, (), ("layer3",)) == first  # begins with the network


def test_a_file_is_a_plan_and_hides_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mixed.yaml", "plan"):
        (tmp_path / name).write_text(MIXED)
        assert Plan.parse(tmp_path / name) == Plan.parse(str(tmp_path / name)) == Plan.parse(MIXED)
    (tmp_path / "sample=2").write_text("no plan")
    assert str(Plan.parse("sample=2")) == "sample=2"


LINES: dict[str, list[Any]] = {
    "write sample=2": ["", "sample", "sample==2", "sample=2 filter=2"],
    "the size of axis sample": [f"sample={size}" for size in ("", "2.0", "-1", "٢", "9" * 5000)],
    "did you mean sample?": ["sampel=2", "dp=2,tp=2"],
    "with `layer99: {gpu: filter}`": ["layer99:filter=2", "sample=2,layer99:filter=2"],
    "there is no plan file plan": ["plan.yaml"],
    "line 3: the key layer is unknown: did you mean layers?": ["\nmesh: {a: 2}\nlayer: {}\n"],
    "from 1 to 1,000,000, e.g. 2": ["sample=1000001"],
    "the size of axis a": [f"mesh: {{a: {size}}}\nlayers: {{}}\n" for size in ("true", "'2'", "0", "[2]")],
    "line 4: the key fc is twice": ["mesh: {a: 2}\nlayers:\n  fc: {a: filter}\n  fc: {a: sample}\n"],
    "line 4: fc names an axis gpus that is not in the mesh: did you mean gpu?": [
        "mesh: {gpu: 2}\nlayers:\n  fc:\n    gpus: filter\n"
    ],
    "put fc.* above it": ["mesh: {a: 2}\nlayers:\n  '*': {a: filter}\n  fc.*: {a: sample}\n"],
    "no YAML": ["mesh: \x00\n#", "[" * 1500 + "\n#"],
    "write the value itself": ["a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]\n" for i in range(1, 9))],
    "2 of them, or 1 without": ["mesh: {stage: 2}\nstages: [a, b, c]\n"],
    "is no layer's name": ["mesh: {stage: 2}\nstages: [a, [b]]\n", {"mesh": {"stage": 2}, "stages": [True]}],
}
"""What the refusal says: lines, documents (of which it names the file, too) and values that are no plan."""


def refusal(plan: Any) -> str:
    """The sentence that refuses a plan: one line that says what to change."""
    with pytest.raises(ConvoyError) as caught:
        Plan.parse(plan)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 330 and ": " in text, text
    return text


def test_what_is_no_plan_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file.yaml"
    for words, plans in LINES.items():
        for plan in plans:
            assert words in refusal(plan), plan
            if isinstance(plan, str) and "\n" in plan:
                path.write_text(plan)
                assert refusal(path).startswith(str(path)) and words in refusal(path), plan
    path.write_bytes(b"\xff\xfe\x00")
    assert "is a folder" in refusal(tmp_path) and "UTF-8" in refusal(path)
    with pytest.raises(ConvoyError, match=r"^the plan: .*1 names and 2 sizes"):
        Plan(Mesh(("a",), (2, 2)))
    with pytest.raises(ConvoyError, match=r"^the plan: layers has fc, but must be pairs"):
        Plan(Mesh(("a",), (2,)), ("fc", {"a": "filter"}))
