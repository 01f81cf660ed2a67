"""What holds a training back: what updates tell of it, a minute of it, changes that are tried; and nothing is left."""

import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from convoy.comm import collectives
from convoy.data import Batch
from convoy.doctor.advice import Advice
from convoy.doctor.diagnosis import WORTH_SAYING, Diagnosis
from convoy.doctor.facts import Facts, Pictures, Trial
from convoy.engine import profiling
from convoy.errors import ConvoyError
from convoy.launch.host import HostWatch
from convoy.resources import own_cores, pin
from convoy.training import Session, budget, checkup, evaluate, examination, loop, step, trials
from convoy.training.budget import Budget
from convoy.training.checkpoints import Saver
from convoy.training.checkup import Checkup
from convoy.training.evaluate import EvaluationTally
from convoy.training.examination import examine
from convoy.training.observation import Observation
from convoy.training.set_up import set_up
from convoy.training.step import TrainingStep, random_batch
from convoy.training.trials import Change, changes, try_changes
from made_time import MadeTime, made_time
from ranks import run_ranks
from training.scenarios import cores_as_before, session, summary
from whole_runs import Ended, train_here

slow = pytest.mark.slow
EACH = ("checkpoint.every=1ba",)
CLOCKS = (budget, examination, checkup, step, trials, profiling)

# What updates tell: every rank's waits, without those for other ranks, and its first updates apart

LATE_S, OWN_S, EXCHANGE_S, NUM = 0.03, 0.01, 0.5, 12
"""Seconds by which a batch comes late, of an update's own work, and of every wait for other ranks; updates."""


def exchanging(clock: MadeTime) -> SimpleNamespace:
    """The time of the collectives, which look at it as a wait begins and as it ends."""
    looks = itertools.cycle((0.0, EXCHANGE_S))

    def monotonic() -> float:
        clock.sleep(next(looks))
        return clock.now

    return SimpleNamespace(monotonic=monotonic)


def updates(data: Path, late: dict[int, tuple[int, int]], since: int) -> Facts:
    """What is seen of some updates, where each rank's batches come late from one update to another."""
    found = session(data)
    with made_time(checkup, step) as clock, patch.object(collectives, "time", exchanging(clock)):
        found.state.optimizer.register_step_pre_hook(lambda *_: clock.sleep(OWN_S))
        seen, work, observation = Checkup(found), found.step(), Observation(found)
        first, last = late.get(found.ranks.rank, (0, 0))
        for done, batch in enumerate(found.batches(0, NUM)):
            observation.begin()
            seen.ask()
            clock.sleep(LATE_S if first <= done < last else 0.0)
            seen.got()
            with observation.update(work):
                result = work(batch, done)
            seen.add(result)
        seen.look()
        return seen.facts(observation.conclude(None, None), since)


def test_of_updates_waits_and_own_work_are_told_apart(data: Path) -> None:
    (facts,) = run_ranks(updates, 1, data, {0: (0, NUM)}, 2)
    (rank,) = facts.ranks
    assert (facts.devices, facts.plan, facts.batch, rank.samples) == (1, "serial", 16, 16)
    assert rank.wait_s == facts.wait_s == pytest.approx(LATE_S)
    assert rank.own_s == pytest.approx(OWN_S) and facts.update_s == pytest.approx(LATE_S + OWN_S)
    assert (facts.workers, facts.threads, facts.microbatches, facts.updates_per_epoch) == (0, 1, 2, 6)
    assert facts.pictures == Pictures(in_memory=True) and rank.load is not None and rank.load.wall_s > 0
    for since, wait_s in ((0, LATE_S * 4 / NUM), (4, 0.0)):  # the first updates do not count
        assert run_ranks(updates, 1, data, {0: (0, 4)}, since)[0].wait_s == pytest.approx(wait_s)
    first, second = run_ranks(updates, 2, data, {1: (0, NUM)}, 2)
    assert replace(first, threads=0) == replace(second, threads=0)  # all know the same
    on_time, late = first.ranks
    assert late.wait_s == pytest.approx(LATE_S) and on_time.wait_s == pytest.approx(0)
    assert [rank.own_s for rank in first.ranks] == pytest.approx([OWN_S] * 2)  # an exchange is no work of its own
    assert first.update_s >= LATE_S + OWN_S + EXCHANGE_S


def unseen(data: Path) -> bool:
    with patch.object(HostWatch, "_count", side_effect=ValueError("no number")):
        seen = Checkup(session(data))
        seen.begin()
        return seen.look() is None


