"""A minute of a training: what is measured of it, on one device and on two, without a file that stays."""

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from convoy.data import Batch
from convoy.doctor.diagnosis import Diagnosis
from convoy.doctor.facts import Facts, Trial
from convoy.engine import profiling
from convoy.errors import ConvoyError
from convoy.launch import cores
from convoy.training import Session, budget, checkup, examination, step, trials
from convoy.training.budget import Budget
from convoy.training.checkpoints import Saver
from convoy.training.evaluate import EvaluationTally
from convoy.training.examination import examine
from convoy.training.input import InputPipeline
from convoy.training.step import random_batch
from made_time import MadeTime, made_time
from ranks import run_ranks
from tiny import write_mnist, write_pictures
from training.examined import cores_as_before, session

EACH = ("checkpoint.every=1ba",)
CLOCKS = (budget, examination, checkup, step, trials, profiling)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("examined") / "data")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("photos") / "data", size=(100, 75))


def refuse(*args: Any, **options: Any) -> Any:
    raise PermissionError(13, "Permission denied")


def break_off(*args: Any, **options: Any) -> Any:
    raise ConvoyError("the checkpoint could not be written")


BROKEN: dict[str, AbstractContextManager[Any]] = {
    "": nullcontext(),
    "folder": patch.object(tempfile, "TemporaryDirectory", refuse),
    "save": patch.object(Saver, "save", break_off),
}


def examined(data: Path, folder: Path, settings: tuple[str, ...], trials: bool, broken: str) -> tuple[Facts, Any]:
    """An update takes 0.1 s, a batch of an evaluation as long, and on rank 1 both take twice that."""
    os.chdir(folder)
    found, said = session(data, *settings), list[str]()
    limits = Budget(found.ranks, 40.0, began=0.0, say=lambda what, *_: said.append(what.split(",")[0]))
    with made_time(*CLOCKS) as clock, cores_as_before(), BROKEN[broken], ExitStack() as stack:
        each_s = 0.1 * (1 + found.ranks.rank)
        hook = register_optimizer_step_pre_hook(lambda *_: clock.sleep(each_s))  # in sessions of trials too
        stack.callback(hook.remove)
        stack.enter_context(patch.object(EvaluationTally, "add", clock.before(EvaluationTally.add, lambda: each_s)))
        facts = examine(found, limits, trials=trials, folder=folder / "runs" / "x")
    return facts, list(dict.fromkeys(said))


def by_the_clock(data: Path, folder: Path) -> tuple[Facts, list[str], int]:
    """An update takes 10 ms, a batch of an evaluation 0.1 s, and half a second in the first one, a checkpoint a second.

    And how many batches of evaluations there were.
    """
    os.chdir(folder)
    found, said, batches = session(data, *EACH), list[str](), itertools.count()
    with made_time(*CLOCKS) as clock, cores_as_before():
        found.state.optimizer.register_step_pre_hook(lambda *_: clock.sleep(0.01))
        counted = clock.before(EvaluationTally.add, lambda: 0.1 if next(batches) else 0.5)
        saved = clock.before(Saver.save, lambda: 1.0)
        with patch.object(EvaluationTally, "add", counted), patch.object(Saver, "save", saved):
            limits = Budget(found.ranks, 20.0, say=lambda what, *_: said.append(what.split(",")[0]))
            facts = examine(found, limits, trials=False, folder=folder / "runs" / "x")
    return facts, list(dict.fromkeys(said)), next(batches)


def test_one_device(data: Path, tmp_path: Path) -> None:
    ((facts, said, batches),) = run_ranks(by_the_clock, 1, data, tmp_path)
    assert facts.pictures is not None and facts.pictures.in_memory
    assert facts.update_s == pytest.approx(0.01) == facts.compute_s
    assert batches > 0 and facts.evaluation_s == pytest.approx(0.1 * batches / 2 + 0.5 * 1.0)  # half save the best
    assert facts.checkpoint_s == pytest.approx(1.0)
    assert facts.checkpoint_every == 1
    assert facts.trials == () and facts.hosts == ()
    assert said[:3] == ["timing updates", "timing pictures", "timing an evaluation"]
    causes = [
        advice.cause for advice in Diagnosis.of(facts).advice if advice.cause != "busy"
    ]  # other programs run, too
    assert causes[0] == "checkpoint"
    assert not list(tmp_path.iterdir())


def beside_others(data: Path, threads: int) -> Facts:
    """Two threads on two cores: an update takes 10 ms, and in a trial of fewer of them once 4 ms."""
    found, told = session(data, "threads=2"), Trial("threads", (), 0.002, 0.004, threads=threads)
    machine = {"own_cores": lambda: [0, 1], "cores_allowed": lambda: 2.0}
    with (
        made_time(*CLOCKS) as clock,
        patch.multiple(cores, **machine),
        patch.object(examination, "try_changes", lambda *_, **options: (0.004, (told,))),
    ):
        found.state.optimizer.register_step_pre_hook(lambda *_: clock.sleep(0.01))
        return examine(found, Budget(found.ranks, 10.0))


