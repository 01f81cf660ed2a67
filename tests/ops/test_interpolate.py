"""Resizing of parts against that of the whole."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.plans.layout import Layout, Split, balanced, consecutive
from convoy.plans.mesh import Mesh
from convoy.plans.place import Placed
from emulated import check

TWO, THREE, GRID = Mesh(("a",), (2,)), Mesh(("a",), (3,)), Mesh(("a", "b"), (2, 2))
MODES = [
    ("nearest", None), ("nearest-exact", None), ("bilinear", False), ("bilinear", True), ("bicubic", False),
    ("bicubic", True), ("area", None),
]  # fmt: skip


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def resize(x: Tensor, mesh: Mesh, given: Layout, mode: str, align_corners: bool | None, **target: Any) -> Placed:
    options = {"mode": mode, "align_corners": align_corners, **target}
    size = tuple(F.interpolate(x, **options).shape[2:])
    factor = target.get("scale_factor")
    scales = factor if factor is None or isinstance(factor, tuple) else (factor,) * len(size)
    attributes = {"output_size": size, "mode": mode, "align_corners": align_corners, "scale": scales}
    return check("interpolate", F.interpolate, (x,), (), options, attributes, mesh, {"x": given})


@pytest.mark.parametrize(("mode", "align_corners"), MODES)
def test_rows_to_any_size(mode: str, align_corners: bool | None) -> None:
    for n, o, mesh in itertools.product((3, 5, 8), (2, 3, 5, 6, 8, 16), (TWO, THREE)):
        given = Layout.of({2: Split((0,), balanced(n, mesh.num_devices))})
        placed = resize(tensor(1, 2, n, 4), mesh, given, mode, align_corners, size=(o, 7))
        assert bool(placed.note) == (o < mesh.num_devices)


@pytest.mark.parametrize(("mode", "align_corners"), MODES)
@pytest.mark.parametrize("factor", [2.0, 3.0, 1.5, 0.5, (2.0, 1.3)])
def test_rows_and_columns_by_a_factor(mode: str, align_corners: bool | None, factor: Any) -> None:
    rows, columns = Split((0,), balanced(7, 2)), Split((1,), balanced(6, 2))
    for splits in ({2: rows}, {3: columns}, {2: rows, 3: columns}):
        resize(tensor(1, 2, 7, 6), GRID, Layout.of(splits), mode, align_corners, scale_factor=factor)


@pytest.mark.parametrize(("mode", "num"), [("linear", 1), ("trilinear", 3), ("nearest", 1), ("nearest", 3)])
def test_other_numbers_of_dimensions(mode: str, num: int) -> None:
    given = Layout.of({2: Split((0,), balanced(5, 2))})
    corners = None if mode == "nearest" else False
    resize(tensor(1, 2, *[5] * num), TWO, given, mode, corners, scale_factor=2)
    resize(tensor(1, 2, *[5] * num), TWO, given, mode, corners, size=(7,) * num)


def test_repeated_rows_follow_their_rows() -> None:
    given = Layout.of({2: Split((0,), consecutive((1, 0, 4)))})
    placed = resize(tensor(1, 2, 5, 5), THREE, given, "nearest", None, scale_factor=2)
    assert placed.inputs["x"] == given
    assert placed.outputs["y"].split(2) == Split((0,), consecutive((2, 0, 8)))


def test_repeated_rows_of_lists_come_in_order() -> None:
    given = Layout.of({2: Split((0,), ((0, 2, 4), (1, 3)))})
    placed = resize(tensor(1, 2, 5, 5), TWO, given, "nearest", None, scale_factor=2)
    assert placed.outputs["y"].split(2) == Split((0,), balanced(10, 2))


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_samples_and_channels_follow(mode: str) -> None:
    given = Layout.of({0: Split((0,), consecutive((3, 0))), 1: Split((1,), ((0, 2), (1,)))})
    placed = resize(tensor(3, 3, 4, 4), GRID, given, mode, None, scale_factor=2)
    assert placed.inputs["x"] == placed.outputs["y"] == given


def test_resizing_without_the_neighbours_rows_would_be_noticed() -> None:
    x = tensor(1, 1, 8, 4)
    pieces = [F.interpolate(part, scale_factor=2, mode="bilinear") for part in x.split(4, 2)]
    whole = F.interpolate(x, scale_factor=2, mode="bilinear")
    assert not torch.allclose(torch.cat(pieces, 2), whole)
