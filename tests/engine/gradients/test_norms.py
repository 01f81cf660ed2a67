"""Norms of tensors that are divided over ranks are those of the whole."""

import pytest
import torch
from torch import Tensor, nn

from convoy.comm.groups import Groups
from convoy.engine.gradients.divided import WholeNorms
from convoy.plans.mesh import Mesh
from convoy.recipe.optim import LambConfig, LarsConfig
from convoy.training.optimizer import create_optimizer
from ranks import run_ranks

MESH = Mesh(("sample", "filter"), (2, 2))
SHAPES = ((3, 4), (5, 4), (5,), (4, 6))
AXES = ((), (1,), (1,), (0, 1))
"""A weight whole on all ranks, one divided over `filter` (unevenly), a bias divided, one over both axes."""


def difference(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(a, b, strict=True))


def shards(values: list[Tensor], groups: Groups | None) -> list[Tensor]:
    if groups is None:
        return values
    sample, part = groups.coordinates
    own = slice(0, 3) if part == 0 else slice(3, 5)
    return [values[0], values[1][own], values[2][own], values[3][2 * sample + part : 2 * sample + part + 1]]


def drawn(seed: int, groups: Groups | None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [part.clone() for part in shards([torch.randn(s, generator=generator).double() for s in SHAPES], groups)]


def weights(groups: Groups | None) -> nn.ParameterList:
    return nn.ParameterList(map(nn.Parameter, drawn(0, groups)))


CONFIGS = [
    LarsConfig(name="lars", lr=0.5, weight_decay=0.01),
    LambConfig(name="lamb", lr=0.1),
    LambConfig(name="lamb", lr=0.1, decay_norm_and_bias=True),
]


def trust_ratios(whole_norms: bool) -> list[float]:
    groups, found = Groups(MESH), []
    for config in CONFIGS:
        for foreach in (False, True):
            whole, own = weights(None), weights(groups)
            optimizers = [create_optimizer(net, config, lr=0.1) for net in (whole, own)]
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["foreach"] = foreach
            for step in range(4):
                for net, place in ((whole, None), (own, groups)):
                    for parameter, gradient in zip(net, drawn(step + 1, place), strict=True):
                        parameter.grad = gradient
                optimizers[0].step()
                if whole_norms:
                    with WholeNorms(list(zip(own, AXES, strict=True)), groups):
                        optimizers[1].step()
                else:
                    optimizers[1].step()
            found.append(difference([p.detach() for p in own], shards([p.detach() for p in whole], groups)))
    with pytest.raises(RuntimeError, match="do not belong"), WholeNorms([], groups):
        torch.linalg.norm(torch.ones(2))
    return found


def test_lars_and_lamb_see_whole_tensors() -> None:
    """Fails where the library asks for its norms in another way than `WholeNorms` knows."""
    assert max(map(max, run_ranks(trust_ratios, 4, True))) < 1e-12
    assert min(max(row) for row in zip(*run_ranks(trust_ratios, 4, False), strict=True)) > 1e-4