@pytest.mark.parametrize(("threads", "before_s"), [(1, 0.01), (2, 0.004)])
def test_beside_others_many_updates_count(data: Path, threads: int, before_s: float) -> None:
    (facts,) = run_ranks(beside_others, 1, data, threads)
    assert facts.trials[0].before_s == pytest.approx(before_s) == facts.compute_s


def test_two_devices_know_the_same(data: Path, tmp_path: Path) -> None:
    (facts, _), (other, _) = run_ranks(examined, 2, data, tmp_path, EACH, True, "")
    assert facts == other
    assert facts.devices == len(facts.ranks) == 2 and facts.plan == "sample=2"
    assert facts.link_bits_per_s is not None and facts.link_bits_per_s > 1e6 and len(facts.hosts) == 1
    assert facts.checkpoint_s is not None
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("parallel.plan=stage=2",),
        ("parallel.plan=filter=2",),
        ("parallel.shares=[3,1]", "batch=32"),
        ("parallel.shares=auto", "batch=32"),
        ("parallel.local_sgd=2",),
        ("reproducible=true", "ema.decay=0.9"),
        ("parallel.plan=auto",),
    ],
)
def test_trainings_of_other_kinds(data: Path, tmp_path: Path, settings: tuple[str, ...]) -> None:
    (facts, _), (other, _) = run_ranks(examined, 2, data, tmp_path, (*settings, *EACH), True, "")
    assert facts == other
    assert facts.trials and facts.compute_s and facts.evaluation_s and facts.pictures
    found = Diagnosis.of(facts)
    assert found.text().count("\n") >= 1 and Diagnosis.from_document(found.to_document()) == found


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("broken", ["folder", "save"])
def test_without_a_place_for_checkpoints_they_are_left_out(data: Path, tmp_path: Path, world: int, broken: str) -> None:
    for facts, _ in run_ranks(examined, world, data, tmp_path, EACH, False, broken):
        assert facts.checkpoint_s is None and facts.evaluation_s is not None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("every", ["auto", "1000000000ba"])
def test_checkpoints_that_cost_nothing_are_not_tried(data: Path, tmp_path: Path, every: str) -> None:
    settings = (f"checkpoint.every={every}", "evaluate_every=100000ba")
    ((facts, said),) = run_ranks(examined, 1, data, tmp_path, settings, False, "")
    assert facts.checkpoint_s is None and "timing checkpoints" not in said


@pytest.mark.parametrize(("batch", "world"), [("1", 1), ("4", 1), ("2", 2)])
def test_small_batches(photos: Path, tmp_path: Path, batch: str, world: int) -> None:
    settings = (f"batch={batch}", "microbatch=1", "data.image_size=28", "data.workers=0")
    facts, _ = run_ranks(examined, world, photos, tmp_path, settings, False, "")[0]
    assert facts.pictures is not None and facts.pictures.cpu_s > 0
    assert facts.pictures.read_s >= 0 and facts.update_s > 0
    assert Diagnosis.from_document(Diagnosis.of(facts).to_document()) == Diagnosis.of(facts)


def both_evaluations(data: Path) -> tuple[float, float, int]:
    """Seconds of an evaluation as it follows from its first batches and of all of them, and how many there are."""
    found, asked = session(data, "batch=2", "microbatch=1"), list[bool]()
    own = found.evaluate

    def evaluate(of: Session, stop: Any) -> Any:
        asked.clear()
        return own(lambda: asked.append(stop()) or asked[-1])

    with made_time(examination, budget) as clock, patch.object(type(found), "evaluate", evaluate):
        # Rank 1 is slower, and the first batch is.
        batch = clock.before(InputPipeline.__call__, lambda: (1 + found.ranks.rank) * (4.0 if len(asked) == 1 else 1.0))
        with patch.object(InputPipeline, "__call__", batch):
            part = examination._evaluation_s(found, Budget(found.ranks))
            assert asked == [False] * 4 + [True]
            with patch.object(examination, "_TEST_BATCHES", 10**6):
                return part, examination._evaluation_s(found, Budget(found.ranks)), len(asked)


def test_an_evaluation_follows_from_its_first_batches(tmp_path: Path) -> None:
    data = write_mnist(tmp_path / "data", num_test=600)
    for part, whole, number in run_ranks(both_evaluations, 2, data):
        assert part == whole == 2 * (4 + (number - 1)) and number > 8


def seconds_of_a_checkpoint(data: Path, folder: Path) -> float:
    """An update takes a second, and its checkpoint 3, on rank 1 as many more; but for the first, which takes 100."""
    found, number = session(data, *EACH), itertools.count()
    step, facts = found.step(), Facts("tiny", "data", found.ranks.num, str(found.plan), 16, 1.0, ())
    with made_time(examination, budget) as clock:
        step.optimizer.register_step_pre_hook(lambda *_: clock.sleep(1.0))
        save = clock.before(Saver.save, lambda: 3.0 * (1 + found.ranks.rank) if next(number) else 100.0)
        with patch.object(Saver, "save", save):
            return examination._checkpoint_s(found, 2, facts, folder, Budget(found.ranks, 10_000.0))


