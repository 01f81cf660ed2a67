"""A run is observed without being changed; what was seen stands beside the prediction, and the profile store learns."""

import itertools
import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from convoy.engine.clock import DeviceClock
from convoy.planner import Scored, score
from convoy.planner.comparison import GRADIENTS, Comparison
from convoy.planner.cost.costs import Costs, Roofline
from convoy.planner.cost.link import Curve, Link, Links
from convoy.planner.cost.store import ProfileStore
from convoy.planner.profiling import local_op_of
from convoy.training import Session
from convoy.training.build import build_model
from convoy.training.observation import APART, LAST, WARM_UP, WATCHED, Observation
from convoy.training.workloads import measuring, workload_in_passes
from engine.test_watched import ticking
from ranks import run_ranks
from training.scenarios import session

slow = pytest.mark.slow


def run(found: Session, updates: int, observation: Observation | None = None) -> dict[str, torch.Tensor]:
    """Whole weights after some updates."""
    step = found.step()
    if observation is not None:
        observation.begin()
    for update, batch in enumerate(found.batches(0, updates)):
        if observation is None:
            step(batch, update)
            continue
        with observation.update(step):
            step(batch, update)
        observation.begin()
    return {name: found.network.whole(name, tensor).clone() for name, tensor in found.model.state_dict().items()}


def both_ways(data: Path, settings: tuple[str, ...]) -> tuple[bool, Comparison]:
    plain, found = run(session(data, *settings), APART[1] + 1), session(data, *settings)
    observation = Observation(found)
    seen = run(found, APART[1] + 1, observation)
    return all(torch.equal(plain[name], seen[name]) for name in plain), observation.conclude(None, None)


@pytest.mark.parametrize(
    "settings",
    [
        ("parallel.plan=sample=2", "reproducible=true"),
        ("parallel.plan=filter=2", "compile=false", "clip_norm=1.0"),
        pytest.param(("parallel.plan=sample=2", "parallel.gradient_compression=bf16"), marks=slow),
        pytest.param(("parallel.plan=sample=2", "parallel.local_sgd=2"), marks=slow),
    ],
)
def test_nothing_that_is_computed_changes(data: Path, settings: tuple[str, ...]) -> None:
    for same, comparison in run_ranks(both_ways, 2, data, settings):
        assert same and comparison.groups
        assert comparison.timed == APART[1] + 1 - WARM_UP - 4 and comparison.watched == 2


def predicted(found: Session) -> Scored:
    """By a made-up device and links."""
    plain, _ = build_model(found.recipe, found.data)
    workload = workload_in_passes(found.recipe, plain, (1, 28, 28), (8, 8), found.merge, 2, found.device)
    curve = Curve(((1, 1e-5), (10**6, 1e-3)))
    costs = Costs(Roofline(1e9, 1e9, 1e-6), Links({(0, 1): Link(curve, curve)}), batch_norm="microbatch", microbatch=8)
    return score(workload, found.plan, costs)


Observed = tuple[Comparison, list[float], float | None, bool, int, int]
"""A comparison; seconds of the watched updates on this rank, and of the predicted one; whether the store knows every
operation with weights of this rank; what it has learned, and of how many devices it knows."""


def observed(
    data: Path, folder: Path, plan: str, updates: int, by_clock: bool, predicts: bool, disturbed: bool
) -> Observed:
    """A run; by the clock every mark is a millisecond after the one before."""
    found, store = session(data, f"parallel.plan={plan}"), ProfileStore(folder / "store")
    clock = [DeviceClock(found.device, ticking(1e-3))] if by_clock else []
    observation = Observation(found, *clock)
    run(found, updates, observation)
    watched = [sum(segment.seconds for segment in one.segments()) for one in observation._watched]
    scored = predicted(found) if predicts else None
    with patch("convoy.launch.host.HostLoad.is_disturbed", disturbed):
        comparison = observation.conclude(scored, store, folder / "trace.json")
    learned = ProfileStore(folder / "store").times(measuring(found.recipe, found.device, found.ranks.num))
    knows = found.plan is not None and found.ranks.num > 1
    if knows:
        plain, _ = build_model(found.recipe, found.data)
        workload = workload_in_passes(found.recipe, plain, (1, 28, 28), (8, 8), found.merge, 2, found.device)
        placement = workload.place(found.plan)
        wanted = {local_op_of(workload, placement, placed, found.ranks.rank) for placed in placement.calls}
        knows = {one for one in wanted if one.op in ("conv", "linear", "batch_norm")} <= set(learned)
    return comparison, watched, scored and scored.seconds, knows, len(learned), len(store.devices())


