"""What rules with windows ask of rows that are divided."""

import torch
import torch.nn.functional as F

from convoy.plans.layout import Layout, Split, balanced, consecutive
from convoy.plans.mesh import Mesh
from convoy.plans.place import Placed
from emulated import call_of, place

TWO, GRID = Mesh(("a",), (2,)), Mesh(("a", "b"), (2, 2))
POOL = {
    "kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), "dilation": (1, 1), "ceil_mode": False,
    "count_include_pad": True, "divisor_override": None,
}  # fmt: skip


def max_pool(mesh: Mesh, given: Layout, rows: int = 8) -> Placed:
    options = {"kernel_size": 3, "stride": 2, "padding": 1}
    graph, _ = call_of("max_pool", F.max_pool2d, (torch.zeros(2, 4, rows, 8),), (), options, POOL)
    return place(graph, mesh, {"x": given})


def test_rows_are_asked_for_with_their_halo() -> None:
    placed = max_pool(TWO, Layout.of({2: Split((0,), balanced(8, 2))}))
    assert placed.outputs["y"] == Layout.of({2: Split((0,), consecutive((2, 2)))})
    assert placed.inputs["x"] == Layout.of({2: Split((0,), (range(4), range(3, 8)))})
    assert not placed.note


def test_uneven_rows_are_evened_out() -> None:
    placed = max_pool(TWO, Layout.of({2: Split((0,), consecutive((7, 1)))}))
    assert placed.outputs["y"] == Layout.of({2: Split((0,), consecutive((2, 2)))})


def test_other_dimensions_follow() -> None:
    channels = Split((0,), ((0, 3), (1, 2)))
    placed = max_pool(GRID, Layout.of({1: channels, 3: Split((1,), balanced(8, 2))}))
    assert placed.outputs["y"] == Layout.of({1: channels, 3: Split((1,), balanced(4, 2))})


def test_a_partial_sum_is_asked_for_whole() -> None:
    placed = max_pool(TWO, Layout.of(partial=(0,)))
    assert placed.inputs["x"] == placed.outputs["y"] == Layout()


def test_too_few_rows_are_whole_with_a_note() -> None:
    placed = max_pool(TWO, Layout.of({2: Split((0,), balanced(2, 2))}), rows=2)
    assert placed.inputs["x"] == placed.outputs["y"] == Layout()
    assert placed.note == "dim 2 is whole: fewer output rows (1) than ranks (2)"