@pytest.mark.parametrize("world", [1, 2])
def test_of_a_checkpoint_what_it_adds_to_updates_counts(data: Path, tmp_path: Path, world: int) -> None:
    assert run_ranks(seconds_of_a_checkpoint, world, data, tmp_path / "not" / "yet") == [3.0 * world] * world
    assert not list(tmp_path.iterdir())


class Loader:
    """Worker processes that make batches one after the other, ahead of who asks, by a clock of the test.

    Args:
        seconds: that batch number n takes.
        most: batches that lie ready at most.
        grows: the batch with which their number is said to grow.
    """

    def __init__(
        self, of: Session, clock: MadeTime, seconds: Callable[[int], float], most: int, grows: int = -1
    ) -> None:
        self.batch = random_batch(of.step(), of.image_shape, of.device)
        self.clock, self.seconds, self.most, self.grows = clock, seconds, most, grows

    def batches(self, first: int, number: int, told: Callable[[int], None]) -> Iterator[Batch]:
        ready, taken = self.clock.now, list[float]()
        for place in range(number):
            free = taken[place - self.most] if place >= self.most else 0.0
            ready = max(ready, free) + self.seconds(place)
            self.clock.sleep(max(0.0, ready - self.clock.now))
            taken.append(self.clock.now)
            if place == self.grows:
                told(4)
            yield self.batch


PACES: dict[str, tuple[Callable[[int], float], Callable[[int], float], int, float, float]] = {
    # seconds to make a batch, to compute an update, when workers grow, and what an update takes and waits in the end
    "a first update of seconds": (lambda _: 0.01, lambda n: 0.02 if n else 5.0, -1, 0.02, 0.0),
    "first updates of seconds": (lambda _: 0.05, lambda n: 0.02 if n > 7 else 0.5, -1, 0.05, 0.03),
    "other workers that start": (lambda n: 0.1 if n < 20 else 0.01, lambda _: 0.02, 6, 0.02, 0.0),
    "no other workers": (lambda _: 0.1, lambda _: 0.02, -1, 0.1, 0.08),
    "one update after the other": (lambda n: 0.2 - 0.008 * min(n, 20), lambda _: 0.02, -1, 0.04, 0.02),
}


def at_its_pace(data: Path, case: str) -> tuple[Facts, float]:
    """Updates as they are timed, and how long that takes."""
    made_s, computed_s, grows, *_ = PACES[case]
    found, number = session(data, "data.workers=2", "batch=96", "microbatch=96"), itertools.count()
    with made_time(*CLOCKS) as clock:
        loader = Loader(found, clock, made_s, 6, grows)
        found.state.optimizer.register_step_pre_hook(lambda *_: clock.sleep(computed_s(next(number))))
        with patch.object(found, "batches", loader.batches):
            return examination._measure_updates(found, Budget(found.ranks, 30.0)), clock.now


@pytest.mark.parametrize("case", PACES)
def test_a_training_is_timed_at_its_pace(data: Path, case: str) -> None:
    ((facts, taken),) = run_ranks(at_its_pace, 1, data, case)
    *_, update_s, wait_s = PACES[case]
    assert facts.update_s == pytest.approx(update_s, rel=0.05) and facts.wait_s == pytest.approx(wait_s, abs=0.002)
    assert taken < 0.4 * 30 + 2 and not facts.notes


def of_long_updates(data: Path, folder: Path, update_s: float, seconds: float) -> tuple[Facts, float]:
    """An update takes so long, a batch of an evaluation a third of it."""
    found = session(data, *EACH)
    with made_time(*CLOCKS) as clock:
        found.state.optimizer.register_step_pre_hook(lambda *_: clock.sleep(update_s))
        clock.sleep(10.0)  # to set it up
        add = clock.before(EvaluationTally.add, lambda: update_s / 3)
        with patch.object(EvaluationTally, "add", add), cores_as_before():
            return examine(found, Budget(found.ranks, seconds, began=0.0), folder=folder), clock.now


@pytest.mark.parametrize(
    ("update_s", "seconds", "most_s", "notes"),
    [
        (8.0, 60.0, 60.0, ["An update takes 8.00 s, so that only 1 update could be timed.", "There was no time for"]),
        (2.0, 60.0, 60.0, ["There was no time for"]),
        (
            30.0,
            20.0,
            41.0,
            ["The first update took 30.0 s, and was the only one that there was time for.", "There was"],
        ),
    ],
)
def test_long_updates_do_not_make_it_late(
    data: Path, tmp_path: Path, update_s: float, seconds: float, most_s: float, notes: list[str]
) -> None:
    ((facts, taken),) = run_ranks(of_long_updates, 1, data, tmp_path, update_s, seconds)
    assert facts.update_s == pytest.approx(update_s) and taken <= most_s
    assert len(facts.notes) == len(notes)
    assert all(note.startswith(words) for note, words in zip(facts.notes, notes, strict=True)), facts.notes
    assert f"--seconds {2 * seconds:g} leaves more." in facts.notes[-1]
