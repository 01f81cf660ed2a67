"""Planning takes no more memory than there is, tries nothing again that was killed, keeps nothing of a busy machine."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import PropertyMock, patch

import pytest
import torch

from convoy.comm.ranks import Ranks
from convoy.engine.profiling import CallTimes, Profile, Profiler
from convoy.errors import ConvoyError, TooLargeError
from convoy.launch.host import HostLoad
from convoy.models import create
from convoy.planner import Planned, Workload, make_plan, workload_of
from convoy.planner.cost.device import Device
from convoy.planner.cost.store import ProfileStore
from convoy.planner.measured import Job, Measurements, device_of, jobs_for
from convoy.planner.remembered import remember_run, unlike_runs
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan

PLENTY = 1e12
SAMPLES = Plan.parse("sample=2")


def lenet(batch: int = 64) -> Workload:
    torch.manual_seed(0)
    return workload_of(create("lenet"), torch.zeros(2, 1, 28, 28), batch, name="lenet")


@contextmanager
def on_a_machine(room: float, jobs: list[Job], factor: float = 1.0) -> Iterator[None]:
    """With so many bytes for a rank, where all calls take equally long; what is profiled there."""
    run, begun = Profiler.run, Measurements._run

    def running(profiler: Profiler, *args: object) -> Profile:
        found = run(profiler, *args)  # type: ignore[arg-type]
        same = CallTimes(factor * 1e-3, factor * 1e-3)
        return replace(found, calls=dict.fromkeys(found.calls, same), seconds=1e-3, slowest=1e-3)

    def noted(measured: Measurements, job: Job, afresh: bool) -> None:
        jobs.append(job)
        begun(measured, job, afresh)

    with ExitStack() as stack:
        stack.enter_context(patch("convoy.planner.planner.device_memory", lambda device, on_host: (room, "")))
        stack.enter_context(patch.object(Profiler, "run", running))
        stack.enter_context(patch.object(Measurements, "_run", noted))
        yield


def planned(room: float, store: ProfileStore | None = None, factor: float = 1.0) -> tuple[list[Job], Planned]:
    jobs: list[Job] = []
    with on_a_machine(room, jobs, factor):
        return jobs, make_plan(lenet(), 2, Ranks(), link="pcie4", store=store)


def test_what_does_not_fit_is_profiled_in_smaller_passes() -> None:
    whole, _ = planned(PLENTY)
    assert {job.workload.samples for job in whole} == {64}
    room = 1.5 * min(job.memory for job in whole)
    smaller, found = planned(room)
    assert {job.name for job in whole} == {job.name for job in smaller}
    assert all(job.memory <= room / 2 and job.workload.samples < 64 for job in smaller)
    assert any(note.startswith("sample was profiled in passes of ") for note in found.notes)
    nothing, found = planned(1000.0)
    assert nothing == [] and any("sample was not profiled, for want of memory" in note for note in found.notes)


def test_a_machine_with_little_memory_left_leaves_out_what_needs_more() -> None:
    limits = [one.memory.total for one in planned(PLENTY)[1].candidates if one.plan == SAMPLES]
    with on_a_machine(PLENTY, []):
        found = make_plan(lenet(), 2, Ranks(), link="pcie4", memory_limit=0.99 * limits[0])
    assert all(one.plan != SAMPLES for one in found.candidates)
    assert any(note.startswith("sample=2 is left out: it needs ") for note in found.notes)


def test_where_no_plan_fits_that_is_said_before_anything_is_measured() -> None:
    jobs: list[Job] = []
    with on_a_machine(PLENTY, jobs), pytest.raises(TooLargeError, match="there are"):
        make_plan(lenet(), 2, Ranks(), link="pcie4", memory_limit=1000.0)
    assert jobs == []


def test_what_was_killed_is_not_tried_again_with_as_little_memory(tmp_path: Path) -> None:
    store, room = ProfileStore(tmp_path), 1e9
    workload = lenet()
    job = jobs_for(workload, [Mesh(("gpu",), (2,))])[1]
    assert job.name == "sample"

    def tried(room: float, store: ProfileStore) -> int:
        return next(one.workload.samples for one in planned(room, store)[0] if one.name == "sample")

    Measurements(workload, Ranks(), store, room=room)._mark(job, room)  # and no more: it was killed
    assert tried(room, store) == 32
    attempts = Measurements(workload, Ranks(), store, room=room)
    with pytest.raises(ConvoyError, match="killed in it when there was as little memory"), attempts.attempt(job):
        raise AssertionError("it was tried again")
    assert tried(2 * room, store) == 64
    assert store.noted(device_of(workload, 1), job.mark) is None  # it has ended by itself


def test_times_of_a_busy_machine_are_not_kept(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    load = HostLoad(1.0, 1.0, 2, None, None, (), 1.5, 0.0, 0, None, None, None)
    with (
        patch.object(HostLoad, "is_disturbed", PropertyMock(return_value=True)),
        patch("convoy.launch.host.HostWatch.read", lambda watch: load),
    ):
        _, found = planned(PLENTY, store)
    assert sum("other processes kept 1.5 of 2 cores busy" in note for note in found.notes) == 1
    assert store.rows(device_of(found.workload, 1)) == []
    assert not any("other processes" in note for note in planned(PLENTY, store)[1].notes)
    assert store.rows(device_of(found.workload, 1)) != []


def test_serial_and_sample_are_measured_afresh_and_times_of_another_pace_are_forgotten(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    first, right = planned(PLENTY, store)
    device = device_of(right.workload, 1)
    again, known = planned(PLENTY, store)
    assert [job.name for job in again] == [job.name for job in first][:2] == ["serial, one device", "sample"]
    assert not any("kept of earlier" in note for note in known.notes)
    store.put(device, {row.local_op: row.times * 3.0 for row in store.rows(device)}, "run")  # beside something else
    anew, found = planned(PLENTY, store)
    assert [job.name for job in anew] == [job.name for job in first]
    assert any("3.00 × those of now" in note and "convoy profile --clear" in note for note in found.notes)
    assert found.best.plan == right.best.plan


def test_a_prediction_that_contradicts_the_last_run_is_told(tmp_path: Path) -> None:
    store, device = ProfileStore(tmp_path), Device("Some CPU", "2.13", "0.1", 1)
    said = partial(unlike_runs, store, device, "lenet")
    assert list(said(64, {SAMPLES: 1.96})) == []
    remember_run(store, device, "lenet", 64, SAMPLES, 0.735)
    (sentence,) = said(64, {SAMPLES: 1.96})
    assert sentence.startswith("sample=2 is expected to take 1.96 s an update, and took 735 ms in the last run here")
    assert "convoy profile --clear" in sentence
    assert list(said(64, {SAMPLES: 0.8})) == list(said(32, {SAMPLES: 1.96})) == []


def test_a_machine_is_busy_where_others_have_a_tenth_of_its_cores() -> None:
    quiet = HostLoad(10.0, 10.0, 2, None, None, (), 0.1, 0.0, 0, None, None, None)
    with patch.dict("os.environ", {"CONVOY_SHARED": ""}):
        assert not quiet.is_disturbed
        assert replace(quiet, others_cores=0.5).is_disturbed
        assert not replace(quiet, others_cores=None).is_disturbed
        assert not replace(quiet, wall_s=0.1, others_cores=0.5).is_disturbed  # the counters are not as exact
