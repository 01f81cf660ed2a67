"""A run is recorded without being changed: what was seen stands beside the prediction, the profile store learns, waits
are told from work, and what holds the run back is said once.
"""

import itertools
import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pydantic import TypeAdapter

from convoy.doctor import updates
from convoy.doctor.diagnosis import Diagnosis
from convoy.doctor.updates import RunDoctor, Watch
from convoy.engine.watched import DeviceClock
from convoy.planner.comparison import GRADIENTS, Comparison
from convoy.planner.cost.costs import Costs, Roofline
from convoy.planner.cost.link import Curve, Link, Links
from convoy.planner.cost.prediction import Scored
from convoy.planner.planner import score
from convoy.planner.profiling import local_op_of
from convoy.planner.store import ProfileStore
from convoy.tasks.task import Evaluation
from convoy.training import Session, evaluation, loop, recorder, step
from convoy.training.build import TriedNetwork, build_model
from convoy.training.recorder import WARM_UP, Numbers, Recorder, compare
from convoy.training.step import TrainingStep
from convoy.training.workloads import measuring, workload_in_passes
from made_time import made_time
from ranks import run_ranks
from training.scenarios import session
from whole_runs import Ended, train_here

# The first updates, beside a prediction

NUMBERS = Numbers((5, 8, 11), (6, 9, 12), last=14)
"""Which updates are looked at here, where others are up to the 64th."""


def run(trained: Session, number: int, watch: Recorder | None = None) -> dict[str, torch.Tensor]:
    """Whole weights after some updates."""
    work = trained.step()
    for done, batch in enumerate(trained.batches(0, number)):
        if watch is None:
            work(batch, done)
        else:
            watch.ask(done)
            watch.update(work, batch, done)
    if watch is not None:
        watch.ask(number)
    return {name: trained.network.whole(name, tensor).clone() for name, tensor in trained.model.state_dict().items()}


UNCHANGED = (
    ("parallel.plan=sample=2", "reproducible=true"),
    ("parallel.plan=filter=2", "compile=false", "clip_norm=1.0"),
    ("parallel.plan=sample=2", "parallel.local_sgd=2"),
)


def both_ways(data: Path) -> list[tuple[bool, Comparison]]:
    ways = []
    for settings in UNCHANGED:
        plain, watched = run(session(data, *settings), 10), session(data, *settings)
        watch = Recorder(watched, NUMBERS)
        seen = run(watched, 10, watch)
        ways.append((all(torch.equal(plain[name], seen[name]) for name in plain), compare(watch, None, None)))
    return ways


def test_nothing_that_is_computed_changes(data: Path) -> None:
    for same, comparison in itertools.chain.from_iterable(run_ranks(both_ways, 2, data)):
        assert same and comparison.groups
        assert comparison.timed == 10 - WARM_UP - 4 and comparison.watched == 2


def in_passes(trained: Session) -> Any:
    plain, _ = build_model(trained.recipe, trained.data)
    tried = TriedNetwork(trained.recipe, plain, (1, 28, 28), trained.device, trained.probe)
    return workload_in_passes(tried, (8, 8), trained.merge, 2)


def predicted(trained: Session) -> Scored:
    """By a made-up device and links."""
    curve = Curve(((1, 1e-5), (10**6, 1e-3)))
    links = Links({(0, 1): Link(curve, curve)})
    return score(in_passes(trained), trained.plan, Costs(Roofline(1e9, 1e9, 1e-6), links, microbatch=8))


def observed(
    data: Path, folder: Path, plan: str, number: int, by_clock: bool = False, predicts: bool = False, busy: bool = False
) -> tuple[Comparison, list[float], bool, int]:
    """A run; by the clock every mark is a millisecond after the one before. Beside it other processes may compute.
    Gives a comparison, seconds of the watched updates on this rank, whether the store knows every operation with
    weights of this rank, and how many it knows."""
    trained, store = session(data, f"parallel.plan={plan}"), ProfileStore(folder / "store")
    clock = DeviceClock(trained.device, itertools.count(1e-3, 1e-3).__next__) if by_clock else None
    watch = Recorder(trained, NUMBERS, clock=clock)
    run(trained, number, watch)
    watched = [sum(segment.seconds for segment in one.segments()) for one in watch.watched]
    scored = predicted(trained) if predicts else None
    with patch("convoy.launch.host.HostLoad.is_disturbed", busy):
        comparison = compare(watch, scored, store, folder / "trace.json")
    learned = ProfileStore(folder / "store").times(measuring(trained.recipe, trained.device, trained.ranks.num))
    knows = trained.ranks.num > 1
    if knows:
        workload = in_passes(trained)
        placement = workload.place(trained.plan)
        wanted = {local_op_of(workload, placement, placed, trained.ranks.rank) for placed in placement.calls}
        knows = {one for one in wanted if one.op in ("conv", "linear", "batch_norm")} <= set(learned)
    return comparison, watched, knows, len(learned)


