"""Norms over shards count every element once; LARS and LAMB on shards take the steps of the whole."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from convoy.comm.groups import Groups
from convoy.engine.gradients import WholeNorms, clip_grad_norm, global_norm, shard_norms
from convoy.plans.mesh import Mesh
from convoy.training.optimizers import LambConfig, LarsConfig, create_optimizer
from ranks import run_ranks

MESH = Mesh(("sample", "filter"), (2, 2))


class Shards(nn.Module):
    """A weight whole on all ranks, one divided over `filter` (unevenly), a bias divided, one over both axes."""

    axes = ((), (1,), (1,), (0, 1))

    def __init__(self, whole: nn.Module | None, groups: Groups | None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator).double() for shape in ((3, 4), (5, 4), (5,), (4, 6))]
        self.weights = nn.ParameterList(nn.Parameter(value) for value in values)
        if groups is not None:
            for parameter, shard in zip(self.weights, self.shards(list(self.weights), groups), strict=True):
                parameter.data = shard.clone()

    def shards(self, values: list[Tensor], groups: Groups) -> list[Tensor]:
        sample, part = groups.coordinates
        own = slice(0, 3) if part == 0 else slice(3, 5)
        return [values[0], values[1][own], values[2][own], values[3][2 * sample + part : 2 * sample + part + 1]]

    def give(self, step: int, groups: Groups | None) -> None:
        generator = torch.Generator().manual_seed(step + 1)
        shapes = ((3, 4), (5, 4), (5,), (4, 6))
        values: list[Tensor] = [torch.randn(shape, generator=generator).double() for shape in shapes]
        for parameter, value in zip(self.weights, self.shards(values, groups) if groups else values, strict=True):
            parameter.grad = value.clone()


def norms() -> tuple[float, float, list[float], float]:
    groups = Groups(MESH)
    whole, own = Shards(None, None), Shards(None, groups)
    whole.give(0, None)
    own.give(0, groups)
    want = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    tensors = [(p.grad, axes) for p, axes in zip(own.weights, Shards.axes, strict=True) if p.grad is not None]
    seen = global_norm(tensors, groups)
    twice = global_norm([(tensor, (0, 1)) for tensor, _ in tensors], groups)
    unclipped = copy.deepcopy(whole)
    unclipped.give(0, None)
    each = [
        abs(float(a / p.grad.norm() - 1))
        for a, p in zip(shard_norms(tensors, groups), unclipped.weights, strict=True)
        if p.grad is not None
    ]
    returned = clip_grad_norm(list(zip(own.weights, Shards.axes, strict=True)), groups, 1.0)
    left = global_norm(tensors, groups)
    assert torch.equal(returned, seen)
    return abs(float(seen / want - 1)), float(left), each, abs(float(twice / want - 1))


def test_every_element_counts_once() -> None:
    for error, left, each, counted_twice in run_ranks(norms, 4, timeout=30):
        assert error < 1e-12
        assert left == pytest.approx(1.0, abs=1e-6)
        assert max(each) < 1e-12
        assert counted_twice > 0.1


def test_on_one_device_it_is_torch() -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(100)) for _ in range(3)]
    for parameter in parameters[:2]:
        parameter.grad = torch.randn(100)
    again = copy.deepcopy(parameters)
    for parameter, twin in zip(parameters, again, strict=True):
        twin.grad = None if parameter.grad is None else parameter.grad.clone()
    groups = Groups(Mesh(("sample",), (1,)))
    norm = clip_grad_norm([(p, (0,)) for p in parameters], groups, 0.5)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(again, 0.5))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(parameters[:2], again[:2], strict=True))
    assert parameters[2].grad is None


CONFIGS = [
    LarsConfig(name="lars", lr=0.5, weight_decay=0.01),
    LambConfig(name="lamb", lr=0.1),
    LambConfig(name="lamb", lr=0.1, decay_norm_and_bias=True),
]


def trust_ratios(number: int, whole_norms: bool, foreach: bool) -> float:
    groups = Groups(MESH)
    whole, own = Shards(None, None), Shards(None, groups)
    optimizers = [create_optimizer(net, CONFIGS[number], lr=0.1) for net in (whole, own)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["foreach"] = foreach
    for step in range(4):
        whole.give(step, None)
        own.give(step, groups)
        optimizers[0].step()
        if whole_norms:
            with WholeNorms(list(zip(own.weights, Shards.axes, strict=True)), groups):
                optimizers[1].step()
        else:
            optimizers[1].step()
    want = own.shards([p.detach() for p in whole.weights], groups)
    return max(float((p - w).abs().max() / w.abs().max()) for p, w in zip(own.weights, want, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_lars_and_lamb_see_whole_tensors(number: int, foreach: bool) -> None:
    """Fails where the library asks for its norms in another way than `WholeNorms` knows."""
    assert max(run_ranks(trust_ratios, 4, number, True, foreach, timeout=30)) < 1e-12
    assert max(run_ranks(trust_ratios, 4, number, False, foreach, timeout=30)) > 1e-4


def unknown() -> str:
    groups = Groups(Mesh(("filter",), (dist.get_world_size(),)))
    try:
        with WholeNorms([], groups):
            torch.linalg.norm(torch.ones(2))
    except RuntimeError as error:
        return str(error)
    return ""


def test_unknown_tensors_are_refused() -> None:
    assert all("do not belong" in text for text in run_ranks(unknown, 2, timeout=30))
