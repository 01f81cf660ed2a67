"""Changes that are tried: which, that each is what its option makes of the recipe, and that nothing is left of them."""

import itertools
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from convoy.doctor.facts import Trial
from convoy.engine import profiling
from convoy.errors import ConvoyError
from convoy.launch.cores import own_cores, pin
from convoy.training import Session, budget, step, trials
from convoy.training.budget import Budget
from convoy.training.set_up import set_up
from convoy.training.trials import Change, changes, try_changes
from made_time import made_time
from ranks import run_ranks
from tiny import write_mnist
from training.examined import cores_as_before, session


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("trials") / "data")


def offered(
    data: Path, settings: tuple[str, ...], cores: int, bf16: bool, taken: float = 0.0
) -> dict[str, tuple[str, bool]]:
    """Arguments of what would be tried on a machine with some cores, and whether it is another training."""
    found = session(data, *settings)
    machine = {"own_cores": lambda: list(range(cores)), "cores_allowed": lambda: float(cores)}
    with (
        patch.multiple(trials.cores, **machine),
        patch.object(trials, "has_bf16", lambda device: bf16),
        cores_as_before(),
    ):
        each = list(changes(found, taken))
        for change in each:
            by_options(found, change)
    return {f"{one.cause} {one.samples}": (" ".join(one.arguments), one.another_training) for one in each}


def by_options(found: Session, change: Change) -> None:
    """The change makes of the recipe what its arguments would."""
    keys = {
        "batch": "batch",
        "microbatches": "microbatches",
        "precision": "precision",
        "devices": "parallel.devices",
        "plan": "parallel.plan",
    }
    words, settings = list(change.arguments), []
    while words:
        name = words.pop(0).removeprefix("--")
        if name in ("channels-last", "channels-first"):
            settings.append(f"channels_last={str(name == 'channels-last').lower()}")
        elif name == "set":
            settings.append(words.pop(0))
        else:
            settings.append(f"{keys[name]}={words.pop(0)}")
    recipe, changed = found.recipe, change.of(found.recipe)
    for setting in settings:
        key, _, value = setting.partition("=")
        own: Any = changed
        for part in key.split("."):
            own = getattr(own, part)
        assert str(own).lower() == value, key
        path = key.split(".")[0]
        recipe = recipe.model_copy(update={path: getattr(changed, path)})
    allowed = {"microbatches"} if change.cause == "microbatch" else set()
    differ = {name for name, value in changed if value != getattr(recipe, name)}
    assert differ <= allowed
    section = {name for name, value in changed.parallel if value != getattr(found.recipe.parallel, name)}
    assert section <= {"devices", "plan", "shares", "schedule"}


BATCHES = {"batch 2": ("--batch 32", True), "batch 4": ("--batch 64", True)}
LAYOUT = {"memory_format 1": ("--channels-last", False)}


@pytest.mark.parametrize(
    ("settings", "cores", "bf16", "wanted"),
    [
        ((), 1, False, LAYOUT | BATCHES),
        ((), 2, False, {"threads 1": ("--set threads=2", False)} | LAYOUT | BATCHES),
        (("threads=3",), 2, False, {"threads 1": ("--set threads=2", False)}),
        ((), 1, True, {"precision 1": ("--precision bf16", True)} | LAYOUT | BATCHES),
        (("precision=bf16",), 1, True, {"precision 1": ("--precision fp32", True)} | LAYOUT | BATCHES),
        (("channels_last=true",), 1, False, {"memory_format 1": ("--channels-first", False)} | BATCHES),
        (("reproducible=true",), 2, True, {"threads 1": ("--set threads=2", True)} | BATCHES),
        (("batch=32",), 1, False, LAYOUT | {"batch 2": ("--batch 64", True)}),
        (("batch=96",), 1, False, LAYOUT),
        (
            ("batch=4", "microbatch=4"),
            1,
            False,
            LAYOUT
            | {"batch 2": ("--batch 8", True), "batch 4": ("--batch 16", True), "batch 16": ("--batch 64", True)},
        ),
        (
            ("batch=5", "microbatch=5"),
            1,
            False,
            LAYOUT | {"batch 2": ("--batch 10", True), "batch 4": ("--batch 20", True)},
        ),
        (
            ("batch=48", "microbatches=3"),
            1,
            False,
            LAYOUT | {"batch 2": ("--batch 96 --microbatches 6", True)},
        ),
    ],
)
def test_what_is_tried_on_one_device(
    data: Path, settings: tuple[str, ...], cores: int, bf16: bool, wanted: dict[str, tuple[str, bool]]
) -> None:
    (found,) = run_ranks(offered, 1, data, settings, cores, bf16)
    assert {name: what for name, what in found.items() if not name.startswith("microbatch")} == wanted


