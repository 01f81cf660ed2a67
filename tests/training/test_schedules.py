import math

import pytest

from convoy.training.derived import resolve
from convoy.training.recipe import load_recipe
from convoy.training.schedules import Schedule

IMAGENET = 1_281_167


def schedule_of(name: str, *overrides: str, samples: int = IMAGENET) -> tuple[Schedule, int]:
    numbers = resolve(load_recipe(name, ["data.path=x", *overrides]), samples)
    return numbers.schedule, numbers.updates_per_epoch


def test_goyal_at_batch_8192() -> None:
    """0.1 to 3.2 over 5 epochs, then a tenth of it at 30, 60 and 80 (Goyal et al., 2017, sections 2 and 5.1)."""
    schedule, epoch = schedule_of("imagenet-90", "batch=8192")
    assert epoch == 156
    assert schedule.lr(0) == pytest.approx(0.1, rel=1e-12)
    assert schedule.lr(5 * epoch) == pytest.approx(3.2, rel=1e-12)
    assert schedule.lr(5 * epoch // 2) == pytest.approx((0.1 + 3.2) / 2, rel=1e-12)
    steps = [schedule.lr(u + 1) - schedule.lr(u) for u in range(5 * epoch)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-9)  # "a constant amount at each iteration"
    for start, end, rate in [(5, 30, 3.2), (30, 60, 0.32), (60, 80, 0.032), (80, 90, 0.0032)]:
        assert schedule.lr(start * epoch) == pytest.approx(rate, rel=1e-12)
        assert schedule.lr(end * epoch - 1) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize("batch", [64, 256])
def test_goyal_without_a_large_batch_has_a_flat_warmup(batch: int) -> None:
    schedule, epoch = schedule_of("imagenet-90", f"batch={batch}")
    assert {schedule.lr(0), schedule.lr(epoch), schedule.lr(6 * epoch)} == {0.1 * batch / 256}


def test_lars_decays_with_the_square() -> None:
    schedule, epoch = schedule_of("imagenet-lars")
    assert schedule.lr(0) == 0
    assert schedule.lr(5 * epoch) == pytest.approx(25, rel=1e-12)
    middle = (5 * epoch + 90 * epoch) // 2
    assert schedule.lr(middle) == pytest.approx(25 / 4, rel=1e-2)
    assert schedule.lr(90 * epoch - 1) == pytest.approx(25 / (85 * epoch) ** 2, rel=1e-9)
    assert schedule.lr(90 * epoch) == 0


def test_alexnet_drops_three_times_by_ten() -> None:
    schedule, epoch = schedule_of("alexnet-2012")
    rates = [schedule.lr(e * epoch) for e in (0, 24, 25, 49, 50, 74, 75, 99)]
    assert rates == pytest.approx([1e-2, 1e-2, 1e-3, 1e-3, 1e-4, 1e-4, 1e-5, 1e-5], rel=1e-12)


def test_cosine() -> None:
    schedule, _ = schedule_of(
        "lenet-mnist", "epochs=110ba", "schedule.warmup=10ba", "optimizer.lr=0.4", "schedule.final_lr=0.1"
    )
    assert schedule.lr(10) == pytest.approx(0.4)
    assert schedule.lr(60) == pytest.approx(0.25)
    assert schedule.lr(35) == pytest.approx(0.1 + 0.3 * (1 + math.cos(math.pi / 4)) / 2)
    assert schedule.lr(110) == pytest.approx(0.1)
    assert schedule.lr(10_000) == pytest.approx(0.1)
    rates = [schedule.lr(update) for update in range(10, 111)]
    assert rates == sorted(rates, reverse=True)


def test_constant() -> None:
    schedule, _ = schedule_of("lenet-mnist", "epochs=100ba", "schedule={name: constant}")
    assert {schedule.lr(update) for update in range(100)} == {0.05}


def test_a_rate_depends_on_nothing_but_the_number_of_the_update() -> None:
    forwards, _ = schedule_of("imagenet-90", "batch=8192")
    backwards, _ = schedule_of("imagenet-90", "batch=8192")
    updates = range(0, 14_040, 97)
    assert [forwards.lr(u) for u in updates] == [backwards.lr(u) for u in reversed(updates)][::-1]


def test_a_share_of_a_short_run_may_be_no_warmup() -> None:
    schedule, _ = schedule_of("lenet-mnist", "epochs=3ba")
    assert schedule.warmup == 0
    assert schedule.lr(0) == 0.05
