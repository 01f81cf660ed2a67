"""Slices, chunks and padding of parts against those of the whole."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.plans.layout import Indices, Layout, Split, balanced, consecutive
from convoy.plans.mesh import Mesh
from convoy.plans.place import Placed
from emulated import check

TWO, THREE, GRID = Mesh(("a",), (2,)), Mesh(("a",), (3,)), Mesh(("a", "b"), (2, 2))
LISTS = ((0, 3, 4, 7), (1, 2, 5), (6,))


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def three_ways(size: int) -> list[tuple[Indices, ...]]:
    """Even parts, uneven ones, one that is empty, lists, and lists out of order."""
    every = list(range(size))
    return [
        balanced(size, 3),
        consecutive((1, size - 1, 0)),
        consecutive((0, 2, size - 2)),
        (tuple(every[::3]), tuple(every[1::3]), tuple(every[2::3])),
        (tuple(every[:0:-2]), range(0), tuple(sorted(set(every) - set(every[:0:-2]), reverse=True))),
    ]


def select(x: Tensor, ranges: Sequence[Any], mesh: Mesh, given: Layout) -> Placed:
    key = tuple(one if isinstance(one, int) else slice(*one) for one in ranges)
    return check("select", lambda x: x[key], (x,), (), {}, {"ranges": tuple(ranges)}, mesh, {"x": given})


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_slices_of_a_divided_dimension(dim: int) -> None:
    size = 8
    x = tensor(*[size if other == dim else 2 for other in range(4)])
    for parts, start, stop, step in itertools.product(three_ways(size), (0, 1, 5), (4, 7, 8), (1, 2, 3)):
        if start >= stop:
            continue
        ranges = [(start, stop, step) if other == dim else (0, 2, 1) for other in range(4)]
        given = Layout.of({dim: Split((0,), parts)})
        placed = select(x, ranges, THREE, given)
        assert placed.inputs["x"] == given, "something is sent"


def test_slices_of_two_divided_dimensions() -> None:
    given = Layout.of({1: Split((0,), ((0, 2), (1, 3, 4))), 2: Split((1,), consecutive((4, 2)))})
    placed = select(tensor(2, 5, 6, 3), [(0, 2, 1), (1, 5, 2), (1, 6, 2), 1], GRID, given)
    assert placed.outputs["y"].split(1) == Split((0,), (range(0), range(2)))
    assert placed.outputs["y"].split(2) == Split((1,), (range(2), range(2, 3)))


def test_one_index_renumbers_the_dimensions_after_it() -> None:
    given = Layout.of({2: Split((0,), LISTS)})
    placed = select(tensor(2, 3, 8), [(0, 2, 1), 2, (2, 8, 1)], THREE, given)
    assert placed.outputs["y"] == Layout.of({1: Split((0,), ((1, 2, 5), (0, 3), range(4, 5)))})


def test_one_index_of_a_divided_dimension_needs_it_whole() -> None:
    given = Layout.of({1: Split((0,), balanced(4, 2)), 2: Split((1,), balanced(6, 2))})
    placed = select(tensor(2, 4, 6), [(0, 2, 1), 3, (0, 6, 1)], GRID, given)
    assert placed.note
    assert placed.outputs["y"] == Layout.of({1: Split((1,), balanced(6, 2))})


def chunks(x: Tensor, sizes: Sequence[int], dim: int, mesh: Mesh, given: Layout) -> Placed:
    options = {"split_size_or_sections": list(sizes), "dim": dim}
    return check("split", torch.split, (x,), (), options, {"sizes": tuple(sizes), "dim": dim}, mesh, {"x": given})


def test_chunks_of_channels() -> None:
    for parts, sizes in itertools.product(three_ways(8), ((4, 4), (1, 7), (2, 2, 2, 2), (3, 0, 5), (1,) * 8)):
        given = Layout.of({1: Split((0,), parts)})
        placed = chunks(tensor(2, 8, 3), sizes, 1, THREE, given)
        assert placed.inputs["x"] == given, "something is sent"


def test_halves_of_evenly_divided_channels_lie_on_one_rank_each() -> None:
    placed = chunks(tensor(2, 8, 3, 3), (4, 4), 1, TWO, Layout.of({1: Split((0,), balanced(8, 2))}))
    assert placed.outputs["y"].split(1) == Split((0,), (range(4), range(0)))
    assert placed.outputs["y1"].split(1) == Split((0,), (range(0), range(4)))


def test_chunks_of_a_whole_dimension_keep_the_other_splits() -> None:
    given = Layout.of({0: Split((0,), consecutive((3, 0))), 2: Split((1,), balanced(5, 2))})
    placed = chunks(tensor(3, 6, 5), (2, 4), -2, GRID, given)
    assert placed.outputs["y"] == placed.outputs["y1"] == given


def pad(x: Tensor, flat: Sequence[int], mesh: Mesh, given: Layout, mode: str = "constant", value: Any = None) -> Placed:
    pairs = [tuple(flat[place : place + 2]) for place in range(0, len(flat), 2)]
    pads = tuple(reversed(pairs + [(0, 0)] * (x.dim() - len(pairs))))
    attributes = {"pads": pads, "mode": mode, "value": value}
    options = {"mode": mode, "value": value}
    return check("pad", F.pad, (x,), (tuple(flat),), options, attributes, mesh, {"x": given})


def test_constant_padding_of_rows() -> None:
    for parts, before, after, value in itertools.product(three_ways(7), range(-3, 4), range(-3, 4), (None, 2.5)):
        given = Layout.of({2: Split((0,), parts)})
        placed = pad(tensor(1, 2, 7, 3), (0, 1, before, after), THREE, given, value=value)
        assert placed.inputs["x"] == given, "something is sent"


def test_padding_of_rows_and_columns_that_crops() -> None:
    given = Layout.of({2: Split((0,), balanced(5, 2)), 3: Split((1,), balanced(4, 2))})
    for flat in itertools.product((-2, 1), (-1, 2), (-3, 3), (0, 2)):
        pad(tensor(2, 2, 5, 4), flat, GRID, given, value=0.5)


def test_zero_channels_of_resnets_first_shortcut() -> None:
    given = Layout.of({1: Split((0,), ((0, 3), (1, 2)))})
    placed = pad(tensor(2, 4, 6, 6), (0, 0, 0, 0, 2, 2), TWO, given)
    assert placed.outputs["y"].split(1) == Split((0,), ((0, 1, 2, 5, 6, 7), range(3, 5)))


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_other_modes_need_the_rows_whole(mode: str) -> None:
    samples, rows = Split((0,), balanced(4, 2)), Split((1,), balanced(6, 2))
    placed = pad(tensor(4, 2, 6, 5), (1, 2, 2, 1), GRID, Layout.of({0: samples, 2: rows}), mode=mode)
    assert placed.outputs["y"] == Layout.of({0: samples})
    assert mode in placed.note


def test_wrong_renumbering_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from convoy.ops import slices as kernel

    given = Layout.of({1: Split((0,), ((0, 2), (1, 3)))})
    right: Callable[..., Indices] = kernel.places
    monkeypatch.setattr(kernel, "places", lambda part, chosen: tuple(right(part, chosen))[::-1])
    with pytest.raises((AssertionError, RuntimeError)):
        select(tensor(2, 4, 3), [(0, 2, 1), (0, 3, 1), (0, 3, 1)], TWO, given)
