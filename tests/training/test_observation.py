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
from convoy.planner.cost.calibrated import Calibrated
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.link import Curve, Link, Links
from convoy.planner.cost.store import ProfileStore
from convoy.planner.cost.times import Roofline
from convoy.planner.profiling import local_op_of
from convoy.training import Session, load_recipe
from convoy.training.build import build_model
from convoy.training.environment import join_ranks
from convoy.training.observation import APART, LAST, WARM_UP, WATCHED, Observation
from convoy.training.set_up import set_up
from convoy.training.workloads import measuring, workload_in_passes
from engine.test_watched import ticking
from ranks import run_ranks
from whole_runs import train_here

PLANS = ("sample=2", "filter=2")


def session(data: Path, plan: str, *settings: str) -> Session:
    ranks, device = join_ranks()
    common = [f"data.path={data}", "model.name=tiny:TinyNet", "batch=16", "microbatch=8", "optimizer.lr=0.1"]
    number = f"parallel.devices={ranks.num}"
    recipe = load_recipe("default", [*common, f"parallel.plan={plan}", number, *settings], [])
    return set_up(recipe, device, ranks=ranks)


def run(found: Session, updates: int, observation: Observation | None) -> dict[str, torch.Tensor]:
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


def both_ways(data: Path, plan: str, settings: tuple[str, ...]) -> tuple[bool, Comparison]:
    plain = run(session(data, plan, *settings), APART[1] + 1, None)
    found = session(data, plan, *settings)
    observation = Observation(found)
    own = run(found, APART[1] + 1, observation)
    return all(torch.equal(plain[name], own[name]) for name in plain), observation.conclude(None, None)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("settings", [(), ("parallel.gradient_compression=bf16",), ("compile=false", "clip_norm=1.0")])
def test_nothing_that_is_computed_changes(data: Path, plan: str, settings: tuple[str, ...]) -> None:
    for same, comparison in run_ranks(both_ways, 2, data, plan, settings):
        assert same
        assert comparison.groups
        assert comparison.timed == APART[1] + 1 - WARM_UP - 4
        assert comparison.watched == 2


@pytest.mark.parametrize("settings", [("reproducible=true",), ("parallel.local_sgd=2",)])
def test_other_ways_to_add_gradients(data: Path, settings: tuple[str, ...]) -> None:
    for same, comparison in run_ranks(both_ways, 2, data, "sample=2", settings):
        assert same
        assert comparison.groups


def by_a_clock(data: Path, folder: Path, plan: str) -> tuple[Comparison, bool, bool, float, float]:
    """An observed run in which every mark is a millisecond after the one before."""
    found = session(data, plan)
    store = ProfileStore(folder)
    observation = Observation(found, DeviceClock(found.device, ticking(1e-3)))
    run(found, LAST + 3, observation)
    assert observation.done
    comparison = observation.conclude(None, store)
    learned = ProfileStore(folder).times(measuring(found.recipe, found.device, 2))
    shape = (1, 28, 28)
    plain, _ = build_model(found.recipe, found.data)
    workload = workload_in_passes(found.recipe, plain, shape, (8, 8), found.merge, 2, found.device)
    placement = workload.place(found.plan)
    wanted = {local_op_of(workload, placement, placed, found.ranks.rank) for placed in placement.calls}
    known = {one for one in wanted if one in learned}
    weights = {one for one in wanted if one.op in ("conv", "linear", "batch_norm")}
    link = Link(Curve(((1, 0.0),)), Curve(((1, 0.0),)))
    costs = Costs(Calibrated(learned), Links({(0, 1): link}), batch_norm="microbatch", microbatch=8)
    forward = score(workload, found.plan, costs).timeline.by_kind()["forward"]
    return comparison, weights <= known, all(times.forward > 0 for times in learned.values()), forward, len(learned)


def beside_others(data: Path, folder: Path) -> tuple[Comparison, int]:
    found, store = session(data, "sample=2"), ProfileStore(folder)
    observation = Observation(found)
    run(found, APART[1] + 1, observation)
    with patch("convoy.launch.host.HostLoad.is_disturbed", True):
        comparison = observation.conclude(None, store)
    return comparison, len(store.devices())


def test_nothing_is_learned_beside_other_processes(data: Path, tmp_path: Path) -> None:
    (comparison, kept), _ = run_ranks(beside_others, 2, data, tmp_path)
    assert comparison.learned == kept == 0
    assert any(note.startswith("other processes kept") for note in comparison.notes)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_the_store_learns_what_the_calls_took(data: Path, tmp_path: Path, plan: str) -> None:
    (comparison, all_known, all_timed, forward, learned), _ = run_ranks(by_a_clock, 2, data, tmp_path, plan)
    assert comparison.learned == learned
    assert comparison.watched == len(WATCHED)
    assert comparison.timed == LAST - WARM_UP - len(WATCHED) - len(APART)
    assert comparison.update.measured_s == pytest.approx(1e-3)  # from one mark to the next
    assert [group.name for group in comparison.groups] == ["conv", "norm", "head", "aux", GRADIENTS]
    assert all_known and all_timed
    measured = comparison.parts["forward"].measured_s
    assert measured is not None
    assert forward == pytest.approx(measured, rel=0.35)  # but for views, whose time nobody counts
    parts = sum(both.measured_s or 0.0 for both in comparison.parts.values())
    assert parts > 20e-3


