"""The explanation says what every layer does, what is sent for it, and what each rank holds."""

import pytest

from convoy.ops.memory import memory_in_stages, predict_memory
from convoy.plans.explain import explain, explanation
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from convoy.plans.traffic import Traffic
from convoy.units import size, table
from plans.made_graph import Chain, in_stages, placed, small_net

OWT = """\
plan owt=2
training, 8 samples (4 + 4), 2 ranks, captured as one program

layer         work    strategy  gives              sent for its input  forward  backward  gradients  parameters
features.0    conv    sample    samples over owt   -                         -         -      896 B       896 B
features.2    conv    sample    samples over owt   -                         -         -     3.5 kB      3.5 kB
classifier.0  linear  filter    features over owt  move over owt       12.3 kB   12.3 kB          -     30.8 kB
classifier.2  linear  filter    features over owt  move over owt         320 B     320 B          -       420 B
-             output  -         -                  move over owt          80 B      80 B          -           -

4 other calls follow the layout given, without sending anything
a rank sends 12.7 kB in the forward pass, 12.7 kB in the backward pass, 4.4 kB for gradients of parameters
a rank holds 35.6 kB of 66.8 kB of parameters, 35.6 kB of gradients, 82.9 kB of activations kept for the backward pass
"""


STAGED = """\
plan stage=2,sample=2; stages begin at classifier
training, 8 samples (4 + 4), 4 ranks

stage  layer         work    strategy  gives                sent for its input  forward  backward  gradients  parameters
1      features.0    conv    sample    samples over sample  -                         -         -      896 B       896 B
1      features.2    conv    sample    samples over sample  -                         -         -     3.5 kB      3.5 kB
2      classifier.0  linear  sample    samples over sample  -                         -         -    61.5 kB     61.5 kB
2      classifier.2  linear  sample    samples over sample  -                         -         -      840 B       840 B

stage  begins at     ranks  takes the output of            forward  backward  parameters  activations
1      features.0    0, 1   -                                    -         -      4.4 kB      57.3 kB
2      classifier.0  2, 3   flatten in the network itself  12.3 kB   12.3 kB     62.4 kB      12.6 kB

4 other calls follow the layout given, without sending anything
activations are GPipe's, of all parts of a pass; 1F1B keeps at most those of 2 parts in stage 1, down to 1 in stage 2
a rank sends 12.3 kB in the forward pass, 12.3 kB in the backward pass, 62.4 kB for gradients of parameters
a rank of stage 2 holds most in all: 62.4 kB of 66.8 kB of parameters, \
62.4 kB of gradients, 12.6 kB of activations kept for the backward pass
"""


def _explain(graph, plan, capture=""):
    plan = Plan.parse(plan)
    if plan.mesh.stage_axis is not None:
        placement, staged = in_stages(graph, plan)
        return explain(placement, memory_in_stages(placement, staged), plan, capture, staged)
    placement = placed(graph, plan)
    return explain(placement, predict_memory(placement), plan, capture)


def test_stages():
    plan = Plan(Mesh(("stage", "sample"), (2, 2)), (("*", {"sample": "sample"}),), ("classifier",))
    assert _explain(small_net(), plan) == STAGED


@pytest.mark.parametrize("plan", ["stage=2", "stage=3,filter=2", "sample=2,stage=2", "stage=2,height=2"])
def test_rows_of_stages_add_up(plan):
    placement, staged = in_stages(small_net(), plan)
    found = explanation(placement, memory_in_stages(placement, staged), None, staged)
    whole = explanation(placement, predict_memory(placement))
    key = lambda row: (row.layer, row.op, row.sent, row.traffic, row.gradients, row.parameters)  # noqa: E731
    rows = {key(row) for row in found.rows}
    assert {key(row) for row in whole.rows} == rows
    assert [row.stage for row in found.rows] == sorted(row.stage for row in found.rows)
    assert sum(held.parameters for held in found.held) == whole.memory.parameters
    assert all(held.gradients == held.parameters for held in found.held)
    assert sorted(rank for row in found.stages for rank in row.ranks) == list(range(placement.mesh.num_devices))
    assert found.stages[0].received == Traffic()
    assert all(row.takes and row.received.forward for row in found.stages[1:])
    assert found.gradients <= whole.gradients
    assert found.traffic.forward <= whole.traffic.forward + sum(row.received.forward for row in found.stages)