def test_a_machine_that_cannot_be_looked_at_ends_nothing(data: Path) -> None:
    assert run_ranks(unseen, 1, data) == [True]


# A run says what holds it back: once, after its first hundred updates, and in a file; and is not changed by that

FIRST, LENGTH = 70, 110
"""Updates after which these runs say it, where others take a hundred, and of which they have so many."""
LONG = {"epochs": f"{LENGTH}ba", "log_every": "50ba", "evaluate_every": f"{FIRST}ba", "checkpoint.every": "90ba"}


@contextlib.contextmanager
def advised(gain: float | None, fails: bool) -> Iterator[None]:
    """An advice has some gain, or there is no diagnosis."""
    of = Diagnosis.of

    def diagnosis(facts: Any, updates: tuple[int, int]) -> Diagnosis:
        if fails:
            raise ZeroDivisionError("division by zero")
        advice = () if gain is None else (Advice("batch", "--batch 48", ("--batch", "48"), gain, "It is small."),)
        return Diagnosis(**{**vars(of(facts, updates)), "sentence": "It is small.", "advice": advice})

    with patch.object(Diagnosis, "of", staticmethod(diagnosis)):
        yield


def diagnosed(
    data: Path, out: Path, gain: float | None, settings: dict[str, str], fails: bool = False, full: bool = False
) -> Ended:
    write = loop.write_json

    def write_or_fail(path: Path, document: Any) -> None:
        if full and path.name == "diagnosis.json":
            raise OSError(28, "No space left on device")
        write(path, document)

    with patch.object(loop, "UPDATES", FIRST), patch.object(loop, "write_json", write_or_fail), advised(gain, fails):
        return train_here(data, out, LONG | settings)


def closer(ended: Ended) -> list[str]:
    return [sentence for sentence in ended.said if "looks closer" in sentence]


def test_a_diagnosis_is_said_once_and_changes_nothing(data: Path, tmp_path: Path) -> None:
    out, plain = tmp_path / "run", tmp_path / "plain"
    ended = run_ranks(diagnosed, 2, data, out, WORTH_SAYING + 0.01, {})[0]
    words = f"In updates 6 to {FIRST}: It is small. What would help most: --batch 48: 1.16 × as many samples a second "
    assert closer(ended) == [f"{words}(predicted). convoy doctor {out} looks closer"] * 2  # once among the notes
    failed = run_ranks(diagnosed, 2, data, plain, None, {}, True)[0]
    assert failed.digest == ended.digest and not (plain / "diagnosis.json").exists()
    assert any("is not known (ZeroDivisionError: division by zero)" in sentence for sentence in failed.said)
    other = run_ranks(diagnosed, 2, data, tmp_path / "other", None, {"optimizer.lr": "0.0501"})[0]
    assert other.digest != ended.digest
    found = Diagnosis.from_document(json.loads((out / "diagnosis.json").read_text()))
    assert (found.batch, found.devices, found.model) == (24, 2, "tiny:TinyNet") and found.images_per_s > 0


def test_little_is_not_said_and_neither_a_full_disk_nor_a_short_run_ends_it(data: Path, tmp_path: Path) -> None:
    for name, gain, full in (("little", WORTH_SAYING - 0.01, False), ("full", None, True)):
        assert not closer(diagnosed(data, tmp_path / name, gain, {}, full=full))
        assert (tmp_path / name / "diagnosis.json").exists() is not full
        assert summary(tmp_path / name)["status"] == "finished"
    diagnosed(data, tmp_path / "short", None, {"epochs": "8ba"})
    assert not (tmp_path / "short" / "diagnosis.json").exists()


def test_evaluations_that_come_too_often_are_found(data: Path, tmp_path: Path) -> None:
    """An update takes a tenth of a second, and so does each batch of an evaluation after every second update."""
    with made_time(checkup, evaluate, step) as clock, patch.object(loop, "UPDATES", FIRST):
        update, batch = (clock.before(work, lambda: 0.1) for work in (TrainingStep.__call__, EvaluationTally.add))
        with patch.object(TrainingStep, "__call__", update), patch.object(EvaluationTally, "add", batch):
            ended = train_here(data, tmp_path / "run", LONG | {"evaluate_every": "2ba"})
    found = Diagnosis.from_document(json.loads((tmp_path / "run" / "diagnosis.json").read_text()))
    (advice,) = [one for one in found.advice if one.cause == "evaluation"]
    assert advice.gain > 1.5 and advice.arguments[0] == "--set" and len(set(closer(ended))) == 1


# A minute of a training, without a file that stays


def refuse(*args: Any, **options: Any) -> Any:
    raise PermissionError(13, "Permission denied")


