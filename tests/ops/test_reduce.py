"""Sums, means and maxima of parts against those of the whole."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from convoy.ops import OPERATIONS
from convoy.ops.kernel import as_called
from convoy.plans.layout import Layout, Split, balanced, consecutive
from convoy.plans.mesh import Mesh
from convoy.plans.place import Placed
from emulated import check

THREE, GRID = Mesh(("a",), (3,)), Mesh(("a", "b"), (2, 2))
FUNCTIONS = {"mean": torch.mean, "sum": torch.sum, "amax": torch.amax}


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def reduce(function: str, x: Tensor, dims: tuple[int, ...], keepdim: bool, mesh: Mesh, given: Layout) -> Placed:
    attributes = {"function": function, "dims": tuple(sorted(dim % x.dim() for dim in dims)), "keepdim": keepdim}
    options: dict[str, Any] = {"dim": dims, "keepdim": keepdim}
    return check("reduce", FUNCTIONS[function], (x,), (), options, attributes, mesh, {"x": given})


@pytest.mark.parametrize("function", ["mean", "sum", "amax"])
@pytest.mark.parametrize("keepdim", [False, True])
def test_every_choice_of_dimensions(function: str, keepdim: bool) -> None:
    x = tensor(4, 3, 5, 6)
    splits = [
        {0: Split((0,), consecutive((3, 1)))},
        {1: Split((0,), ((0, 2), (1,)))},
        {2: Split((0,), consecutive((5, 0))), 3: Split((1,), balanced(6, 2))},
        {0: Split((1,), consecutive((0, 4))), 2: Split((0,), balanced(5, 2))},
        {3: Split((0, 1), balanced(6, 4))},
    ]
    choices = [dims for count in (1, 2, 3, 4) for dims in itertools.combinations(range(4), count)]
    for dims, split in itertools.product([*choices, (-1,), (-2, -1)], splits):
        given = Layout.of(split)
        placed = reduce(function, x, dims, keepdim, GRID, given)
        reduced = {dim % 4 for dim in dims} & set(split)
        axes = {axis for dim in reduced for axis in split[dim].axes}
        if function == "amax":
            assert bool(placed.note) == bool(reduced)
        else:
            assert placed.inputs["x"] == given, "something is sent"
            assert placed.outputs["y"].partial == axes


def test_squeeze_of_a_picture_by_rows() -> None:
    given = Layout.of({0: Split((0,), balanced(2, 2)), 2: Split((1,), balanced(5, 2))})
    placed = reduce("mean", tensor(2, 3, 5, 4), (2, 3), True, GRID, given)
    assert placed.outputs["y"] == Layout.of({0: given.split(0)}, partial=(1,))


def test_partial_sums_stay_partial_but_for_a_maximum() -> None:
    given = Layout.of({1: Split((0,), balanced(4, 2))}, partial=(1,))
    assert reduce("mean", tensor(2, 4, 3), (2,), False, GRID, given).outputs["y"].partial == {1}
    assert reduce("amax", tensor(2, 4, 3), (2,), False, GRID, given).outputs["y"].partial == set()


def test_everything() -> None:
    given = Layout.of({0: Split((0,), consecutive((4, 0, 3)))})
    for function in ("mean", "sum"):
        attributes = {"function": function, "dims": (0, 1), "keepdim": False}
        placed = check("reduce", FUNCTIONS[function], (tensor(7, 2),), (), {}, attributes, THREE, {"x": given})
        assert placed.outputs["y"] == Layout.of(partial=(0,))


def test_means_over_the_ranks_own_count_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATIONS, "reduce", replace(OPERATIONS["reduce"], build=as_called))
    with pytest.raises(AssertionError):
        reduce("mean", tensor(3, 7), (1,), False, THREE, Layout.of({1: Split((0,), balanced(7, 3))}))
