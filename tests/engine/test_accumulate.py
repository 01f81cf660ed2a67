"""Gradients of several batches are added up, and exchanged once, as on one device."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import convoy
from convoy.engine.gradients.divided import plain
from ranks import run_ranks
from small_nets import Dense

SIZES = (5, 3, 4)


def accumulated(plan: str, finish: bool = True, sizes: tuple[int, ...] = SIZES) -> tuple[float, bool]:
    """The worst error after two updates' worth of batches, and whether ranks differed meanwhile."""
    torch.manual_seed(0)
    serial = Dense().double()
    net = convoy.parallelize(copy.deepcopy(serial), plan, torch.zeros(2, 3, 8, 8, dtype=torch.float64))
    generator = torch.Generator().manual_seed(1)
    differed = False
    for _ in range(2):  # without setting the gradients to zero in between
        for number, size in enumerate(sizes, 1):
            x = torch.randn(size, 3, 8, 8, dtype=torch.float64, generator=generator)
            y = torch.randint(0, 10, (size,), generator=generator)
            mine = convoy.local_samples(net, size)
            F.cross_entropy(serial(x), y).backward()
            last = finish and number == len(sizes)
            with nullcontext() if last else convoy.accumulate(net):
                F.cross_entropy(net(x[mine]), y[mine]).backward()
            if not last:
                part = plain(net.stem.weight.grad)
                seen = [torch.empty_like(part) for _ in range(dist.get_world_size())]
                dist.all_gather(seen, part)
                differed |= any(not torch.equal(seen[0], other) for other in seen)
    got = convoy.gradients(net)
    want = {name: p.grad for name, p in serial.named_parameters()}
    largest = max(gradient.abs().max() for gradient in want.values())
    return max(((got[name] - want[name]).abs().max() / largest).item() for name in want), differed


@pytest.mark.parametrize("plan", ["sample=2", "filter=2", "owt=2", "sample=2,filter=2"])
def test_several_batches_give_the_gradient_of_one_device(plan: str) -> None:
    for error, differed in run_ranks(accumulated, 4 if "," in plan else 2, plan):
        assert error < 1e-12
        assert differed


def test_ranks_without_samples() -> None:
    for error, _ in run_ranks(accumulated, 2, "sample=2", True, (1, 4, 1)):
        assert error < 1e-12


def test_without_a_last_pass_nothing_is_exchanged() -> None:
    assert all(error > 1e-3 for error, _ in run_ranks(accumulated, 2, "sample=2", False))


def test_one_device() -> None:
    net = convoy.parallelize(Dense(), "serial", torch.zeros(2, 3, 8, 8))
    with convoy.accumulate(net):
        net(torch.ones(2, 3, 8, 8)).sum().backward()
    assert net.stem.weight.grad is not None