def break_off(*args: Any, **options: Any) -> Any:
    raise ConvoyError("the checkpoint could not be written")


BROKEN: dict[str, Any] = {
    "": nullcontext(),
    "folder": patch.object(tempfile, "TemporaryDirectory", refuse),
    "save": patch.object(Saver, "save", break_off),
}


def examined(
    data: Path, folder: Path, settings: tuple[str, ...], tries: bool, broken: str = "", update_s: float = 0.1
) -> tuple[Facts, list[str], int, float]:
    """An update takes 0.1 s, a batch of an evaluation as long, on rank 1 both twice that, and a checkpoint a second.

    Returns:
        The facts, what was said, the batches of evaluations, and how long it took.
    """
    folder.mkdir(exist_ok=True)
    found, said, batches = session(data, *settings), list[str](), itertools.count()
    limits = Budget(found.ranks, 40.0, began=0.0, say=lambda what, *_: said.append(what.split(",")[0]))
    with made_time(*CLOCKS) as clock, cores_as_before(), BROKEN[broken], ExitStack() as stack:
        each_s = update_s * (1 + found.ranks.rank)
        stack.enter_context(contextlib.chdir(folder))
        hook = register_optimizer_step_pre_hook(lambda *_: clock.sleep(each_s))  # in sessions of trials too
        stack.callback(hook.remove)
        add = clock.before(EvaluationTally.add, lambda: each_s + 0 * next(batches))
        stack.enter_context(patch.object(EvaluationTally, "add", add))
        if not broken:
            stack.enter_context(patch.object(Saver, "save", clock.before(Saver.save, lambda: 1.0)))
        facts = examine(found, limits, trials=tries, folder=folder / "runs" / "x")
        return facts, list(dict.fromkeys(said)), next(batches), clock.now


def test_one_device_is_examined(data: Path, tmp_path: Path) -> None:
    ((facts, said, batches, _),) = run_ranks(examined, 1, data, tmp_path, EACH, False)
    assert facts.pictures is not None and facts.pictures.in_memory
    assert facts.update_s == pytest.approx(0.1) == facts.compute_s
    assert batches > 0 and facts.evaluation_s == pytest.approx(0.1 * batches / 2 + 0.5 * 1.0)  # half save the best
    assert facts.checkpoint_s == pytest.approx(1.0) and facts.checkpoint_every == 1
    assert said[:3] == ["timing updates", "timing pictures", "timing an evaluation"]
    assert next(advice.cause for advice in Diagnosis.of(facts).advice if advice.cause != "busy") == "checkpoint"
    seldom = ("checkpoint.every=1000000000ba", "evaluate_every=100000ba")
    ((facts, said, *_),) = run_ranks(examined, 1, data, tmp_path, seldom, False)
    assert facts.checkpoint_s is None and "timing checkpoints" not in said
    ((facts, _, _, taken),) = run_ranks(examined, 1, data, tmp_path, EACH, False, "", 8.0)
    assert facts.update_s == pytest.approx(8.0) and taken <= 40 and "--seconds 80 leaves more." in facts.notes[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "settings",
    [
        ("parallel.plan=sample=2",),
        *(
            pytest.param(each, marks=slow)
            for each in (
                ("parallel.plan=stage=2",),
                ("parallel.shares=auto", "batch=32"),
                ("reproducible=true", "ema.decay=0.9"),
                ("parallel.plan=auto",),
            )
        ),
    ],
)
def test_two_devices_know_the_same(data: Path, tmp_path: Path, settings: tuple[str, ...]) -> None:
    (facts, *_), (other, *_) = run_ranks(examined, 2, data, tmp_path, (*settings, *EACH), True)
    assert facts == other and facts.devices == len(facts.ranks) == 2
    assert facts.link_bits_per_s is not None and facts.link_bits_per_s > 1e6 and len(facts.hosts) == 1
    assert facts.trials and facts.compute_s and facts.evaluation_s and facts.pictures and facts.checkpoint_s
    found = Diagnosis.of(facts)
    assert found.text().count("\n") >= 1 and Diagnosis.from_document(found.to_document()) == found
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("broken", "world"), [("folder", 2), ("save", 2), pytest.param("save", 1, marks=slow)])
def test_without_a_place_for_checkpoints_they_are_left_out(data: Path, tmp_path: Path, world: int, broken: str) -> None:
    for facts, *_ in run_ranks(examined, world, data, tmp_path, EACH, False, broken):
        assert facts.checkpoint_s is None and facts.evaluation_s is not None
    assert not list(tmp_path.iterdir())


