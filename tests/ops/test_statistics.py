"""Running statistics: one term after the other in the order of the microbatches, whoever has them."""

import itertools

import torch
from torch import Tensor

from convoy.comm.groups import Groups
from convoy.ops.statistics import Running, RunningStatistics, add_term
from convoy.plans.mesh import Mesh
from ranks import run_ranks

CHANNELS = (5, 7)
STARTS = (0, 4, 8, 11, 14)


def term(layer: int, start: int, repeat: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * layer + 10 * start + repeat)
    return torch.stack(
        [torch.randn(CHANNELS[layer], generator=generator), torch.rand(CHANNELS[layer], generator=generator)]
    )


def fresh(layer: int, momentum: float | None, axes: tuple[int, ...]) -> Running:
    channels = CHANNELS[layer]
    return Running(f"bn{layer}", torch.zeros(channels), torch.ones(channels), torch.tensor(5), momentum, axes)


def expected(momentum: float | None, starts: tuple[int, ...] = STARTS) -> list[Tensor]:
    found = []
    for layer in range(2):
        running = fresh(layer, momentum, ())
        for number, start in enumerate(starts):
            weight = 1 / (number + 1) if momentum is None else momentum
            add_term([running.mean, running.var], term(layer, start).unbind(0), [weight] * 2)
        found += [running.mean, running.var]
    return found


def on_ranks(
    sizes: tuple[int, ...], owners: tuple[int, ...], momentum: float | None, cut: int, in_order: bool
) -> list[Tensor]:
    """Layer 0 has its samples divided over axis 0; layer 1 has all of them on every rank."""
    mesh = Mesh(("a", "b")[: len(sizes)], sizes)
    groups, statistics = Groups(mesh), RunningStatistics(in_order)
    layers = [fresh(0, momentum, (0,)), fresh(1, momentum, ())]
    for some in (range(cut, 5), range(cut)):  # two passes, the later microbatches first
        for layer, running in enumerate(layers):
            starts = [STARTS[i] for i in some]
            holders = [owners[i] if layer == 0 else 0 for i in some]
            own = groups.coordinates[0] if layer == 0 else 0
            terms = [term(layer, s) for s, h in zip(starts, holders, strict=True) if h == own]
            statistics.record(running, starts, holders, *([torch.stack(terms)] if terms else []))
    statistics.fold(groups)
    statistics.fold(groups)  # nothing is left
    return [buffer for running in layers for buffer in (running.mean, running.var)]


WAYS = list(itertools.product((0.1, None), (True, False)))


def every_way(sizes: tuple[int, ...], owners: tuple[int, ...]) -> list[list[Tensor]]:
    return [on_ranks(sizes, owners, momentum, 3, in_order) for momentum, in_order in WAYS]


OWNERS = [
    ((1,), (0,) * 5),
    ((2,), (0, 0, 0, 0, 1)),
    ((2,), (1,) * 5),
    ((3,), (0, 0, 2, 2, 2)),
    ((2, 2), (0, 0, 1, 1, 1)),
]


def test_the_terms_of_any_number_of_ranks() -> None:
    """In order the bits of one rank; else its result."""
    for sizes, owners in OWNERS:
        for rank in run_ranks(every_way, torch.Size(sizes).numel(), sizes, owners):
            for (momentum, in_order), found in zip(WAYS, rank, strict=True):
                for got, want in zip(found, expected(momentum), strict=True):
                    assert torch.equal(got, want) if in_order else torch.allclose(got, want, rtol=1e-6, atol=1e-7)
    orders = [expected(0.1, order) for order in itertools.islice(itertools.permutations(STARTS), 2)]
    assert not all(torch.equal(one, other) for one, other in zip(*orders, strict=True))  # the control


def test_calls_that_share_their_buffers_take_turns_and_no_sum_is_in_low_precision() -> None:
    for in_order in (True, False):
        running, statistics = fresh(0, 0.5, ()), RunningStatistics(in_order)
        for repeat in range(2):
            statistics.record(running, STARTS, (0,) * 5, torch.stack([term(0, start, repeat) for start in STARTS]))
        with torch.autocast("cpu", torch.bfloat16):
            statistics.fold()
        want = fresh(0, 0.5, ())
        for start, repeat in itertools.product(STARTS, range(2)):
            add_term([want.mean, want.var], term(0, start, repeat).unbind(0), [0.5, 0.5])
        assert torch.equal(running.mean, want.mean) or not in_order
        assert torch.allclose(running.mean, want.mean, rtol=1e-6)


def test_a_term_has_the_same_bits_wherever_its_channel_lies() -> None:
    mean, var = torch.randn(37), torch.rand(37)
    whole = [torch.randn(37), torch.rand(37)]
    parts = [[b[:3].clone(), b[3:].clone()] for b in whole]
    add_term(whole, (mean, var), [0.1, 0.1])
    for buffers, piece in ((0, slice(0, 3)), (1, slice(3, 37))):
        part = [parts[0][buffers], parts[1][buffers]]
        add_term(part, (mean[piece].clone(), var[piece].clone()), [0.1, 0.1])
        assert torch.equal(part[0], whole[0][piece])
        assert torch.equal(part[1], whole[1][piece])