def test_layers_that_only_stages_divide_are_not_called_replicated():
    assert "pattern" not in _explain(small_net(), "stage=2")
    plan = {"mesh": {"stage": 2, "gpu": 2}, "layers": {"features.*": {"gpu": "sample"}}}
    assert "replicated, as no pattern matches them: classifier.0, classifier.2\n" in _explain(small_net(), plan)


def test_one_weird_trick():
    text = _explain(small_net(), "owt=2", "as one program")
    assert text == OWT


def test_one_device():
    text = _explain(small_net(), "serial")
    assert text.startswith("plan serial\ntraining, 8 samples, 1 rank\n")
    assert "a rank sends nothing\n" in text
    assert "pattern" not in text


def test_calls_without_a_rule_are_named_with_the_reason():
    chain = Chain(8, 4, 9, 9).conv("a", 6).strange("strange").conv("b", 6).strange("other").conv("c", 6)
    text = _explain(chain.graph(), "filter=2")
    assert "no rule for cumsum: runs whole on every rank: strange, other\n" in text
    assert "no rule" not in _explain(chain.graph(), "serial")


def test_layers_that_no_pattern_matches_are_named():
    plan = {"mesh": {"gpu": 2}, "layers": {"features.*": {"gpu": "sample"}}}
    assert "replicated, as no pattern matches them: classifier.0, classifier.2\n" in _explain(small_net(), plan)
    assert "pattern" not in _explain(small_net(), "sample=2")


def test_an_explanation_of_evaluation_has_no_backward_pass():
    text = _explain(Chain(8, 4, 9, 9, training=False).conv("a", 6).conv("b", 6).graph(), "filter=2")
    assert text.splitlines()[1] == "evaluation, 8 samples, 2 ranks"
    assert "in the backward pass" not in text
    assert "gradients" not in text.splitlines()[-2] + text.splitlines()[-1]


@pytest.mark.parametrize("plan", ["sample=3", "filter=3", "channel=2", "height=2", "width=2", "sample=2,filter=2"])
def test_rows_add_up(plan):
    placement = placed(small_net(), plan)
    found = explanation(placement, predict_memory(placement))
    rows = [*found.rows, *([found.output] if found.output else [])]
    assert sum(row.gradients for row in rows) >= found.gradients
    assert sum(row.parameters for row in rows) >= found.memory.parameters
    assert sum(row.traffic.forward for row in rows) >= found.traffic.forward
    assert len(rows) - bool(found.output) + found.others == len(small_net().calls)
    if plan != "sample=3":
        assert sum(row.gradients for row in rows) == found.gradients


def test_layouts_are_said_in_words():
    words = _explain(small_net(), "sample=2,height=2")
    assert "samples over sample, rows over height" in words
    assert "columns over width" in _explain(small_net(), "width=2")
    assert "partial over channel" in _explain(small_net(), "channel=2")
    assert "length over height" in _explain(Chain(8, 4, 9).conv("a", 4).graph(), "height=2")


def test_a_parameter_of_two_layers_is_counted_once():
    chain = Chain(8, 6).linear("a", 6)
    weight, bias = "a.weight", "a.bias"
    inputs = (chain.last, weight, bias)
    attributes = {"input": chain.last, "weight": weight, "bias": bias}
    chain.call("b", "linear", chain.calls[0].function, (8, 6), inputs, attributes)
    placement = placed(chain.graph(), "filter=2")
    found = explanation(placement, predict_memory(placement))
    assert [row.parameters for row in found.rows] == [84, 0]
    assert found.whole == 168


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "-"), (1, "1 B"), (999, "999 B"), (1000, "1 kB"), (1234, "1.23 kB"), (99_940, "99.9 kB"), (123_456, "123 kB"),
     (999_400, "999 kB"), (999_600, "1 MB"), (1_500_000, "1.5 MB"), (2_400_000_000, "2.4 GB"), (5 * 10**12, "5000 GB")],
)  # fmt: skip
def test_sizes(number, text):
    assert size(number) == text


def test_tables_line_up():
    assert table(("a", "number"), [("long", "1"), ("x", "22")], ("number",)) == [
        "a     number",
        "long       1",
        "x         22",
    ]