def test_the_store_learns_what_the_calls_took_but_not_beside_other_processes(data: Path, tmp_path: Path) -> None:
    (comparison, _, _, known, learned, _), _ = run_ranks(
        observed, 2, data, tmp_path, "filter=2", LAST + 3, True, False, False
    )
    assert known and comparison.learned == learned > 0 and comparison.watched == len(WATCHED)
    assert comparison.timed == LAST - WARM_UP - len(WATCHED) - len(APART)
    assert comparison.update.measured_s == pytest.approx(1e-3)  # from one mark to the next
    assert [group.name for group in comparison.groups] == ["conv", "norm", "head", "aux", GRADIENTS]
    (comparison, *_, devices), _ = run_ranks(
        observed, 2, data, tmp_path / "beside", "sample=2", APART[1] + 1, False, False, True
    )
    assert comparison.learned == devices == 0
    assert any(note.startswith("other processes kept") for note in comparison.notes)


@pytest.mark.parametrize(
    "plan", ["stage=2", pytest.param("sample=2", marks=slow), pytest.param("filter=2", marks=slow)]
)
def test_one_of_the_watched_updates_is_kept_beside_the_predicted_one(data: Path, tmp_path: Path, plan: str) -> None:
    ranks = run_ranks(observed, 2, data, tmp_path, plan, WATCHED[1] + 1, True, True, False)
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert {"measured rank 0", "measured rank 1", "predicted rank 0"} <= set(names.values())
    for pid, name in names.items():
        spans = [(e["tid"], e["ts"], e["ts"] + e["dur"]) for e in found if e["ph"] == "X" and e["pid"] == pid]
        for (tid, _, end), (after, start, _) in itertools.pairwise(sorted(spans)):
            assert tid != after or round(1e3 * end) <= round(1e3 * start), name
        source, _, rank = name.split()
        watched, seconds = ranks[int(rank)][1:3]
        total, last = sum(end - start for _, start, end in spans) / 1e6, max(end for *_, end in spans) / 1e6
        if source == "measured":
            assert any(total == pytest.approx(one, rel=1e-9) for one in watched)
            assert last == pytest.approx(total, rel=1e-9)
        else:
            assert last <= seconds + 1e-9  # rounded to nanoseconds
    kinds = {name: {e["cat"] for e in found if e["ph"] == "X" and e["pid"] == pid} for pid, name in names.items()}
    wanted = {"forward", "backward", "gradient" if plan == "sample=2" else "transfer"}
    assert wanted <= kinds["measured rank 0"] & kinds["predicted rank 0"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name"}
    between = [e for e in found if e["ph"] == "X" and threads[e["pid"], e["tid"]] == "stages"]
    assert all(e["args"]["layer"] for e in between if e["name"] != "what was sent")
    assert {names[e["pid"]] for e in between} == (set(names.values()) if plan == "stage=2" else set())
    if plan == "stage=2":
        stages_of(ranks[0][0])


def stages_of(comparison: Comparison) -> None:
    """Stages have the layers of all of them, each its weights for itself."""
    assert comparison.parts["stages"].measured_s and comparison.parts["stages"].predicted_s
    groups = {group.name: group for group in comparison.groups}
    assert {"conv", "head"} <= set(groups) and GRADIENTS not in groups
    assert all(group.computes.measured_s and group.computes.predicted_s for group in groups.values())
    assert comparison.notes[-1].endswith("the layers are those of ranks 0 and 1")
    assert [group.stages for group in comparison.groups] == sorted(group.stages for group in comparison.groups)
    assert comparison.groups[0].title == "conv (stage 1)" and comparison.groups[-1].stages == (2,)
    assert len(comparison.stages) == 2
    for one in comparison.stages:
        assert one.computes.measured_s and one.waits.measured_s and one.computes.predicted_s


def test_one_device_is_watched_too_and_a_short_run_is_said_to_be_short(data: Path, tmp_path: Path) -> None:
    ((comparison, *_),) = run_ranks(observed, 1, data, tmp_path, "serial", WATCHED[0] + 1, False, False, False)
    assert comparison.groups
    assert all(comparison.parts[part].measured_s for part in ("forward", "backward", "optimizer"))
    assert comparison.parts["waiting"].measured_s == 0
    for comparison, *_ in run_ranks(observed, 2, data, tmp_path / "short", "sample=2", 2, False, False, False):
        assert comparison.update.measured_s is None and "too short" in " ".join(comparison.notes)
    assert not (tmp_path / "short" / "trace.json").exists()
