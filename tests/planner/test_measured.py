"""What is measured for which question, on ranks that fail or differ, within memory; which measurements are kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest
import torch

from convoy.comm.position import NEEDS_LESS
from convoy.comm.ranks import Ranks
from convoy.engine.profiling import Profile, Profiler
from convoy.errors import ConvoyError, TooLargeError
from convoy.launch.host import HostLoad
from convoy.models import create
from convoy.planner.cost.costs import Costs, HostCost, Times, Update
from convoy.planner.cost.link import Curve, Link, Links
from convoy.planner.cost.local_op import VIEWS, LocalOp
from convoy.planner.cost.prediction import Scored
from convoy.planner.measured import Job, Measurements, device_of, jobs_for
from convoy.planner.planner import Planned, Question, make_plan, score
from convoy.planner.profiling import local_op_of
from convoy.planner.store import Device, ProfileStore, recalled, remember, remember_run, unlike_runs
from convoy.planner.workload import Workload, workload_of
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from convoy.recipe.recipe import load_recipe
from convoy.training.build import TriedNetwork
from convoy.training.workloads import workload_in_passes
from ranks import run_ranks

SAMPLES, PLENTY = Plan.parse("sample=2"), 1e12


def lenet(batch: int = 8, **options: Any) -> Workload:
    torch.manual_seed(0)
    return workload_of(create("lenet"), torch.zeros(2, 1, 28, 28), batch, name="lenet", **options)


def recipes(devices: int, merge: int, shares: tuple[float, ...] | None = None) -> Workload:
    settings = ["model.name=lenet", "data.path=mnist-mini", "batch=64", "microbatch=8"]
    settings += [f"parallel.shares={list(shares)}", f"parallel.devices={devices}"] if shares is not None else []
    recipe = load_recipe("default", settings, [])
    torch.manual_seed(0)
    tried = TriedNetwork.of(recipe, create("lenet"), (1, 28, 28), torch.device("cpu"), "the size")
    return workload_in_passes(tried, (8,) * 8, merge, devices)


def failing(error: Exception) -> tuple[str, list[str], str]:
    """Plan while profiling runs by channels fail on rank 1: plan, notes, refusal."""
    ranks, run, progress = Ranks.here(), Profiler._pass, [""]

    def failing_pass(profiler: Profiler, *args: Any, **options: Any) -> object:
        if ranks.rank == 1 and progress[-1].startswith("profiling channel"):
            raise error
        return run(profiler, *args, **options)

    with patch.object(Profiler, "_pass", failing_pass):
        try:
            result = make_plan(Question(lenet(), 2), ranks, lambda what, *_: progress.append(what.partition(": ")[2]))
        except ConvoyError as failure:
            return "", [], str(failure)
    return str(result.best.plan), list(result.notes), ""


def failures() -> tuple[Any, ...]:
    memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB")
    return failing(memory), failing(ValueError("odd shape"))[2]


def test_what_fails_on_one_rank_is_left_out_or_one_sentence_of_all() -> None:
    first, second = run_ranks(failures, 2, timeout=150)
    assert first[0][0] == second[0][0] != ""
    for (_, notes, _), odd in (first, second):
        (note,) = [note for note in notes if "memory" in note]
        assert note.startswith("rank 1 ran out of memory while profiling channel")
        assert f": it asked for 1 EiB; {NEEDS_LESS}: its layers are predicted" in note
        assert odd == "rank 1 failed while profiling channel (ValueError: odd shape): -v shows where"


def taking(seconds: float) -> Any:
    """A patch: profiled passes, and each of their calls, take so long."""
    run = Profiler.run

    def running(profiler: Profiler, *args: object) -> Profile:
        result = run(profiler, *args)  # type: ignore[arg-type]
        calls = dict.fromkeys(result.calls, Times(seconds, seconds))
        return replace(result, calls=calls, seconds=seconds, slowest=seconds)

    return patch.object(Profiler, "run", running)


def unequal(folder: str, slower: float) -> tuple[Any, ...]:
    """A plan for two devices of which the second takes `slower` times as long, and what a second plan knows of that."""
    ranks, store = Ranks.here(), ProfileStore(Path(folder) / str(slower))
    with taking(1e-3 * (slower if ranks.rank else 1.0)):
        result = make_plan(Question(recipes(2, 1), 2, store=store, plans=[SAMPLES]), ranks)
    noted = partial(store.noted, device_of(result.workload, 2), f"2 devices, {result.workload.optimizer_name}")
    kept = noted()
    again = make_plan(Question(recipes(2, 1), 2, link="10gbit", store=store, plans=[SAMPLES]), ranks)
    assert again.costs.slowdowns == result.costs.slowdowns
    assert noted() == kept and kept["links"]  # as they were measured, whatever links are asked about
    return result.costs.slowdowns, result.shares(result.best.plan), [note for note in result.notes if "fast" in note]


def differing(folder: str) -> tuple[Any, ...]:
    return unequal(folder, 3.0), unequal(folder, 1.05)


@pytest.mark.slow
def test_devices_get_shares_by_their_speed(tmp_path: Path) -> None:
    for (slowdowns, shares, notes), equal in run_ranks(differing, 2, str(tmp_path), timeout=150):
        assert slowdowns == pytest.approx((0.5, 1.5)) and equal[:2] == ((), None)
        assert shares == (6, 2)  # 6 microbatches take the first what 2 take the second
        assert notes == [
            "the devices are not equally fast: the same takes them 1.00 : 3.00; "
            "plans that divide samples over all of them do so as --shares 6,2"
        ]


@contextmanager
def on_a_machine(room: float, jobs: list[Job]) -> Iterator[None]:
    """With so many bytes for a rank, where all calls take equally long; what is profiled there."""
    begun = Measurements._run

    def noted(measured: Measurements, job: Job, afresh: bool) -> None:
        jobs.append(job)
        begun(measured, job, afresh)

    memory = patch("convoy.planner.planner.device_memory", lambda device, on_host: (room, ""))
    with memory, taking(1e-3), patch.object(Measurements, "_run", noted):
        yield


def planned(room: float, store: ProfileStore | None = None, **options: Any) -> tuple[list[Job], Planned]:
    jobs: list[Job] = []
    with on_a_machine(room, jobs):
        return jobs, make_plan(Question(lenet(64), 2, link="pcie4", store=store, **options), Ranks())


@pytest.mark.slow
def test_what_does_not_fit_is_profiled_in_smaller_passes_or_left_out_with_a_note() -> None:
    whole, _ = planned(PLENTY)
    assert {job.workload.samples for job in whole} == {64}
    room = 1.5 * min(job.memory for job in whole)
    smaller, note = planned(room)
    assert {job.name for job in whole} == {job.name for job in smaller}
    assert all(job.memory <= room / 2 and job.workload.samples < 64 for job in smaller)
    assert any(note.startswith("sample was profiled in passes of ") for note in note.notes)
    jobs: list[Job] = []
    with on_a_machine(PLENTY, jobs), pytest.raises(TooLargeError, match="there are"):
        make_plan(Question(lenet(64), 2, link="pcie4", memory_limit=1000.0), Ranks())
    assert jobs == []  # which is said before anything is measured


@pytest.mark.slow
def test_what_was_killed_is_not_tried_again_with_as_little_memory(tmp_path: Path) -> None:
    store, room, workload = ProfileStore(tmp_path), 1e9, lenet(64)
    job = jobs_for(workload, [Mesh(("gpu",), (2,))])[1]

    def tried(room: float) -> int:
        return next(one.workload.samples for one in planned(room, store)[0] if one.name == "sample")

    killed = Measurements(workload, Ranks(), store, room=room).attempt(job)
    killed.__enter__()  # and no more
    assert tried(room) == 32 and tried(2 * room) == 64
    assert store.noted(device_of(workload, 1), job.mark) is None  # it has ended by itself


@pytest.mark.slow
def test_times_of_a_busy_machine_are_not_kept_and_those_of_another_pace_are_forgotten(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    load = HostLoad(1.0, 1.0, 2, None, None, (), 1.5, 0.0, 0, None, None)
    with (
        patch.object(HostLoad, "is_disturbed", PropertyMock(return_value=True)),
        patch("convoy.launch.host.HostWatch.read", lambda watch: load),
    ):
        _, busy = planned(PLENTY, store)
    device = device_of(busy.workload, 1)
    assert sum("other processes kept 1.5 of 2 cores busy" in note for note in busy.notes) == 1
    assert store.rows(device) == []
    planned(PLENTY, store)
    store.put(device, {row.local_op: row.times * 3.0 for row in store.rows(device)}, "run")  # beside something else
    again, result = planned(PLENTY, store)
    assert [job.name for job in again][:4] == ["serial, one device", "sample", "filter", "channel"]
    assert any("3.00 × those of now" in note and "convoy profile --clear" in note for note in result.notes)


DEVICE = Device("Some CPU", "2.13", "0.1", 1, neighbours=2)


def test_a_prediction_that_contradicts_the_last_run_is_told(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    doubts = partial(unlike_runs, store, DEVICE, "lenet")
    remember_run(store, DEVICE, "lenet", 64, SAMPLES, 0.735)
    (sentence,) = doubts(64, {SAMPLES: 1.96})
    assert sentence.startswith("sample=2 is expected to take 1.96 s an update, and took 735 ms in the last run here")
    assert list(doubts(64, {SAMPLES: 0.8})) == list(doubts(32, {SAMPLES: 1.96})) == []


def by_flops(op: LocalOp) -> Times:
    return Times(op.flops.forward / 1e10, op.flops.backward / 1e10) if op.op not in VIEWS else Times()


def test_a_given_plan_is_predicted_without_its_input_where_all_of_it_is_known(tmp_path: Path) -> None:
    store, workload, plan = ProfileStore(tmp_path), lenet(), Plan.parse("filter=2")
    link = Link(Curve(((1, 1e-5), (1000, 1e-4))), Curve(((1, 2e-5),)), overlap=True, cpu_share=0.5)
    costs = Costs(by_flops, Links({(0, 1): link}), Update(1e-9, 1e-6, 1e-4), loss=HostCost(1e-3), per_parameter=1e-7)
    remember(store, DEVICE, 2, "sgd", replace(costs, input=HostCost(per_sample=1.0)))
    placement = workload.place(plan)
    ops = {local_op_of(workload, placement, placed, rank) for rank in (0, 1) for placed in placement.calls}
    first, *rest = [op for op in ops if op.op not in VIEWS and not op.is_empty]

    def again(device: Device = DEVICE, optimizer: str = "sgd") -> Scored | None:
        return recalled(ProfileStore(tmp_path), device, optimizer, plan, placement, 1)

    store.put(DEVICE, {op: by_flops(op) for op in rest})
    assert again() is None
    store.put(DEVICE, {first: by_flops(first)}, "run")
    assert again(optimizer="adam") is again(replace(DEVICE, threads=2)) is None
    kinds, reference = (result.timeline.by_kind() for result in (again(), score(workload, plan, costs)))
    for kind in ("forward", "backward", "update", "around"):
        assert kinds[kind] == pytest.approx(reference[kind])
    for links in ("damaged", []):  # which says of no link what it takes
        store.note(DEVICE, "2 devices, sgd", {"links": links})
        assert again() is None
