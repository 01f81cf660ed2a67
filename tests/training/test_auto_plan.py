"""`--plan auto` in a run: what the planner says runs, after a race where that is close, and changes no number."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from convoy.comm.memory import NEEDS_LESS
from convoy.comm.ranks import Ranks
from convoy.data import Batch
from convoy.errors import ConvoyError, TooLargeError
from convoy.planner import Planned, make_plan, measured
from convoy.planner.cost.costs import HostCost
from convoy.planner.measured import Measurements
from convoy.planner.planner import Race, score
from convoy.planner.planner import _raced as raced_by
from convoy.planner.workload import Workload
from convoy.plans.place import Placement
from convoy.plans.plan import Plan
from convoy.training import Session, auto_plan, load_recipe
from convoy.training import step as training_step
from convoy.training.environment import join_ranks
from convoy.training.parallel import StagedTraining
from convoy.training.set_up import set_up
from convoy.training.step import TrainingStep
from ranks import run_ranks
from tiny import write_mnist

PASS = 8
FILTERS, SAMPLES, STAGES = (Plan.parse(text) for text in ("filter=2", "sample=2", "stage=2"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("auto") / "data")


def session(
    data: Path,
    cache: Path,
    plan: str,
    *settings: str,
    model: str = "tiny:TinyNet",
    batch: int = 16,
    microbatch: int = PASS,
    keep: bool = True,
) -> Session:
    """The session of a run on the ranks that are there."""
    ranks, device = join_ranks()
    common = [
        f"data.path={data}",
        f"model.name={model}",
        f"batch={batch}",
        f"microbatch={microbatch}",
        "optimizer.lr=0.1",
    ]
    recipe = load_recipe("default", [*common, f"parallel.plan={plan}", "parallel.devices=2", *settings], [])
    with patch.dict("os.environ", {"CONVOY_CACHE": str(cache)}):
        return set_up(recipe, device, ranks=ranks, keep=keep)


def weights(found: Session, updates: int = 3) -> dict[str, torch.Tensor]:
    """Whole weights after some updates."""
    step = found.step()
    for update, batch in enumerate(found.batches(0, updates)):
        step(batch, update)
    return {name: found.network.whole(name, tensor).clone() for name, tensor in found.model.state_dict().items()}


def predicting(*plans: Plan) -> Callable[..., Planned]:
    """A planner that predicts the first of these plans to be fastest, then the next, and knows no others."""

    def planner(*args: Any, race: Race, **options: Any) -> Planned:
        planned = make_plan(*args, plans=plans, **options)
        by_plan = {scored.plan: scored for scored in planned.candidates}
        planned = replace(planned, candidates=tuple(by_plan[plan] for plan in plans))
        return raced_by(
            planned, (), args[2], race, Measurements(args[0], args[2]), lambda what: None, lambda seconds: True
        )

    return planner


def raced(data: Path, cache: Path, times: tuple[float, ...]) -> tuple[str, list[str], float]:
    """The plan, the notes, and how far the weights are from those under plain `sample`."""

    def timed(step: TrainingStep, image_shape: tuple[int, int, int], *rest: object, **options: object) -> float:
        step(training_step.random_batch(step, image_shape, torch.device("cpu")), 0)
        return remaining.pop(0)

    remaining = list(times)
    with (
        patch.object(auto_plan, "make_plan", predicting(FILTERS, SAMPLES)),
        patch.object(auto_plan, "measure_input", lambda *args: None),
        patch.object(auto_plan, "update_seconds", timed),
    ):
        found = session(data, cache, "auto")
    plan, notes = str(found.plan), found.notes
    assert found.one_device_s is not None and found.one_device_s > 0
    own, plain = weights(found), weights(session(data, cache, "sample=2"))
    distance = max(float((own[name] - plain[name]).abs().max()) for name in plain if plain[name].is_floating_point())
    return plan, notes, distance


def in_stages(data: Path, cache: Path, passes: int, schedule: str) -> tuple[int, str, float]:
    """Passes and schedule of a run for which the planner says stages, and how far it is from plain `sample`."""

    def planner(*args: object, **options: object) -> Planned:
        planned = make_plan(*args, plans=[SAMPLES], **options)  # type: ignore[arg-type]
        assert 4 in planned.workload.counts
        workload = planned.workload.through(2, passes)
        asked = replace(planned.workload, in_passes=lambda number: workload, schedules=(schedule,))
        best = score(asked, STAGES, planned.costs, passes)
        return replace(planned, candidates=(best,))

    with patch.object(auto_plan, "make_plan", planner), patch.object(auto_plan, "measure_input", lambda *args: None):
        found = session(data, cache, "auto", microbatch=4)
    network = found.network
    assert isinstance(network, StagedTraining)
    num = len(found.division.passes(found.merge))
    own, plain = weights(found), weights(session(data, cache, "sample=2", microbatch=4))
    distance = max(float((own[name] - plain[name]).abs().max()) for name in plain if plain[name].is_floating_point())
    return num, network.schedule, distance


@pytest.mark.parametrize(("passes", "schedule"), [(4, "gpipe"), pytest.param(2, "zero-bubble", marks=pytest.mark.slow)])
def test_stages_run_in_the_passes_and_the_order_that_were_predicted(
    data: Path, tmp_path: Path, passes: int, schedule: str
) -> None:
    for num, order, distance in run_ranks(in_stages, 2, data, tmp_path, passes, schedule):
        assert (num, order) == (passes, schedule)
        assert distance < 1e-5


@pytest.mark.parametrize(("times", "winner"), [((1.0, 2.0), "filter=2"), ((2.0, 1.0), "sample=2")])
def test_the_winner_of_the_race_runs(data: Path, tmp_path: Path, times: tuple[float, ...], winner: str) -> None:
    for plan, notes, distance in run_ranks(raced, 2, data, tmp_path, times):
        assert plan == winner, notes
        assert any(
            "in a race over" in note and "filter=2 1,000.0 ms" in note.replace("2,000", "1,000") for note in notes
        )
        assert distance < 1e-5


def last_of_four(data: Path, cache: Path) -> list[str]:
    """The notes of a race in which plain `sample` is predicted to be slowest of four."""
    plans = (FILTERS, Plan.parse("height=2"), Plan.parse("width=2"), SAMPLES)
    with (
        patch.object(auto_plan, "make_plan", predicting(*plans)),
        patch.object(auto_plan, "update_seconds", lambda *args, **options: 1.0),
    ):
        return session(data, cache, "auto").notes


@pytest.mark.slow
def test_plain_sample_always_races(data: Path, tmp_path: Path) -> None:
    for notes in run_ranks(last_of_four, 2, data, tmp_path):
        (race,) = [note for note in notes if "in a race over" in note]
        assert "filter=2" in race and "height=2" in race and "sample=2" in race


def reproducible(data: Path, cache: Path) -> tuple[str, list[str]]:
    found = session(data, cache, "auto", "reproducible=true")
    assert found.one_device_s is None  # nothing was measured
    return str(found.plan), found.notes


def test_a_reproducible_run_divides_samples(data: Path, tmp_path: Path) -> None:
    for plan, notes in run_ranks(reproducible, 2, data, tmp_path):
        assert plan == "sample=2"
        assert any("reproducible runs divide samples alone" in note for note in notes)


def whole_way(data: Path, cache: Path, keep: bool) -> tuple[str, list[str], bool]:
    found = session(data, cache, "auto", keep=keep)
    return str(found.plan), found.notes, any(cache.rglob("*.sqlite"))


@pytest.mark.slow
@pytest.mark.parametrize("keep", [True, False])
def test_all_ranks_agree_and_what_was_measured_is_kept(data: Path, tmp_path: Path, keep: bool) -> None:
    (first, notes, kept), (second, _, _) = run_ranks(whole_way, 2, data, tmp_path, keep)
    assert first == second
    assert any(note.startswith("plan auto: ") for note in notes)
    assert kept == keep


def too_small(data: Path, cache: Path) -> str:
    with patch.object(auto_plan, "device_memory", lambda device, on_host: (1e4, "as said")):
        try:
            session(data, cache, "auto")
        except TooLargeError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_where_no_plan_fits_the_run_is_refused_with_the_layer_and_by_how_much(data: Path, tmp_path: Path) -> None:
    for said in run_ranks(too_small, 2, data, tmp_path):
        assert said.startswith("no plan fits")
        assert "more than the 10 kB there are" in said
        assert "what the network itself computes takes most" in said


def limited(data: Path, cache: Path, plan: str, limit: str, model: str, *others: str) -> str:
    """What a run with a memory limit says of it; with stages, whether it gives freed memory back."""
    try:
        found = session(data, cache, plan, f"parallel.memory_limit={limit}", *others, model=model)
    except TooLargeError as error:
        return str(error)
    returns = isinstance(found.network, StagedTraining) and found.network.engine.returns_memory
    return " ".join([*found.notes, *(["freed memory is given back"] if returns else [])])


def test_plans_keep_to_the_memory_limit(data: Path, tmp_path: Path) -> None:
    def said(plan: str, limit: str, model: str = "tiny:TinyNet") -> str:
        first, second = run_ranks(limited, 2, data, tmp_path, plan, limit, model)
        assert first == second
        return first

    assert "more than the 10 kB there are" in said("auto", "10kB")
    assert "within 90 MB of memory a device, as --memory-limit says" in said("auto", "90MB")
    for plan in ("sample=2", "stage=2"):
        refused = said(plan, "10kB")
        assert f"the plan {plan} needs " in refused and "--memory-limit is 10kB" in refused
    assert "memory" not in said("sample=2", "90MB")
    assert said("stage=2", "90MB").endswith("freed memory is given back")
    assert "no effect: the memory of a network that cannot be captured" in said("sample=2", "90MB", "tiny:TinyUnseen")


@pytest.mark.parametrize("plan", ["sample=2", "stage=2"])
def test_a_given_plan_needs_memory_for_the_state_of_its_optimizer(data: Path, tmp_path: Path, plan: str) -> None:
    def needed(*others: str) -> float:
        said = run_ranks(limited, 2, data, tmp_path, plan, "1kB", "tiny:TinyNet", *others)[0]
        found = re.search(r"needs ([\d.]+) kB on a device", said)
        assert found is not None, said
        return float(found[1])

    plain, momentum = needed("optimizer.momentum=0", "optimizer.nesterov=false"), needed()
    weights, averages = momentum - plain, needed("optimizer.name=adamw") - plain
    assert weights > 0
    assert averages == pytest.approx(2 * weights, abs=2.0)  # all are rounded to kB


def without_memory(data: Path, cache: Path, losers: tuple[str, ...]) -> tuple[str, list[str], float, str]:
    """A race in which some plans run out of memory on rank 1, in their second update."""
    step = TrainingStep.__call__

    def failing(self: TrainingStep, batch: Batch, update: int) -> object:
        if self.network.engine.groups.rank == 1 and str(self.network.engine.plan) in losers and update == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self, batch, update)

    with (
        patch.object(auto_plan, "make_plan", predicting(FILTERS, SAMPLES)),
        patch.object(TrainingStep, "__call__", failing),
    ):
        try:
            found = session(data, cache, "auto")
        except ConvoyError as error:
            return "", [], 0.0, str(error)
    return str(found.plan), found.notes, sum(float(each.sum()) for each in weights(found).values()), ""


@pytest.mark.slow
def test_a_racer_without_memory_on_one_rank_leaves_the_race(data: Path, tmp_path: Path) -> None:
    found = run_ranks(without_memory, 2, data, tmp_path, ("filter=2",))
    assert len({(plan, total) for plan, _, total, _ in found}) == 1
    for plan, notes, total, _ in found:
        assert plan == "sample=2" and total == total
        assert f"filter=2 left the race: rank 1 ran out of memory while racing filter=2; {NEEDS_LESS}" in notes
        assert any("in a race" in note and "filter=2" not in note for note in notes)


def without_memory_alone(data: Path, cache: Path, lacks: bool) -> tuple[str, list[str], int]:
    """A race in which rank 1 lacks memory for its own part of `filter=2`; the winner, the notes, and updates raced."""
    updates: list[str] = []
    step = TrainingStep.__call__

    def counted(self: TrainingStep, batch: Batch, update: int) -> object:
        updates.append(str(self.network.engine.plan))
        return step(self, batch, update)

    def trying_out(workload: Workload, placement: Placement, rank: int) -> None:
        if lacks and rank == 1 and placement.mesh == FILTERS.mesh:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with (
        patch.object(auto_plan, "make_plan", predicting(FILTERS, SAMPLES)),
        patch.object(TrainingStep, "__call__", counted),
        patch.object(auto_plan, "try_out", trying_out),
    ):
        found = session(data, cache, "auto")
    return str(found.plan), found.notes, updates.count("filter=2")


@pytest.mark.slow
def test_a_racer_is_tried_out_alone_before_others_wait_for_it(data: Path, tmp_path: Path) -> None:
    for plan, notes, updates in run_ranks(without_memory_alone, 2, data, tmp_path, True):
        assert (plan, updates) == ("sample=2", 0)
        assert f"filter=2 left the race: rank 1 ran out of memory while racing filter=2; {NEEDS_LESS}" in notes
    assert all(updates for *_, updates in run_ranks(without_memory_alone, 2, data, tmp_path, False))


@pytest.mark.slow
def test_where_nobody_ends_the_race_all_ranks_say_so(data: Path, tmp_path: Path) -> None:
    for *_, failure in run_ranks(without_memory, 2, data, tmp_path, ("filter=2", "sample=2")):
        assert failure == f"rank 1 ran out of memory while racing sample=2; {NEEDS_LESS}"


def by_speed(data: Path, cache: Path) -> tuple[str, tuple[int, ...], float]:
    """A run on devices of which the second is said to take twice as long, beside one that divides evenly."""
    with (
        patch.object(auto_plan, "make_plan", predicting(SAMPLES)),
        patch.object(measured, "slowdowns_of", lambda *of: (0.5, 1.5)),
    ):
        found = session(data, cache, "auto", batch=48)
    own, plain = weights(found), weights(session(data, cache, "sample=2", batch=48))
    distance = max(float((own[name] - plain[name]).abs().max()) for name in plain if plain[name].is_floating_point())
    (row,) = [row for row in found.derived if row.name == "microbatches of each part"]
    return row.formula, found.division.counts, distance


@pytest.mark.slow
def test_devices_that_are_not_equally_fast_share_by_their_speed(data: Path, tmp_path: Path) -> None:
    for rule, counts, distance in run_ranks(by_speed, 2, data, tmp_path):
        assert counts == (5, 1)
        assert rule == "6 over 2, by the speeds that the planner measured"
        assert distance < 1e-5


def slow_input(data: Path, cache: Path) -> list[str]:
    with patch.object(auto_plan, "measure_input", lambda *args: HostCost(per_sample=1.0)):
        return session(data, cache, "auto").notes


@pytest.mark.slow
def test_input_is_part_of_the_prediction(data: Path, tmp_path: Path) -> None:
    for notes in run_ranks(slow_input, 2, data, tmp_path):
        assert any("Input-bound" in note for note in notes), notes
        assert any("of memory a device" in note for note in notes)


def test_on_a_gpu_racers_take_pinned_batches_and_are_ahead_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[object] = []

    def pinned(batch: Batch) -> Batch:
        return replace(batch, epoch=7)

    def step(batch: Batch, update: int) -> None:
        happened.append((batch.epoch, update))

    step.rank, step.passes = 0, [SimpleNamespace(parts=[range(8)])]  # type: ignore[attr-defined]
    monkeypatch.setattr(Batch, "pin_memory", pinned)
    monkeypatch.setattr(training_step, "wait_for", lambda device: happened.append("wait"))
    on_gpu, on_cpu = [(7, 0), (7, 1), (7, 2), (7, 3), "wait"], [(0, 0), "wait", (0, 1), "wait"]
    for device, first in (("cuda", on_gpu), ("cpu", on_cpu)):
        happened.clear()
        assert training_step.update_seconds(step, (1, 4, 4), torch.device(device), Ranks()) >= 0  # type: ignore[arg-type]
        assert happened[: len(first)] == first
