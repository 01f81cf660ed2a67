"""Learning rates at points of the papers' formulae; when a checkpoint is due; averages of weights; the loss."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.comm.ranks import Ranks
from convoy.errors import ConvoyError
from convoy.recipe.recipe import LookaheadConfig, load_recipe
from convoy.tasks.classification import Classification
from convoy.training.checkpoints import FIRST_UPDATES, Timetable
from convoy.training.derived import resolve
from convoy.training.state import MovingAverage, SlowWeights, effective_decay
from ranks import run_ranks

POINTS = {
    # 0.1 to 3.2 over 5 epochs, then a tenth of it at 30, 60 and 80 (Goyal et al., 2017, sections 2 and 5.1)
    "imagenet-90 batch=8192": {0: 0.1, 2.5: 1.65, 5: 3.2, -30: 3.2, 30: 0.32, -60: 0.32, 60: 0.032, 80: 0.0032},
    "imagenet-90 batch=64": {0: 0.025, 1: 0.025, 6: 0.025},  # without a large batch the warm-up is flat
    # You, Gitman and Ginsburg, 2017: with the square of what is left
    "imagenet-lars": {0: 0, 5: 25, 47.5: 25 / 4, 90: 0},
    # Krizhevsky, 2012: three times by ten
    "alexnet-2012": {0: 1e-2, 24: 1e-2, 25: 1e-3, 49: 1e-3, 50: 1e-4, 74: 1e-4, 75: 1e-5, 99: 1e-5},
    # Jordan, 2024, listing 4: a triangle from 0.2 over 1 at 23 % to 0.07 of the peak, which is 11.5/(1 + 1/(1 - 0.85))
    "cifar10-94 epochs=476ba": {0: 0.3, 54.5: 0.9, 109: 1.5, 292.5: 0.8025, 476: 0.105},
    # FFCV, get_cyclic_lr: np.interp over [0, 2, 16] and [1e-4 · lr, lr, 0]
    "imagenet-16": {0: 5e-5, 1: 0.250025, 2: 0.5, 4: 6 / 14, 9: 0.25, 13: 1.5 / 14, 16: 0},
    "imagenet-88": {0: 1.7e-4, 1: 0.850085, 2: 1.7, 45: 0.85, 88: 0},
    # Wightman et al., 2021, table 2: 5e-3 and 8e-3 at the end of 5 epochs of warm-up, then half a wave
    "imagenet-a2": {0: 1e-4, 2.5: 2.55e-3, 5: 5e-3, 152.5: 2.5005e-3, 300: 1e-6},
    "imagenet-a3": {0: 1e-4, 5: 8e-3, 52.5: 4.0005e-3, 100: 1e-6},
    # In updates: 10 of warm-up, then half a wave from 0.4 to 0.1
    "lenet-mnist epochs=110ba schedule.warmup=10ba optimizer.lr=0.4 schedule.final_lr=0.1": {
        10: 0.4, 35: 0.1 + 0.3 * (1 + math.cos(math.pi / 4)) / 2, 60: 0.25, 110: 0.1, 10_000: 0.1
    },
    "lenet-mnist epochs=100ba schedule.name=constant schedule.warmup=0ep": {0: 0.05, 50: 0.05, 99: 0.05},
    "lenet-mnist epochs=3ba": {0: 0.05},  # a share of a short run may be no warm-up
}  # fmt: skip


def test_learning_rates_are_those_of_the_paper() -> None:
    for line in POINTS:
        points(*line.split(), want=POINTS[line])


def points(name: str, *changes: str, want: dict[float, float]) -> None:
    numbers = resolve(load_recipe(name, ["data.path=x", *changes]), 1_281_167)
    epoch = 1 if {"lenet-mnist", "cifar10-94"} & {name} else numbers.updates_per_epoch
    places = [(int(at * epoch) if epoch > 1 else at) if at >= 0 else -at * epoch - 1 for at in want]
    found = {at: numbers.schedule.lr(place) for at, place in zip(want, places, strict=True)}
    assert found == pytest.approx(want, rel=1e-2 if "lars" in name else 1e-3 if "-a" in name else 1e-12)
    warmup = [numbers.schedule.lr(u + 1) - numbers.schedule.lr(u) for u in range(numbers.schedule.warmup)]
    assert not warmup or max(warmup) == pytest.approx(min(warmup), rel=1e-9)  # "a constant amount at each iteration"


# When a checkpoint is due: the same updates on all ranks, whatever their clocks say


class Told(Timetable):
    """With a clock that shows what it is told."""

    seconds = 1.0

    @property
    def update_s(self) -> float:
        return self.seconds


def due(every: int | None, updates: range, seconds: float) -> list[int]:
    """After which updates it was; every checkpoint is on disk at once."""
    when, steps = Told(every, Ranks.here(), 320.0), []
    when.seconds = seconds
    for done in updates:
        if when.due(done):
            steps.append(done)
            when.saved(done)
            when.measured(0.1, 0.01, 0.5)
    return steps


def test_the_first_checkpoint_is_soon_and_the_others_follow_from_its_cost() -> None:
    assert due(4, range(1, 13), 1.0) == [4, 8, 12]
    for update_s, first in ((0.001, FIRST_UPDATES), (1.0, 30), (100.0, 2)):
        want = list(range(first, 121, 16))  # sqrt(2 · 0.1 s · 320 s) = 8 s of 0.5 s each
        assert due(None, range(1, 121), update_s) == want


def _with_clocks_apart() -> list[int]:
    rank = Ranks.here().rank
    return due(None, range(1, 100), 1.0 if rank == 0 else 0.001 * rank)


def test_all_ranks_follow_one_clock() -> None:
    assert run_ranks(_with_clocks_apart, 3) == [[30, 46, 62, 78, 94]] * 3


# Averages of weights


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def walk(net: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    net(torch.randn(5, 3, generator=generator, dtype=torch.float64))


def test_averages_are_the_formula_and_buffers_those_of_the_network() -> None:
    net = network()
    averaged, want = MovingAverage(net, 0.3), dict[str, Tensor]()
    for step in range(8):
        walk(net, step)
        averaged.update(net)
        decay = 0.0 if step == 0 else min(0.3, (1 + step) / (10 + step))
        for name, parameter in net.named_parameters():
            want[name] = decay * want.get(name, torch.zeros_like(parameter)) + (1 - decay) * parameter.detach()
    trained = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with averaged.in_place(net):
        torch.testing.assert_close(dict(net.named_parameters()), want, rtol=1e-12, atol=0)
        assert not torch.equal(net[0].weight, trained["0.weight"])
        assert all(torch.equal(buffer, trained[name]) for name, buffer in net.named_buffers())
    assert all(torch.equal(tensor, trained[name]) for name, tensor in net.state_dict().items())
    decays = {1: 2 / 11, 10: 11 / 20, 8_990: 0.999, 10**6: 0.999}
    assert {number: effective_decay(0.999, number) for number in decays} == pytest.approx(decays)


def test_slow_weights_are_the_formula_with_running_statistics_and_training_goes_on_from_them() -> None:
    """Zhang et al., 2019, algorithm 1; the step falls as in Jordan, 2024."""
    net = network()
    slow = SlowWeights(net, LookaheadConfig(every=3, step=0.2, power=2.0), total_updates=12)
    want = {name: tensor.clone() for name, tensor in net.state_dict().items() if tensor.is_floating_point()}
    for done in range(1, 13):
        walk(net, done)
        fast = {name: net.state_dict()[name].clone() for name in want}
        slow.update(net)
        if done % 3 == 0:
            step = 1 - 0.8 * (done / 12) ** 2
            fast = want = {name: want[name] + step * (fast[name] - want[name]) for name in want}
        torch.testing.assert_close({name: net.state_dict()[name] for name in want}, fast, rtol=1e-12, atol=1e-12)
        with slow.in_place(net):
            torch.testing.assert_close({name: net.state_dict()[name] for name in want}, want, rtol=1e-12, atol=1e-12)


# The loss over one or several heads

LOGITS, AUX = (torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
LABELS = torch.tensor([0, 1, 2, 3, 0, 1])


def test_auxiliary_heads_count_with_their_weight_and_smoothing_mixes_with_the_uniform_distribution() -> None:
    task = partial(Classification, range(4))
    one, other = F.cross_entropy(LOGITS, LABELS), F.cross_entropy(AUX, LABELS)
    assert torch.allclose(task(aux_weight=0.3).loss((LOGITS, AUX, AUX), LABELS), one + 0.6 * other)
    assert torch.equal(task().loss((LOGITS, None, None), LABELS), one)  # heads that are off
    soft = 0.9 * F.one_hot(LABELS, 4).float() + 0.1 / 4
    assert torch.allclose(task(label_smoothing=0.1).loss(LOGITS, LABELS), F.cross_entropy(LOGITS, soft))
    for outputs in (torch.zeros(2, 3, 4, 4), None):
        with pytest.raises(ConvoyError, match="logits"):
            task().heads(outputs)