def test_small_batches_of_pictures_are_timed(photos: Path, tmp_path: Path) -> None:
    settings = ("batch=2", "microbatch=1", "data.image_size=28", "data.workers=0")
    facts, *_ = run_ranks(examined, 2, photos, tmp_path, settings, False)[0]
    assert facts.pictures is not None and facts.pictures.cpu_s > 0 and facts.pictures.read_s >= 0


PACES: dict[str, tuple[Callable[[int], float], Callable[[int], float], int, float, float]] = {
    # seconds to make a batch, to compute an update, when workers grow, and what an update takes and waits in the end
    "a first update of seconds": (lambda _: 0.01, lambda n: 0.02 if n else 5.0, -1, 0.02, 0.0),
    "first updates of seconds": (lambda _: 0.05, lambda n: 0.02 if n > 7 else 0.5, -1, 0.05, 0.03),
    "other workers that start": (lambda n: 0.1 if n < 20 else 0.01, lambda _: 0.02, 6, 0.02, 0.0),
    "one update after the other": (lambda n: 0.2 - 0.008 * min(n, 20), lambda _: 0.02, -1, 0.04, 0.02),
}


def at_its_pace(data: Path, case: str) -> tuple[Facts, float]:
    """Updates as they are timed, and how long that takes; workers make six batches ahead of who asks, by the clock."""
    made_s, computed_s, grows, *_ = PACES[case]
    found, number = session(data, "data.workers=2", "batch=96", "microbatch=96"), itertools.count()

    def batches(first: int, updates: int, told: Callable[[int], None]) -> Iterator[Batch]:
        ready, taken = clock.now, list[float]()
        for place in range(updates):
            ready = max(ready, taken[place - 6] if place >= 6 else 0.0) + made_s(place)
            clock.sleep(max(0.0, ready - clock.now))
            taken.append(clock.now)
            if place == grows:
                told(4)
            yield batch

    with made_time(*CLOCKS) as clock, patch.object(found, "batches", batches):
        batch = random_batch(found.step(), found.image_shape, found.device)
        found.state.optimizer.register_step_pre_hook(lambda *_: clock.sleep(computed_s(next(number))))
        return examination._measure_updates(found, Budget(found.ranks, 30.0)), clock.now


@pytest.mark.parametrize("case", PACES)
def test_a_training_is_timed_at_its_pace(data: Path, case: str) -> None:
    ((facts, taken),) = run_ranks(at_its_pace, 1, data, case)
    *_, update_s, wait_s = PACES[case]
    assert facts.update_s == pytest.approx(update_s, rel=0.05) and facts.wait_s == pytest.approx(wait_s, abs=0.002)
    assert taken < 0.4 * 30 + 2 and not facts.notes


# Changes that are tried

LAYOUT, BATCHES = {"--channels-last"}, {"--batch 32", "--batch 64"}
OFFERED: dict[tuple[tuple[str, ...], int, bool], set[str]] = {
    # settings, cores, whether there is bf16
    ((), 1, False): LAYOUT | BATCHES,
    ((), 2, True): {"--set threads=2", "--precision bf16"} | LAYOUT | BATCHES,
    (("threads=3",), 2, False): {"--set threads=2"},
    (("precision=bf16",), 1, True): {"--precision fp32"} | LAYOUT | BATCHES,
    (("channels_last=true",), 1, False): {"--channels-first"} | BATCHES,
    (("reproducible=true",), 2, True): {"--set threads=2"} | BATCHES,
    (("batch=96",), 1, False): LAYOUT,
    (("batch=4", "microbatch=4"), 1, False): LAYOUT | {"--batch 8", "--batch 16", "--batch 64"},
    (("batch=48", "microbatches=3"), 1, False): LAYOUT | {"--batch 96 --microbatches 6"},
}


def offered(data: Path, cases: list[tuple[tuple[str, ...], int, bool]], taken: float = 0.0) -> list[set[str]]:
    """Arguments of what would be tried on a machine with some cores."""
    found = []
    for settings, cores, bf16 in cases:
        machine = {"own_cores": lambda n=cores: list(range(n)), "cores_allowed": lambda n=cores: float(n)}
        with (
            patch.multiple(trials.cores, **machine),
            patch.object(trials, "has_bf16", lambda device, has=bf16: has),
            cores_as_before(),
        ):
            each = list(changes(session(data, *settings), taken))
        found.append({" ".join(one.arguments) for one in each if one.cause != "microbatch"})
    return found


