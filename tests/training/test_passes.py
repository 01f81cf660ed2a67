"""An update of several passes: gradients travel once, and a rank may leave out passes in which it has no samples."""

import contextlib

import pytest
import torch
from torch import Tensor, nn

from convoy.engine.gradients import GradientReducer
from convoy.plans.plan import Plan
from convoy.training.division import Division, soonest
from convoy.training.under_plan import Method, UnderPlan
from ranks import run_ranks

SIZE, COUNTS = 2, (4, 1)


def _network(normed: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3), *([nn.BatchNorm2d(6)] if normed else []), nn.ReLU(), nn.Flatten(), nn.Linear(24, 5)]
    return nn.Sequential(*layers).double()


def _images() -> Tensor:
    return torch.randn(10, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _serial() -> list[Tensor]:
    model = _network(normed=False)
    model(_images()).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def _update(plan: str, normed: bool = False, late: bool = False) -> tuple[list[Tensor], list[int], int, bool]:
    """Two updates of four passes. Of the second: gradients, passes that ran, exchanges, whether some may be missing."""
    model = _network(normed)
    example = torch.zeros(SIZE, 3, 4, 4, dtype=torch.float64)
    network = UnderPlan(model, Plan.parse(plan), example, batch_norm="microbatch", seed=0, method=Method())
    exchanges: list[int] = []
    finish = GradientReducer._finish

    def counted(self: GradientReducer) -> None:
        exchanges.append(1)
        finish(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientReducer, "_finish", counted)
        for update in range(2):
            exchanges.clear()
            model.zero_grad()
            ran = _passes(network, update, late)
    gradients = [
        network.whole(name, parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    ]
    return gradients, ran, len(exchanges), network.skips()


def _passes(network: UnderPlan, update: int, late: bool) -> list[int]:
    division = Division((SIZE,) * sum(COUNTS), COUNTS if network.engine.num_sample_ranks == 2 else (sum(COUNTS),))
    passes = division.passes(1, late)
    network.divide(division, len(passes))
    ran = []
    for number, piece in enumerate(passes):
        part, last = piece.parts[network.engine.sample_rank], number == len(passes) - 1
        if not len(part) and not last and network.skips():
            continue
        ran.append(number)
        network.enter(update, piece)
        with contextlib.nullcontext() if last else network.paused():
            network.forward(_images()[list(part)]).square().sum().backward()
        network.passed()
    network.finish_update()
    return ran


@pytest.mark.parametrize(("late", "few"), [(False, [0, 3]), (True, [3])])
def test_a_rank_without_samples_leaves_the_pass_out(late: bool, few: list[int]) -> None:
    for rank, (gradients, ran, exchanges, skips) in enumerate(run_ranks(_update, 2, "sample=2", False, late)):
        assert skips
        assert ran == ([0, 1, 2, 3], few)[rank]
        assert exchanges == 1
        torch.testing.assert_close(gradients, _serial(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("plan", "normed"), [("owt=2", False), ("sample=2", True)])
def test_where_others_need_it_the_pass_runs(plan: str, normed: bool) -> None:
    for _, ran, exchanges, skips in run_ranks(_update, 2, plan, normed):
        assert not skips
        assert ran == [0, 1, 2, 3]
        assert exchanges == 1


@pytest.mark.parametrize("times", [(1.0, 1.0, 2.0), (1.0, 3.3), (2.0, 1.0, 1.5, 5.0)])
def test_the_parts_that_end_soonest(times: tuple[float, ...]) -> None:
    for total in range(len(times), 24):
        counts = soonest(total, times)
        assert sum(counts) == total and min(counts) >= 1
        last = max(count * time for count, time in zip(counts, times, strict=True))
        assert last == min(_last(rest, times) for rest in _divisions(total, len(times)))


def _last(counts: tuple[int, ...], times: tuple[float, ...]) -> float:
    return max(count * time for count, time in zip(counts, times, strict=True))


def _divisions(total: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(total,)]
    return [(first, *rest) for first in range(1, total - parts + 2) for rest in _divisions(total - first, parts - 1)]
