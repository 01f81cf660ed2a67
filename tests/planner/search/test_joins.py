"""Combinations of layouts that a concatenation is said not to tell apart: its rule treats them alike."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from convoy.planner.search.placing import codes_of, relabelled
from convoy.planner.search.prices import Prices
from convoy.plans.layout import Layout, Split, balanced, indices
from convoy.plans.mesh import Mesh
from convoy.plans.place import Batch, own_samples
from planner.search.nets import Branches, captured
from planner.search.synthetic import Roofline


def _layouts(mesh, samples, channels, rows):
    """Layouts of an operand: whole, by samples, channels, rows, over any axes; channels also unevenly."""
    dims = (0, 1, 2)
    found = []
    for choice in itertools.product((None, *dims), repeat=len(mesh.sizes)):
        splits = {}
        for dim in dims:
            axes = tuple(axis for axis, chosen in enumerate(choice) if chosen == dim)
            if axes:
                splits[dim] = Split(axes, balanced((samples, channels, rows)[dim], mesh.size(axes)))
        found.append(Layout.of(splits))
        if 1 in splits:
            count = len(splits[1].parts)
            parts = tuple(indices(range(rank, channels, count)) for rank in range(count))
            found.append(Layout.of({**splits, 1: Split(splits[1].axes, parts)}))
    return found


@pytest.mark.parametrize("mesh", [Mesh(("a",), (2,)), Mesh(("a", "b"), (2, 2))], ids=str)
def test_states_of_one_code_are_placed_alike(mesh):
    graph = captured(Branches(3))
    prices = Prices(graph, mesh, Roofline())
    call = next(call for call in graph.calls if call.op == "cat")
    batch = Batch(mesh, (0,), balanced(8, 2))
    assert own_samples((8, 1), batch).split(0) is not None
    rng = np.random.default_rng(0)
    numbers = [
        np.array([prices.number(layout) for layout in _layouts(mesh, 8, graph.shape(name)[1], 8)])
        for name in call.inputs
    ]
    chosen = [rng.choice(one, 3000) for one in numbers]
    codes = codes_of(call, prices, chosen)
    assert len(np.unique(codes)) < len(np.unique(np.stack(chosen), axis=1).T)
    by_code = {}
    for code, *given in zip(codes.tolist(), *(one.tolist() for one in chosen), strict=True):
        answer = prices.answer(call, batch, (), given)
        assert by_code.setdefault(code, answer) == answer


def test_unequal_answers_have_unequal_codes_also_where_operands_are_one_tensor_in_size():
    class Same(nn.Module):
        def __init__(self):
            super().__init__()
            self.ways = nn.ModuleList(nn.Conv2d(3, 4, 1) for _ in range(4))

        def forward(self, x):
            return torch.cat([way(x) for way in self.ways], 1)

    graph, mesh = captured(Same()), Mesh(("a",), (2,))
    prices = Prices(graph, mesh, Roofline())
    call = next(call for call in graph.calls if call.op == "cat")
    batch = Batch(mesh, (0,), balanced(8, 2))
    options = np.array([prices.number(layout) for layout in _layouts(mesh, 8, 4, 8)])
    grid = np.meshgrid(options, options, options, options, indexing="ij")
    codes = codes_of(call, prices, grid).ravel()
    by_code = {}
    for code, *given in zip(codes.tolist(), *(one.ravel().tolist() for one in grid), strict=True):
        answer = prices.answer(call, batch, (), given)
        assert by_code.setdefault(code, answer) == answer


def test_relabelled_is_unique():
    rng = np.random.default_rng(1)
    for high, size in ((5, (3, 4)), (9, (50, 20)), (10**9, (40, 30))):
        ids = rng.integers(-1, high, size)
        numbers, places = relabelled(ids)
        assert (numbers == np.unique(ids)).all()
        assert (numbers[places] == ids).all()
