"""Running statistics: one term after the other in the order of the microbatches, whoever has them."""

import itertools

import torch
from torch import Tensor

from convoy.comm.groups import Groups
from convoy.ops.statistics import Running, RunningStatistics, add_term
from convoy.plans.mesh import Mesh
from ranks import run_ranks

CHANNELS, STARTS = (5, 7), (0, 4, 8, 11, 14)


def term(layer: int, start: int) -> Tensor:
    return torch.rand(2, CHANNELS[layer], generator=torch.Generator().manual_seed(100 * layer + start))


def fresh(layer: int, momentum: float | None, axes: tuple[int, ...]) -> Running:
    channels = CHANNELS[layer]
    return Running(torch.zeros(channels), torch.ones(channels), momentum, torch.tensor(5), f"bn{layer}", axes)


def expected(momentum: float | None, starts: tuple[int, ...] = STARTS) -> list[Tensor]:
    runnings = [fresh(layer, momentum, ()) for layer in range(2)]
    for layer, running in enumerate(runnings):
        for number, start in enumerate(starts):
            weight = 1 / (number + 1) if momentum is None else momentum
            add_term([running.mean, running.var], term(layer, start).unbind(0), [weight] * 2)
    return [buffer for running in runnings for buffer in (running.mean, running.var)]


def on_ranks(sizes: tuple[int, ...], owners: tuple[int, ...], momentum: float | None, in_order: bool) -> list[Tensor]:
    """Layer 0 has its samples divided over axis 0; layer 1 has all of them on every rank."""
    groups, statistics = Groups(Mesh(("a", "b")[: len(sizes)], sizes)), RunningStatistics(in_order)
    layers = [fresh(0, momentum, (0,)), fresh(1, momentum, ())]
    for some in (range(3, 5), range(3)):  # two passes, the later microbatches first
        for layer, running in enumerate(layers):
            starts = [STARTS[i] for i in some]
            holders = [owners[i] if layer == 0 else 0 for i in some]
            own = groups.coordinates[0] if layer == 0 else 0
            terms = [term(layer, s) for s, h in zip(starts, holders, strict=True) if h == own]
            statistics.record(running, starts, holders, *([torch.stack(terms)] if terms else []))
    with torch.autocast("cpu", torch.bfloat16):  # no sum is in low precision
        statistics.fold(groups)
    statistics.fold(groups)  # nothing is left
    return [buffer for running in layers for buffer in (running.mean, running.var)]


WAYS = list(itertools.product((0.1, None), (True, False)))
OWNERS = [((1,), (0,) * 5), ((2,), (0, 0, 0, 0, 1)), ((2,), (1,) * 5), ((2, 2), (0, 0, 1, 1, 1))]


def every_way(cases: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[list[Tensor]]:
    return [on_ranks(*case, momentum, in_order) for case in cases for momentum, in_order in WAYS]


def test_the_terms_of_any_number_of_ranks() -> None:
    """In order the bits of one rank; else its result."""
    for world in (1, 2, 4):
        cases = [case for case in OWNERS if torch.Size(case[0]).numel() == world]
        for rank in run_ranks(every_way, world, cases):
            for (momentum, in_order), found in zip(WAYS * len(cases), rank, strict=True):
                for got, want in zip(found, expected(momentum), strict=True):
                    assert torch.equal(got, want) if in_order else torch.allclose(got, want, rtol=1e-6, atol=1e-7)
    orders = [expected(0.1, order) for order in itertools.islice(itertools.permutations(STARTS), 2)]
    assert not all(torch.equal(one, other) for one, other in zip(*orders, strict=True))  # the control