@pytest.mark.parametrize(
    ("taken", "wanted"),
    [(0.2, LAYOUT | BATCHES), (0.9, {"threads 1": ("--set threads=1", False)})],
)
def test_threads_leave_others_their_cores(data: Path, taken: float, wanted: dict[str, tuple[str, bool]]) -> None:
    (found,) = run_ranks(offered, 1, data, ("threads=2",), 2, False, taken)
    assert {name: what for name, what in found.items() if not name.startswith("microbatch")} == wanted


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ((), {"devices 1": ("--devices 1", False), "plan 1": ("--plan auto", False)}),
        (("reproducible=true",), {"devices 1": ("--devices 1", False)}),
    ],
)
def test_what_is_tried_on_two(data: Path, settings: tuple[str, ...], wanted: dict[str, tuple[str, bool]]) -> None:
    found, other = run_ranks(offered, 2, data, settings, 1, False)
    assert found == other
    assert {name: what for name, what in found.items() if name in ("devices 1", "plan 1")} == wanted


def test_a_larger_microbatch_is_no_more_than_a_ranks_share(data: Path) -> None:
    found, _ = run_ranks(offered, 2, data, ("batch=32", "microbatch=2"), 1, False)
    assert found.get("microbatch 1", ("--set microbatch=16", True)) == ("--set microbatch=16", True)


LAST = Change("memory_format", ("--channels-last",), {"channels_last": True})


@dataclass
class Left:
    """What there is after trials, on a rank."""

    trials: tuple[Trial, ...]
    as_it_is: float
    before: list[Any] = field(default_factory=list)
    after: list[Any] = field(default_factory=list)


def state() -> list[Any]:
    return [
        torch.get_num_threads(),
        own_cores(),
        os.environ.get("CONVOY_CORES"),
        torch.are_deterministic_algorithms_enabled(),
    ]


def some(data: Path, folder: Path, failing: str, how: str) -> Left:
    """Some trials, of which one fails: on rank 1 alone, on rank 0 alone, or on both, by a mistake or otherwise."""
    found = session(data)
    each = [
        LAST,
        Change("devices", ("--devices", "1"), {"parallel": {"devices": 1, "plan": None}}, alone=True),
        Change("batch", ("--batch", "32"), {"batch": 32}, 2),
        Change("threads", ("--set", "threads=2"), {"threads": 2}),
    ]

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

    os.chdir(folder)
    with (
        made_time(budget, trials, step, profiling) as clock,
        patch.object(trials, "changes", lambda *_: iter(each)),
        cores_as_before(),
    ):
        found.state.optimizer.register_step_pre_hook(lambda *_: clock.sleep(1.0))
        cores = own_cores()
        pin([cores[found.ranks.rank % len(cores)]])  # as ranks of a run are
        before = state()
        as_it_is, done = try_changes(found, set_up_or_fail, Budget(found.ranks, 1000.0))
        return Left(done, as_it_is, before, state())


@pytest.mark.parametrize(
    ("failing", "how", "world"),
    [
        pytest.param("", "", 1, marks=pytest.mark.slow),
        ("", "", 2),
        pytest.param("memory_format", "rank 1", 2, marks=pytest.mark.slow),
        ("devices", "rank 0", 2),
        pytest.param("batch", "mistake", 2, marks=pytest.mark.slow),
        ("batch", "rank 0", 1),
    ],
)
def test_a_change_that_fails_is_left_out_and_nothing_is_left_of_any(
    data: Path, tmp_path: Path, failing: str, how: str, world: int
) -> None:
    found = run_ranks(some, world, data, tmp_path, failing, how)
    wanted = [cause for cause in ("memory_format", "devices", "batch", "threads") if cause != failing]
    for left in found:
        assert [trial.cause for trial in left.trials] == wanted
        assert left.trials == found[0].trials and left.as_it_is == found[0].as_it_is  # all ranks know the same
        assert left.before == left.after
        assert all((trial.seconds, trial.before_s) == (2.0, 1.0) for trial in left.trials) and left.as_it_is == 1.0
        assert {trial.cause: trial.samples for trial in left.trials}.get("batch", 2) == 2
        assert all((trial.threads is not None) == (trial.cause == "threads") for trial in left.trials)
    assert not list(tmp_path.iterdir())


def random_numbers(data: Path) -> list[bool]:
    """Whether they go on as if nobody had tried anything, after each kind of trial."""
    found = session(data)
    alone = Change("devices", ("--devices", "1"), {"parallel": {"devices": 1, "plan": None}}, alone=True)
    same = []
    for change, work in ((LAST, trials._by_all), (alone, trials._by_one)):
        before = torch.get_rng_state()
        with cores_as_before():
            found.ranks.trying(
                "trying", lambda ranks, work=work, change=change: work(found, set_up, change, Budget(ranks), ranks)
            )
        same.append(torch.equal(before, torch.get_rng_state()))
    return same