def test_what_is_tried_and_that_threads_leave_others_their_cores(data: Path) -> None:
    assert run_ranks(offered, 1, data, list(OFFERED)) == [list(OFFERED.values())]
    assert run_ranks(offered, 1, data, [(("threads=2",), 2, False)], 0.9) == [[{"--set threads=1"}]]
    bits = ("reproducible=true",)
    first, other = run_ranks(offered, 2, data, [((), 1, False), (bits, 1, False)])
    assert first == other and {"--devices 1", "--plan auto"} <= first[0]
    assert "--devices 1" in first[1] and "--plan auto" not in first[1]


LAST = Change("memory_format", ("--channels-last",), {"channels_last": True})
ALONE = Change("devices", ("--devices", "1"), {"parallel": {"devices": 1, "plan": None}}, alone=True)


@dataclass
class Left:
    """What there is after trials, on a rank."""

    trials: tuple[Trial, ...]
    as_it_is: float
    before: list[Any] = field(default_factory=list)
    after: list[Any] = field(default_factory=list)


def switches() -> list[Any]:
    numbers = [torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()]
    return [*numbers, own_cores(), os.environ.get("CONVOY_CORES")]


def some(data: Path, folder: Path, failing: str, how: str) -> Left:
    """Some trials, of which one fails: on rank 1 alone, on rank 0 alone, or on both, by a mistake or otherwise."""
    found = session(data)
    threads, batch = Change("threads", ("--set", "threads=2"), {"threads": 2}), Change("batch", (), {"batch": 32}, 2)

    def set_up_or_fail(recipe: Any, device: Any, say: Any, ranks: Any, data: Any) -> Session:
        """Each update of what is tried takes 2 s, of what is there a second."""
        changed = {
            "memory_format": recipe.channels_last != found.recipe.channels_last,
            "devices": ranks.num < found.ranks.num or recipe.parallel.devices == 1 != found.recipe.parallel.devices,
            "batch": recipe.batch == 32,
        }.get(failing, False)
        if changed and how == "mistake":
            raise ConvoyError("it does not go with this network")
        if changed and how == f"rank {found.ranks.rank}":
            raise RuntimeError("the network cannot do this")
        other = set_up(recipe, device, say, ranks, data)
        other.state.optimizer.register_step_pre_hook(lambda *_: clock.sleep(2.0))
        return other

    with (
        made_time(budget, trials, step, profiling) as clock,
        patch.object(trials, "changes", lambda *_: iter([LAST, ALONE, batch, threads])),
        cores_as_before(),
        contextlib.chdir(folder),
    ):
        found.state.optimizer.register_step_pre_hook(lambda *_: clock.sleep(1.0))
        cores = own_cores()
        pin([cores[found.ranks.rank % len(cores)]])  # as ranks of a run are
        before = switches()
        as_it_is, done = try_changes(found, set_up_or_fail, Budget(found.ranks, 1000.0))
        return Left(done, as_it_is, before, switches())


@pytest.mark.parametrize(
    ("failing", "how"),
    [
        ("", ""),
        ("devices", "rank 0"),
        pytest.param("memory_format", "rank 1", marks=slow),
        pytest.param("batch", "mistake", marks=slow),
    ],
)
def test_a_change_that_fails_is_left_out_and_nothing_is_left_of_any(
    data: Path, tmp_path: Path, failing: str, how: str
) -> None:
    found = run_ranks(some, 2, data, tmp_path, failing, how)
    wanted = [cause for cause in ("memory_format", "devices", "batch", "threads") if cause != failing]
    for left in found:
        assert [trial.cause for trial in left.trials] == wanted and left.before == left.after
        assert left.trials == found[0].trials and left.as_it_is == found[0].as_it_is == 1.0  # all ranks know the same
        assert all((trial.seconds, trial.before_s) == (2.0, 1.0) for trial in left.trials)
        assert {trial.cause: trial.samples for trial in left.trials}.get("batch", 2) == 2
    assert not list(tmp_path.iterdir())


def random_numbers(data: Path) -> list[bool]:
    """Whether they go on as if nobody had tried anything, after each kind of trial."""
    found, same = session(data), []
    for change, work in ((LAST, trials._by_all), (ALONE, trials._by_one)):
        before = torch.get_rng_state()
        with cores_as_before():
            found.ranks.trying(
                "trying", lambda ranks, work=work, change=change: work(found, set_up, change, Budget(ranks), ranks)
            )
        same.append(torch.equal(before, torch.get_rng_state()))
    return same


def test_random_numbers_go_on(data: Path) -> None:
    assert run_ranks(random_numbers, 2, data) == [[True, True]] * 2
