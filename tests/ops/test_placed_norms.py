"""Norms, dropout, random numbers and softmax follow what they are given, and ask for no more than they need."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convoy.errors import ConvoyError
from convoy.graph.graph import Call, Graph, Ref, Value
from convoy.ops import OPERATIONS, capture, place
from convoy.ops.lrn import halo
from convoy.plans.layout import WHOLE, Layout, Split, balanced, consecutive
from convoy.plans.mesh import Mesh
from convoy.plans.place import Batch, Placed, Situation
from convoy.plans.plan import Plan

MESH = Mesh(("a", "b"), (2, 2))
SAMPLES = {0: Split((0,), consecutive((3, 1)))}
CHANNELS = {1: Split((1,), ((0, 3, 5), (1, 2, 4)))}
NORM = ("weight", "bias")


def placed(op: str, shape: tuple[int, ...], given: Layout, others: tuple[str, ...] = (), **attributes: Any) -> Placed:
    """What the rule says of a call with input `x` and `others`, which are vectors of dim 1's or the last dim's size."""
    values = {"x": Value("x", shape, torch.float32), "y": Value("y", shape, torch.float32)}
    values |= {name: Value(name, attributes.get("normalized_shape", shape[1:2]), torch.float32) for name in others}
    attributes = {"input": "x", "weight": None, "bias": None, **attributes, **{name: name for name in others}}
    inputs = ("x", *others)
    call = Call("y", "block.norm", op, torch.relu, tuple(map(Ref, inputs)), {}, inputs, ("y",), Ref("y"), attributes)
    graph = Graph((call,), values, ("x",), Ref("y"), {}, True)
    batch = Batch(MESH, (0,), consecutive((3, 1)))
    return OPERATIONS[op].place(Situation(graph, MESH, batch, call, ("sample", "filter"), {"x": given}))


@pytest.mark.parametrize("op", ["batch_norm", "group_norm", "layer_norm", "lrn", "dropout", "softmax"])
def test_partial_sums_are_added_up_before(op: str) -> None:
    options: dict[str, Any] = {"batch_norm": {"running_mean": None, "running_var": None}, "lrn": {"size": 5}}.get(
        op, {}
    )
    options |= {"layer_norm": {"normalized_shape": (6,)}, "dropout": {"channels": False}}.get(op, {})
    found = placed(op, (4, 6), Layout.of(SAMPLES, partial=(1,)), **options)
    assert found.inputs["x"] == found.outputs["y"] == Layout.of(SAMPLES)


def test_batch_norm_divides_its_parameters_as_the_channels() -> None:
    given = Layout.of({**SAMPLES, **CHANNELS})
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    found = placed("batch_norm", (4, 6, 5, 5), given, NORM + buffers)
    own = {0: CHANNELS[1]}
    assert found.inputs["x"] == found.outputs["y"] == given
    assert found.inputs["weight"] == found.inputs["bias"] == Layout.of(own, copied=(0,))
    assert found.inputs["running_mean"] == found.inputs["running_var"] == Layout.of(own)
    assert found.inputs["num_batches_tracked"] == WHOLE


def test_group_norm_divides_its_parameters_as_the_channels() -> None:
    rows = {2: Split((0,), balanced(5, 2))}
    found = placed("group_norm", (4, 6, 5, 5), Layout.of({**rows, **CHANNELS}), NORM, num_groups=3)
    assert found.inputs["weight"] == Layout.of({0: CHANNELS[1]}, copied=(0,))


def test_layer_norm_divides_its_parameters_as_the_normalized_dims() -> None:
    last = {2: Split((1,), ((0, 3, 5), (1, 2, 4)))}
    found = placed("layer_norm", (4, 7, 6), Layout.of({**SAMPLES, **last}), NORM, normalized_shape=(6,))
    assert found.inputs["weight"] == Layout.of({0: last[2]}, copied=(0,))
    found = placed("layer_norm", (4, 7, 6), Layout.of({1: Split((1,), balanced(7, 2))}), NORM, normalized_shape=(6,))
    assert found.inputs["weight"] == Layout.of(copied=(1,))


def test_lrn_asks_for_neighbours() -> None:
    assert halo((range(4), range(4, 7), range(0)), 5, 7) == (range(6), range(2, 7), range(0))
    assert halo((range(4), range(4, 7)), 4, 7) == (range(5), range(2, 7))
    assert halo((range(4), range(4, 7)), 1, 7) == (range(4), range(4, 7))


def test_random_numbers_are_divided_as_the_samples_of_their_layer() -> None:
    assert placed("random", (4, 1, 1), WHOLE).outputs["y"] == Layout.of(SAMPLES)


def test_dropout_of_a_folded_batch_is_refused() -> None:
    with pytest.raises(ConvoyError, match=r"layer 'block.norm' drops elements of 8 samples of a batch of 4.*remove"):
        placed("dropout", (8, 6), WHOLE, channels=False)


class Block(nn.Module):
    """A block of ConvNeXt (Liu et al., 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm = nn.LayerNorm(8)
        self.wide = nn.Linear(8, 32)
        self.narrow = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(self.stem(x)).permute(0, 2, 3, 1))
        out: Tensor = self.narrow(nn.functional.gelu(self.wide(y))).permute(0, 3, 1, 2)
        return out


def test_nothing_is_sent_for_layer_norm_after_a_permutation() -> None:
    graph = capture(Block(), ((4, 3, 6, 6),))
    plan = Plan.parse({"mesh": {"a": 2}, "layers": {"narrow": {"a": "channel"}, "*": {"a": "filter"}}})
    batch = Batch(plan.mesh, (), (range(4),))
    found = {call.call.name: call for call in place(graph, plan, batch, [graph.output.name]).calls}
    assert found["norm"].placed.inputs[found["norm"].call.inputs[0]].split(3) is not None
    sent = {name for name, call in found.items() if any(call.transfers.values())}
    assert sent <= {
        "stem",
        "wide",
    }  # the image's gradient is added up, and a divided linear layer needs its input whole
