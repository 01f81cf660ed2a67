"""The explanation says what every layer does, what is sent for it, and what each rank holds; what couples samples."""

from typing import Any

import torch.nn.functional as F
from torch import nn

from convoy.engine.coupling import coupling
from convoy.ops.memory import memory_in_stages, predict_memory
from convoy.plans.explain import explain, explanation
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from convoy.plans.traffic import Traffic
from convoy.units import size, table
from plans.made_graph import Does, chain, graph_of, in_stages, placed, small_net
from small_nets import SMALL_NETS

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
PART = {"mesh": {"gpu": 2}, "layers": {"features.*": {"gpu": "sample"}}}


def text_of(graph: Any, plan: Any, captured: str = "") -> str:
    plan = Plan.parse(plan)
    if plan.mesh.stage_axis is not None:
        placement, staged = in_stages(graph, plan)
        return explain(placement, memory_in_stages(placement, staged), plan, captured, staged)
    placement = placed(graph, plan)
    return explain(placement, predict_memory(placement), plan, captured)


def test_a_plan_and_one_with_stages_are_explained_layer_by_layer() -> None:
    assert text_of(small_net(), "owt=2", "as one program") == OWT
    staged = Plan(Mesh(("stage", "sample"), (2, 2)), (("*", {"sample": "sample"}),), ("classifier",))
    assert text_of(small_net(), staged) == STAGED


def test_what_is_not_divided_is_told_with_the_reason_and_layouts_are_in_words() -> None:
    alone = text_of(small_net(), "serial")
    assert alone.startswith("plan serial\ntraining, 8 samples, 1 rank\n") and "a rank sends nothing\n" in alone
    unmatched = "replicated, as no pattern matches them: classifier.0, classifier.2\n"
    assert unmatched in text_of(small_net(), PART | {"mesh": {"stage": 2, "gpu": 2}})
    for plan in ("serial", "sample=2", "stage=2"):
        assert "pattern" not in text_of(small_net(), plan)
    strange, other = (Does(lambda x: x.cummax(1).values) for _ in range(2))
    convs = [nn.Conv2d(channels, 6, 3, padding=1) for channels in (4, 6, 6)]
    graph = chain((8, 4, 9, 9), a=convs[0], strange=strange, b=convs[1], other=other, c=convs[2])
    assert "no rule for cummax: runs whole on every rank: strange, other\n" in text_of(graph, "filter=2")
    for plan, words in (
        ("sample=2,height=2", "samples over sample, rows over height"),
        ("width=2", "columns over width"),
        ("channel=2", "partial over channel"),
    ):
        assert words in text_of(small_net(), plan)
    assert "length over height" in text_of(chain((8, 4, 9), a=nn.Conv1d(4, 4, 3)), "height=2")
    text = text_of(chain((8, 4, 9, 9), training=False, a=nn.Conv2d(4, 6, 3)), "filter=2")
    assert text.splitlines()[1] == "evaluation, 8 samples, 2 ranks" and "in the backward pass" not in text


def test_rows_add_up_with_stages_and_without() -> None:
    for plan in ("sample=3", "filter=3", "channel=2", "height=2", "sample=2,filter=2"):
        placement = placed(small_net(), plan)
        result = explanation(placement, predict_memory(placement))
        rows = [*result.rows, *([result.output] if result.output else [])]
        assert sum(row.parameters for row in rows) >= result.memory.parameters
        assert sum(row.traffic.forward for row in rows) >= result.traffic.forward
        assert len(rows) - bool(result.output) + result.others == len(small_net().calls)
        assert plan == "sample=3" or sum(row.gradients for row in rows) == result.gradients
    tied = nn.Linear(6, 6)
    placement = placed(chain((8, 6), a=tied, r=nn.ReLU(), b=tied), "filter=2")
    result = explanation(placement, predict_memory(placement))
    assert ([row.parameters for row in result.rows], result.whole) == ([84, 0], 168)  # counted once
    for plan in ("stage=3,filter=2", "sample=2,stage=2"):
        placement, staged = in_stages(small_net(), plan)
        result = explanation(placement, memory_in_stages(placement, staged), None, staged)
        whole = explanation(placement, predict_memory(placement))
        staged_rows, all_rows = (
            {(row.layer, row.op, row.sent, row.traffic, row.gradients, row.parameters) for row in one.rows}
            for one in (result, whole)
        )
        assert staged_rows == all_rows
        assert sum(held.parameters for held in result.held) == whole.memory.parameters
        assert sorted(rank for row in result.stages for rank in row.ranks) == list(range(placement.mesh.num_devices))
        assert result.stages[0].received == Traffic()
        assert all(row.takes and row.received.forward for row in result.stages[1:])


def test_sizes_and_tables_are_for_people() -> None:
    for number, text in {0: "-", 999: "999 B", 1234: "1.23 kB", 99_940: "99.9 kB", 999_600: "1 MB"}.items():
        assert size(number) == text
    rows = table(("a", "number"), [("long", "1"), ("x", "22")], ("number",))
    assert rows == ["a     number", "long       1", "x         22"]


COUPLED = {
    "mean": lambda x: x - x.mean(0),
    "softmax": lambda x: x * x.softmax(0),
    "amax": lambda x: x - x.amax(0),
    "flip": lambda x: x + x.flip(0),
    "cumsum": lambda x: x + x.cumsum(0),
    "matmul": lambda x: x + (x @ x.t()) @ x,
    "norm": lambda x: x / x.norm(),
    "layer_norm": lambda x: F.layer_norm(x, x.shape),
    "group_norm": lambda x: F.group_norm(x.t()[None], 4)[0].t(),
    "rms_norm": lambda x: F.rms_norm(x, x.shape),
}
APART = [
    lambda x: x - x.mean(1, keepdim=True),
    lambda x: x.softmax(1) + x.flip(1),
    lambda x: F.batch_norm(x, None, None, training=True),
    lambda x: F.layer_norm(x, (4,)),
    lambda x: F.rms_norm(x, (4,)),
    lambda x: F.normalize(x).t().contiguous().t(),
]


def test_calls_that_compute_with_several_samples_are_known() -> None:
    def result(function: Any) -> Any:
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return coupling(chain((4, 3, 8, 8), conv=nn.Conv2d(3, 4, 3), head=head, between=Does(function)))

    for name, function in COUPLED.items():
        call = result(function)
        assert (call.layer, call.function.__name__) == ("between", name)
    assert not any(map(result, APART))
    for name, small in SMALL_NETS.items():
        assert coupling(graph_of(small(), 4, 3, 32, 32)) is None, name