def predicted(found: Session) -> Scored:
    """By a made-up device and links."""
    plain, _ = build_model(found.recipe, found.data)
    workload = workload_in_passes(found.recipe, plain, (1, 28, 28), (8, 8), found.merge, 2, found.device)
    curve = Curve(((1, 1e-5), (10**6, 1e-3)))
    costs = Costs(Roofline(1e9, 1e9, 1e-6), Links({(0, 1): Link(curve, curve)}), batch_norm="microbatch", microbatch=8)
    return score(workload, found.plan, costs)


def traced(data: Path, file: Path, plan: str, with_prediction: bool) -> tuple[list[float], float | None]:
    """Seconds of the watched updates on this rank, and of the predicted one."""
    found = session(data, plan)
    observation = Observation(found, DeviceClock(found.device, ticking(1e-3)))
    run(found, WATCHED[1] + 1, observation)
    watched = [sum(segment.seconds for segment in one.segments()) for one in observation._watched]
    scored = predicted(found) if with_prediction else None
    observation.conclude(scored, None, file)
    return watched, scored.seconds if scored is not None else None


@pytest.mark.parametrize("plan", [*PLANS, "stage=2"])
def test_one_of_the_watched_updates_is_kept_beside_the_predicted_one(data: Path, tmp_path: Path, plan: str) -> None:
    ranks = run_ranks(traced, 2, data, tmp_path / "trace.json", plan, True)
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert {"measured rank 0", "measured rank 1", "predicted rank 0"} <= set(names.values())
    for pid, name in names.items():
        spans = [(e["tid"], e["ts"], e["ts"] + e["dur"]) for e in found if e["ph"] == "X" and e["pid"] == pid]
        for (tid, _, end), (after, start, _) in itertools.pairwise(sorted(spans)):
            assert tid != after or round(1e3 * end) <= round(1e3 * start), name
        source, _, rank = name.split()
        watched, seconds = ranks[int(rank)]
        if source == "measured":
            total = sum(end - start for _, start, end in spans) / 1e6
            assert any(total == pytest.approx(one, rel=1e-9) for one in watched)
            assert max(end for *_, end in spans) / 1e6 == pytest.approx(total, rel=1e-9)
        else:
            assert max(end for *_, end in spans) / 1e6 <= seconds + 1e-9  # rounded to nanoseconds
    kinds = {name: {e["cat"] for e in found if e["ph"] == "X" and e["pid"] == pid} for pid, name in names.items()}
    for kind in ("forward", "backward", "gradient" if plan == "sample=2" else "transfer"):
        assert kind in kinds["measured rank 0"] & kinds["predicted rank 0"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name"}
    between = [e for e in found if e["ph"] == "X" and threads[e["pid"], e["tid"]] == "stages"]
    assert all(e["args"]["layer"] for e in between if e["name"] != "what was sent")
    assert {names[e["pid"]] for e in between} == (set(names.values()) if plan == "stage=2" else set())


def in_stages(data: Path) -> Comparison:
    found = session(data, "stage=2")
    observation = Observation(found, DeviceClock(found.device, ticking(1e-3)))
    run(found, WATCHED[1] + 1, observation)
    return observation.conclude(predicted(found), None)


def test_stages_have_the_layers_of_all_of_them(data: Path) -> None:
    comparison, _ = run_ranks(in_stages, 2, data)
    waits = comparison.parts["stages"]
    assert waits.measured_s and waits.predicted_s
    groups = {group.name: group.computes for group in comparison.groups if group.name != GRADIENTS}
    assert {"conv", "head"} <= set(groups)
    assert all(both.measured_s and both.predicted_s for both in groups.values())
    assert comparison.notes[-1].endswith("the layers are those of ranks 0 and 1")
    assert [group.stages for group in comparison.groups] == sorted(group.stages for group in comparison.groups)
    assert comparison.groups[0].title == "conv (stage 1)" and comparison.groups[-1].stages == (2,)
    assert GRADIENTS not in {group.name for group in comparison.groups}  # each stage has its weights for itself
    for one in comparison.stages:
        assert one.computes.measured_s and one.waits.measured_s and one.computes.predicted_s
    assert len(comparison.stages) == 2


def on_one_device(data: Path) -> Comparison:
    found = session(data, "serial")
    observation = Observation(found)
    run(found, WATCHED[0] + 1, observation)
    return observation.conclude(None, None)


def test_one_device_has_parts_but_no_layers(data: Path) -> None:
    (comparison,) = run_ranks(on_one_device, 1, data)
    assert comparison.groups == ()
    assert comparison.parts["forward"].measured_s and comparison.parts["backward"].measured_s
    assert comparison.parts["optimizer"].measured_s
    assert comparison.parts["waiting"].measured_s == 0
    assert "plain network" in " ".join(comparison.notes)


def too_short(data: Path, file: Path) -> Comparison:
    found = session(data, "sample=2")
    observation = Observation(found)
    run(found, 2, observation)
    return observation.conclude(None, None, file)


def test_a_short_run_is_said_to_be_short(data: Path, tmp_path: Path) -> None:
    for comparison in run_ranks(too_short, 2, data, tmp_path / "trace.json"):
        assert comparison.update.measured_s is None
        assert "too short" in " ".join(comparison.notes)
    assert not (tmp_path / "trace.json").exists()


def kept(data: Path, out: Path, keep: bool) -> bool:
    """Whether a training has left times in the store."""
    cache = out.with_name(f"{out.name}-cache")
    with patch.dict("os.environ", {"CONVOY_CACHE": str(cache)}):
        train_here(data, out, {"epochs": f"{APART[0] + 1}ba", "parallel.plan": "filter=2"}, keep=keep)
    return any(cache.rglob("*.sqlite"))