def test_random_numbers_go_on(data: Path) -> None:
    assert run_ranks(random_numbers, 2, data) == [[True, True]] * 2


def tried_in(data: Path, seconds: float) -> tuple[float | None, int, list[str], bool]:
    """Seconds of an update, which takes one, how many changes are tried in some, which are not, and whether in time."""
    found = session(data)
    with (
        made_time(budget, trials, step, profiling) as clock,
        patch.object(trials, "changes", lambda *_: iter([LAST, replace(LAST, arguments=("--set", "other"))])),
    ):
        found.state.optimizer.register_step_pre_hook(lambda *_: clock.sleep(1.0))
        limits = Budget(found.ranks, seconds)
        as_it_is, done = try_changes(found, set_up, limits, update_s=1.0)
        return as_it_is, len(done), limits.missed, clock.now <= seconds


@pytest.mark.parametrize(
    ("seconds", "as_it_is", "number", "missed"),
    [(1.0, None, 0, 2), (5.0, 1.0, 0, 2), (8.0, 1.0, 1, 1), (20.0, 1.0, 2, 0)],
)
def test_what_there_is_time_for_is_tried(
    data: Path, seconds: float, as_it_is: float | None, number: int, missed: int
) -> None:
    """Two updates tell what one takes, and those of a change take turns with those without it."""
    names = ["--channels-last", "--set other"][2 - missed :]
    assert run_ranks(tried_in, 2, data, seconds) == [(as_it_is, number, names, True)] * 2


def seconds_of(data: Path, each: tuple[float, ...], least_s: float) -> tuple[float, int]:
    """Seconds of an update where they take as long as `each` says, the last of them ever after; and how many ran."""
    found, number = session(data), itertools.count()
    with made_time(step) as clock:
        hook = lambda *_: clock.sleep(each[min(next(number), len(each) - 1)])  # noqa: E731
        found.state.optimizer.register_step_pre_hook(hook)
        ways = {"enough": 3, "most": 6, "least_s": least_s}
        taken = step.update_seconds(found.step(), found.image_shape, found.device, found.ranks, **ways)
    return taken, next(number)


@pytest.mark.parametrize(
    ("each", "least_s", "taken", "number"),
    [
        ((9.0, 5.0), 0.0, 5.0, 4),
        ((1.73, 1.43, 1.48, 1.42, 1.30, 1.21), 0.0, 1.30, 6),  # they vary, and the fastest alone does not count
        ((0.03,), 0.1, 0.03, 1 + 4 + 4),  # several in a row, as a system hands out cores for some hundredths
    ],
)
def test_what_an_update_takes(data: Path, each: tuple[float, ...], least_s: float, taken: float, number: int) -> None:
    ((found, done),) = run_ranks(seconds_of, 1, data, each, least_s)
    assert found == pytest.approx(taken) and done == number


def beside(data: Path, before: float, changed: float, after: float) -> float:
    """Seconds of an update as it is that a trial is compared with."""
    found, each = session(data), iter((before, after))
    with (
        patch.object(trials, "changes", lambda *_: iter([LAST])),
        patch.object(trials, "_seconds", lambda *_: next(each)),
        patch.object(trials, "_by_all", lambda *_: changed),
    ):
        _, (trial,) = try_changes(found, set_up, Budget(found.ranks))
    return trial.before_s


@pytest.mark.parametrize(
    ("before", "changed", "after", "counts"),
    [
        (1.0, 0.5, 1.2, 1.1),  # the machine's speed drifts
        (1.4, 0.5, 1.0, 1.0),  # it was another machine
        (1.0, 1.1, 1.2, 1.0),  # no gain beside one of them
    ],
)
def test_beside_which_time_a_change_counts(
    data: Path, before: float, changed: float, after: float, counts: float
) -> None:
    assert run_ranks(beside, 1, data, before, changed, after) == [pytest.approx(counts)]


def unlike(data: Path) -> list[tuple[str, float]]:
    """What is tried where each rank has other cores."""
    found = session(data)

    def offers(of: Session, taken: float) -> list[Change]:
        return [Change("batch", (f"--batch {of.ranks.rank}",)), *[Change("plan", ())] * of.ranks.rank]

    with patch.object(trials, "changes", offers), patch.object(trials, "_by_all", lambda *rest: 1.0):
        _, done = try_changes(found, set_up, Budget(found.ranks))
    return [(trial.arguments[0], trial.seconds) for trial in done]


def test_ranks_with_other_cores_try_the_same(data: Path) -> None:
    assert run_ranks(unlike, 2, data) == [[("--batch 0", 1.0)]] * 2