def test_the_store_learns_what_the_calls_took_but_not_beside_other_processes(data: Path, tmp_path: Path) -> None:
    (comparison, _, known, learned), _ = run_ranks(observed, 2, data, tmp_path, "filter=2", 17, True)
    assert known and comparison.learned == learned > 0 and comparison.watched == 3
    assert comparison.timed == 14 - WARM_UP - 6
    assert comparison.update.measured_s == pytest.approx(1e-3)  # from one mark to the next
    assert [group.name for group in comparison.groups] == ["conv", "norm", "head", "aux", GRADIENTS]
    more = data, tmp_path / "beside", "sample=2", 10, False, False, True
    (comparison, *_, learned), _ = run_ranks(observed, 2, *more)
    assert comparison.learned == learned == 0
    assert any(note.startswith("other processes kept") for note in comparison.notes)
    for comparison, *_ in run_ranks(observed, 1, data, tmp_path / "short", "serial", 2):
        assert comparison.update.measured_s is None
        assert f"the run was too short to be watched: that takes {NUMBERS.watched[0]} updates" in comparison.notes
    assert not (tmp_path / "short" / "trace.json").exists()


def test_one_of_the_watched_updates_is_kept_beside_the_predicted_one(data: Path, tmp_path: Path) -> None:
    ranks = run_ranks(observed, 2, data, tmp_path, "stage=2", 9, True, True)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert {"measured rank 0", "measured rank 1", "predicted rank 0"} <= set(names)
    for rank, (_, watched, *_) in enumerate(ranks):
        spans = [e["dur"] for e in events if e["ph"] == "X" and e["pid"] == names[f"measured rank {rank}"]]
        assert any(sum(spans) / 1e6 == pytest.approx(seconds, rel=1e-9) for seconds in watched)
    comparison = ranks[0][0]  # stages have the layers of all of them, each its weights for itself
    assert comparison.parts["stages"].measured_s and comparison.parts["stages"].predicted_s
    assert all(group.computes.measured_s and group.computes.predicted_s for group in comparison.groups)
    assert comparison.notes[-1].endswith("the layers are those of ranks 0 and 1") and len(comparison.stages) == 2
    assert comparison.groups[0].title == "conv (stage 1)" and comparison.groups[-1].stages == (2,)


# A run says what holds it back: once, after its first hundred updates, and in a file; and is not changed by that

FIRST = 70
"""Updates after which these runs say it, where others take a hundred."""
LONG = {"epochs": "110ba", "log_every": "50ba", "evaluate_every": "2ba", "checkpoint.every": "90ba"}


def diagnosed(data: Path, out: Path, settings: dict[str, str]) -> Ended:
    """A run in which an update takes a tenth of a second, and so does each batch of an evaluation."""
    with made_time(recorder, evaluation, step, updates) as clock, ExitStack() as stack:
        update, batch = (clock.before(work, lambda: 0.1) for work in (TrainingStep.__call__, Evaluation.add))
        for owner, name, value in (
            (updates, "REMEMBERED", FIRST),
            (loop, "REMEMBERED", FIRST),
            (TrainingStep, "__call__", update),
            (Evaluation, "add", batch),
            (Watch, "look", lambda self: None),  # what else the machine does
        ):
            stack.enter_context(patch.object(owner, name, value))
        return train_here(data, out, LONG | settings, subscribe=RunDoctor)


@pytest.mark.slow
def test_a_diagnosis_is_said_once_and_changes_nothing(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = run_ranks(diagnosed, 2, data, out, {"reproducible": "true"})[0]
    (closer,) = (sentence for sentence in ended.said if "looks closer" in sentence)
    assert re.fullmatch(rf"An evaluation takes .*\. convoy doctor {out} looks closer", closer)
    kept = TypeAdapter(Diagnosis).validate_json((out / "diagnosis.json").read_text())
    assert (kept.batch, kept.devices, kept.model) == (24, 2, "tiny:TinyNet") and kept.images_per_s > 0
    assert kept.advice[0].cause == "evaluation" and kept.advice[0].gain > 1.3
    (plain,) = run_ranks(train_here, 1, data, tmp_path / "plain", LONG | {"reproducible": "true"})
    assert not (tmp_path / "plain" / "diagnosis.json").exists() and plain.digest == ended.digest
