"""Combinations of layouts that a concatenation is said not to tell apart: its rule treats them alike."""

import itertools

import numpy as np
import pytest
import torch
from convoy.planner.search.placing import codes_of, relabelled
from torch import Tensor, nn

from convoy.planner.search.prices import Prices
from convoy.plans.layout import Layout, Split, balanced, indices
from convoy.plans.mesh import Mesh
from convoy.plans.place import Batch
from planner.search.nets import ONE, TWO, Branches, Costs, captured


def layouts(mesh: Mesh, sizes: tuple[int, int, int]) -> list[Layout]:
    """Layouts of an operand: whole, by samples, channels, rows, over any axes; channels also unevenly."""
    result = []
    for choice in itertools.product((None, 0, 1, 2), repeat=len(mesh.sizes)):
        axes = {dim: tuple(axis for axis, chosen in enumerate(choice) if chosen == dim) for dim in range(3)}
        splits = {dim: Split(over, balanced(sizes[dim], mesh.size(over))) for dim, over in axes.items() if over}
        result.append(Layout.of(splits))
        if 1 in splits:
            count = len(splits[1].parts)
            parts = tuple(indices(range(rank, sizes[1], count)) for rank in range(count))
            result.append(Layout.of({**splits, 1: Split(splits[1].axes, parts)}))
    return result


class Same(nn.Module):
    """Operands that are one tensor in size."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Conv2d(3, 4, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([way(x) for way in self.ways], 1)


@pytest.mark.parametrize(("model", "mesh"), [(Branches(3), ONE), (Branches(3), TWO), (Same(), ONE)])
def test_states_of_one_code_are_placed_alike(model: nn.Module, mesh: Mesh) -> None:
    graph, draw = captured(model), np.random.default_rng(0)
    prices = Prices(graph, mesh, Costs())
    call = next(call for call in graph.calls if call.op == "cat")
    batch = Batch(mesh, (0,), balanced(8, 2))
    states = [
        np.array([prices.number(layout) for layout in layouts(mesh, (8, graph.shape(name)[1], 8))])
        for name in call.inputs
    ]
    chosen = [draw.choice(one, 1500) for one in states]
    codes = codes_of(call, prices, chosen)
    assert len(np.unique(codes)) < len(np.unique(np.stack(chosen), axis=1).T)
    by_code: dict[int, object] = {}
    for code, *numbers in zip(codes.tolist(), *(one.tolist() for one in chosen), strict=True):
        answer = prices.answer(call, batch, (), numbers)
        assert by_code.setdefault(code, answer) == answer


def test_relabelled_is_unique() -> None:
    draw = np.random.default_rng(1)
    for high, size in ((5, (3, 4)), (9, (50, 20)), (10**9, (40, 30))):
        ids = draw.integers(-1, high, size)
        numbers, places = relabelled(ids)
        assert (numbers == np.unique(ids)).all() and (numbers[places] == ids).all()
