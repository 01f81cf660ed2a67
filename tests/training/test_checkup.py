"""What updates tell of a training: every rank's waits, without those for other ranks, and its first updates apart."""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from convoy.comm import collectives
from convoy.data import loader
from convoy.doctor.facts import Facts, Pictures
from convoy.launch.host import HostLoad, HostWatch, OtherProcess
from convoy.training import checkup as checkup_module
from convoy.training import step as step_module
from convoy.training.checkup import UPDATES, Checkup
from convoy.training.observation import Observation
from made_time import MadeTime, made_time
from ranks import run_ranks
from tiny import write_mnist, write_pictures
from training.examined import session

LATE_S, OWN_S, EXCHANGE_S = 0.03, 0.01, 0.5
"""Seconds by which a batch comes late, of an update's own work, and of every wait for other ranks."""
NUM = 12


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("checkup") / "data")


def exchanging(clock: MadeTime) -> SimpleNamespace:
    """The time of the collectives, which look at it as a wait begins and as it ends."""
    looks = itertools.cycle((0.0, EXCHANGE_S))

    def monotonic() -> float:
        clock.sleep(next(looks))
        return clock.now

    return SimpleNamespace(monotonic=monotonic)


def updates(data: Path, late: dict[int, tuple[int, int]], since: int, settings: tuple[str, ...] = ()) -> Facts:
    """What is seen of some updates, where each rank's batches come late from one update to another."""
    found = session(data, *settings)
    with made_time(checkup_module, step_module) as clock, patch.object(collectives, "time", exchanging(clock)):
        found.state.optimizer.register_step_pre_hook(lambda *_: clock.sleep(OWN_S))
        checkup, step, observation = Checkup(found), found.step(), Observation(found)
        first, last = late.get(found.ranks.rank, (0, 0))
        batches = found.batches(0, NUM)
        for done in range(NUM):
            observation.begin()
            checkup.ask()
            batch = next(batches)
            clock.sleep(LATE_S if first <= done < last else 0.0)
            assert checkup.got() == pytest.approx(LATE_S if first <= done < last else 0.0)
            with observation.update(step):
                result = step(batch, done)
            checkup.add(result)
        checkup.look()
        batches.close()
        assert checkup.num == NUM
        return checkup.facts(observation.conclude(None, None), since)


def test_one_device_that_waits(data: Path) -> None:
    (facts,) = run_ranks(updates, 1, data, {0: (0, NUM)}, 2)
    (rank,) = facts.ranks
    assert (facts.devices, facts.plan, facts.batch, rank.samples) == (1, "serial", 16, 16)
    assert rank.wait_s == facts.wait_s == pytest.approx(LATE_S)
    assert rank.own_s == pytest.approx(OWN_S) and facts.update_s == pytest.approx(LATE_S + OWN_S)
    assert (facts.workers, facts.threads, facts.microbatches, facts.updates_per_epoch) == (0, 1, 2, 6)
    assert facts.evaluate_every == 6 and facts.parts["forward"] > 0
    assert facts.evaluation_s is facts.compute_s is None
    assert facts.pictures == Pictures(in_memory=True) and not facts.can_pack  # nothing is to be said of their making
    assert rank.load is not None and rank.load.wall_s > 0


def test_the_first_updates_do_not_count(data: Path) -> None:
    (with_them,) = run_ranks(updates, 1, data, {0: (0, 4)}, 0)
    (without,) = run_ranks(updates, 1, data, {0: (0, 4)}, 4)
    assert with_them.wait_s == pytest.approx(LATE_S * 4 / NUM)
    assert without.wait_s == pytest.approx(0)


def test_of_two_ranks_the_late_one_is_told_from_the_one_that_waits_for_it(data: Path) -> None:
    first, second = run_ranks(updates, 2, data, {1: (0, NUM)}, 2)
    assert replace(first, threads=0) == replace(second, threads=0)  # all know the same
    assert [rank.samples for rank in first.ranks] == [8, 8]
    on_time, late = first.ranks
    assert late.wait_s == pytest.approx(LATE_S) and on_time.wait_s == pytest.approx(0)
    assert [rank.own_s for rank in first.ranks] == pytest.approx([OWN_S] * 2)  # an exchange is no work of its own
    assert first.update_s >= LATE_S + OWN_S + EXCHANGE_S


def remembered(data: Path) -> tuple[int, float]:
    found = session(data)
    checkup, step = Checkup(found), found.step()
    for done, batch in enumerate(found.batches(0, 2)):
        checkup.ask()
        checkup.got()
        result = step(batch, done)
    for _ in range(2 * UPDATES):
        checkup.ask()
        checkup.add(result)
    checkup.told(3)
    facts = checkup.facts(Observation(found).conclude(None, None), since=UPDATES - 1)
    return checkup.num, facts.workers


def test_the_last_updates_are_remembered(data: Path) -> None:
    assert run_ranks(remembered, 1, data) == [(2 * UPDATES, 3)]


def begun(photos: Path, settings: tuple[str, ...]) -> int:
    with patch.object(loader, "own_share", lambda: 4.0):
        return Checkup(session(photos, "data.image_size=28", *settings)).workers


@pytest.mark.parametrize(("settings", "expected"), [((), 2), (("data.workers=3",), 3)])
def test_the_workers_that_begin_are_counted(tmp_path: Path, settings: tuple[str, ...], expected: int) -> None:
    photos = write_pictures(tmp_path / "photos", size=(100, 75))
    assert run_ranks(begun, 1, photos, settings) == [expected]


def looked_at(data: Path) -> list[str]:
    """Who is busy beside a training, as it is seen after 5 seconds, 20, 20 and 5."""
    busy = iter("abc")

    def read(watch: HostWatch) -> HostLoad:
        process = OtherProcess(next(busy), 1, 1.0)
        return HostLoad(1.0, 1.0, 1.0, None, None, (process,), None, 0.0, 0, None, None, None)

    with made_time(checkup_module) as clock, patch.object(HostWatch, "read", read):
        checkup, names = Checkup(session(data)), list[str]()
        for seconds in (5.0, 20.0, 20.0, 5.0):
            clock.sleep(seconds)
            load = checkup.look()
            assert load is not None
            names.append(load.others[0].name)
    return names


def test_the_host_is_looked_at_anew_but_seldom(data: Path) -> None:
    assert run_ranks(looked_at, 1, data) == [["a", "b", "c", "c"]]


def unseen(data: Path) -> bool:
    with patch.object(HostWatch, "_count", side_effect=ValueError("no number")):
        checkup = Checkup(session(data))
        checkup.begin()
        return checkup.look() is None


def test_a_machine_that_cannot_be_looked_at_ends_nothing(data: Path) -> None:
    assert run_ranks(unseen, 1, data) == [True]
