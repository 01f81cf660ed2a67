"""Costs from five numbers, beside the same by hand."""

import math

import pytest

from convoy.planner.cost.analytic import Analytic
from convoy.plans.layout import Layout, even_split
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from convoy.plans.transfer import Step
from planner.search.nets import Chain, captured
from planner.search.synthetic import placed_under

ONE = Mesh(("gpu",), (2,))
FOUR = Mesh(("gpu",), (4,))
TWO = Mesh(("node", "gpu"), (2, 2))
GRAPH = captured(Chain())
"""8 pictures [3, 8, 8], 8 and 4 filters of 3 × 3, pooled to [4, 4, 4] = 64 features, 8 outputs."""


def seconds(plan: str, layer: str, costs: Analytic) -> float:
    placement = placed_under(GRAPH, Plan.parse(plan))
    return next(
        costs.compute(placed, placement)
        for placed in placement.calls
        if placed.call.layer == layer and placed.call.op in ("conv", "linear")
    )


@pytest.mark.parametrize(
    ("plan", "layer", "operations"),
    [
        # forward and twice as much backward, a multiplication and an addition each
        ("serial", "features.0", 6 * 8 * (8 * 8) * (8 * 3 * 3 * 3)),
        ("sample=2", "features.0", 6 * 4 * (8 * 8) * (8 * 3 * 3 * 3)),
        ("filter=2", "features.0", 6 * 8 * (8 * 8) * (4 * 3 * 3 * 3)),
        ("height=2", "features.0", 6 * 8 * (4 * 8) * (8 * 3 * 3 * 3)),
        ("serial", "fc", 6 * 8 * (8 * 64)),
        ("filter=2", "fc", 6 * 8 * (4 * 64)),
    ],
)
def test_a_layer_that_computes_takes_its_operations(plan: str, layer: str, operations: int) -> None:
    found = seconds(plan, layer, Analytic(flops=1e6, bandwidth=math.inf, overhead=0.25))
    assert found == pytest.approx(0.25 + operations / 1e6, rel=1e-12)


@pytest.mark.parametrize(
    ("plan", "elements"),
    [
        # input, weight, bias and output of the first convolution
        ("serial", 8 * 3 * 64 + 8 * 27 + 8 + 8 * 8 * 64),
        ("sample=2", 4 * 3 * 64 + 8 * 27 + 8 + 4 * 8 * 64),
        ("filter=2", 8 * 3 * 64 + 4 * 27 + 4 + 8 * 4 * 64),
    ],
)
def test_and_reads_and_writes_three_times_four_bytes_of_each_element(plan: str, elements: int) -> None:
    found = seconds(plan, "features.0", Analytic(flops=math.inf, bandwidth=1e6, overhead=0.0))
    assert found == pytest.approx(12 * elements / 1e6, rel=1e-12)


SHAPE = (8, 4, 6, 6)
ELEMENTS = 8 * 4 * 6 * 6
WHOLE = Layout()
ROWS, FEATURES = (Layout.of({dim: even_split((0,), SHAPE[dim], 2)}) for dim in (0, 1))
PARTIAL, COPIED = Layout.of(partial=(0,)), Layout.of(copied=(0,))


@pytest.mark.parametrize(
    ("step", "elements"),
    [
        # elements that a rank takes in forward, and in the backward pass
        (Step("gather", (0,), ROWS, WHOLE), (ELEMENTS // 2, 0)),
        (Step("slice", (0,), WHOLE, ROWS), (0, ELEMENTS // 2)),
        (Step("move", (0,), ROWS, FEATURES), (ELEMENTS // 2, ELEMENTS // 2)),
        (Step("reduce", (0,), PARTIAL, WHOLE), (ELEMENTS, 0)),  # an all-reduce of n over two ranks sends n
        (Step("copy", (0,), WHOLE, COPIED), (0, ELEMENTS)),
        (Step("reduce_scatter", (0,), PARTIAL, ROWS), (ELEMENTS // 2, ELEMENTS // 2)),
        (Step("keep", (0,), COPIED, WHOLE), (0, 0)),
    ],
    ids=lambda value: value.kind if isinstance(value, Step) else "",
)
def test_a_message_takes_its_latency_and_its_bytes(step: Step, elements: tuple[int, int]) -> None:
    costs = Analytic(latency=0.5, rate=1e3)
    by_hand = [0.5 + 4 * n / 1e3 if n else 0.0 for n in elements]
    assert costs.transfer(step, ONE, SHAPE, 4, True) == pytest.approx(sum(by_hand), rel=1e-12)
    assert costs.transfer(step, ONE, SHAPE, 4, False) == pytest.approx(by_hand[0], rel=1e-12)


def test_the_first_of_two_axes_is_three_times_slower() -> None:
    costs = Analytic(latency=0.5, rate=1e3)
    first, second = (
        costs.transfer(Step("gather", (axis,), Layout.of({0: even_split((axis,), 8, 2)}), WHOLE), TWO, SHAPE, 4, False)
        for axis in (0, 1)
    )
    assert (first - 0.5, second - 0.5) == pytest.approx((3 * 2 * ELEMENTS / 1e3, 2 * ELEMENTS / 1e3))


def test_parameters() -> None:
    costs = Analytic(latency=0.5, rate=1e3, bandwidth=1e3)
    weight = GRAPH.values[next(c for c in GRAPH.calls if c.layer == "features.0").attributes["weight"]]
    assert weight.shape == (8, 3, 3, 3)
    copied, split = Layout.of(copied=(0,)), Layout.of({0: even_split((0,), 8, 4)})
    assert costs.gradient(weight, copied, FOUR) == pytest.approx(0.5 + 2 * 3 * 216 / 4 * 4 / 1e3)
    assert costs.gradient(weight, split, FOUR) == 0
    assert costs.update(weight, copied, FOUR) == pytest.approx(20 * 216 / 1e3)
    assert costs.update(weight, split, FOUR) == pytest.approx(20 * 54 / 1e3)
    assert costs.parameter_memory(weight, split, FOUR) == 3 * 54 * 4
