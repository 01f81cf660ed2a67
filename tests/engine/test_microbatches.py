"""Microbatch sizes, passes, and the tree that adds gradients."""

import pytest
import torch
from torch import nn

from convoy.engine import GradientTree, microbatch_sizes, passes


@pytest.mark.parametrize(
    ("batch", "number", "sizes"), [(8, 2, (4, 4)), (7, 3, (3, 2, 2)), (5, 5, (1,) * 5), (64, 1, (64,))]
)
def test_sizes(batch: int, number: int, sizes: tuple[int, ...]) -> None:
    assert microbatch_sizes(batch, number) == sizes


@pytest.mark.parametrize("merge", range(1, 9))
def test_passes_keep_every_microbatch_in_order(merge: int) -> None:
    sizes = (5, 5, 5, 4, 4, 4, 4)
    groups = passes(sizes, merge)
    assert sum(groups, ()) == sizes
    assert max(map(len, groups)) <= merge
    assert len(groups) == -(-len(sizes) // merge)


def tree_sum(leaves: list[torch.Tensor]) -> torch.Tensor:
    parameter = nn.Parameter(torch.zeros_like(leaves[0]))
    tree = GradientTree([parameter])
    for leaf in leaves:
        parameter.grad = leaf.clone()
        tree.add()
    tree.finish()
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 13])
def test_tree_adds_neighbours_first(number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    leaves = [torch.randn(1000, generator=generator) for _ in range(number)]

    def add(first: int, last: int) -> torch.Tensor:
        if last - first == 1:
            return leaves[first]
        half = 1 << (last - first - 1).bit_length() - 1
        return add(first, first + half) + add(first + half, last)

    assert torch.equal(tree_sum(leaves), add(0, number))


def test_the_order_of_addition_shows_in_the_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1000, generator=generator) for _ in range(8)]
    one_after_the_other = torch.zeros(1000)
    for leaf in leaves:
        one_after_the_other += leaf
    assert not torch.equal(tree_sum(leaves), one_after_the_other)
    assert torch.allclose(tree_sum(leaves), one_after_the_other, atol=1e-5)


def test_parameters_without_gradient_stay_without() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    tree = GradientTree([used, unused])
    for _ in range(3):
        (used * 2).sum().backward()
        tree.add()
    tree.finish()
    assert used.grad is not None
    assert torch.equal(used.grad, torch.full((2,), 6.0))
    assert unused.grad is None
