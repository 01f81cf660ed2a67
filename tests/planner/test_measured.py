"""What is profiled for which question, and what becomes of a profiling that fails on one rank."""

import math
import resource
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from convoy.comm.groups import _end as end
from convoy.comm.memory import NEEDS_LESS
from convoy.comm.ranks import Ranks
from convoy.engine.allocation import keep_freed_memory
from convoy.engine.profiling import OUTSIDE, CallTimes, Profile, Profiler
from convoy.errors import ConvoyError
from convoy.models import create
from convoy.planner import Workload, make_plan, workload_of
from convoy.planner.cost.calibrated import Calibrated
from convoy.planner.cost.link import Links, links_named
from convoy.planner.cost.local_op import VIEWS
from convoy.planner.cost.prediction import Scored
from convoy.planner.cost.program import program
from convoy.planner.cost.store import ProfileStore
from convoy.planner.measured import Measurements, jobs_for
from convoy.planner.profiling import profile
from convoy.planner.text import explanation_text
from convoy.planner.verdict import explained
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from convoy.plans.timeline import Span
from convoy.training import load_recipe
from convoy.training.workloads import workload_in_passes
from ranks import run_ranks

IMAGES = torch.zeros(2, 1, 28, 28)
MESH = Mesh(("gpu",), (2,))


def lenet(batch: int = 8) -> Workload:
    torch.manual_seed(0)
    return workload_of(create("lenet"), IMAGES, batch, name="lenet")


def planned_with_a_failure(error: Exception, rank: int, passes: int) -> tuple[str, list[str], list[str], str]:
    """Plan while profiling runs by channels fail on one rank, after some passes."""
    ranks, run = Ranks.here(), Profiler._pass
    said: list[str] = []

    def failing(profiler: Profiler) -> object:
        profiler.ran = getattr(profiler, "ran", 0) + 1  # type: ignore[attr-defined]
        channel = said and said[-1].startswith("profiling channel")
        if channel and ranks.rank == rank and profiler.ran > passes:  # type: ignore[attr-defined]
            raise error
        return run(profiler)

    with patch.object(Profiler, "_pass", failing):
        try:
            found = make_plan(lenet(), 2, ranks, progress=lambda what, *_: said.append(what.partition(": ")[2]))
        except ConvoyError as failure:
            return "", [], [], str(failure)
    return str(found.best.plan), list(found.notes), [one for one in said if "pass" not in one], ""


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "passes"), [(1, 0), (0, 1)])
def test_profiling_without_memory_on_one_rank_is_left_out(rank: int, passes: int) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB")
    first, second = run_ranks(planned_with_a_failure, 2, error, rank, passes)
    assert first[0] == second[0] != ""
    for _, notes, said, _ in (first, second):
        (note,) = [note for note in notes if "memory" in note]
        assert note.startswith(f"rank {rank} ran out of memory while profiling channel")
        assert f": it asked for 1 EiB; {NEEDS_LESS}: its layers are predicted" in note
        assert said.index("profiling channel") < said.index("searching")


def asked_first(raises: bool) -> tuple[int, int, bool]:
    """How many profilings with others began, how many had been tried out alone, and whether a note says what failed."""
    ranks, run = Ranks.here(), Profiler.run
    began: list[object] = []
    tried: list[object] = []

    def trying_out(profiler: Profiler) -> None:
        tried.append(profiler)
        if ranks.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def running(profiler: Profiler, *args: object) -> Profile:
        began.append(profiler)
        return run(profiler, *args)  # type: ignore[arg-type]

    with (
        patch("convoy.planner.profiling.raises_out_of_memory", lambda device: raises),
        patch.object(Profiler, "try_out", trying_out),
        patch.object(Profiler, "run", running),
    ):
        found = make_plan(lenet(), 2, ranks, plans=[Plan.parse("sample=2")])
    alone = 1 if ranks.rank == 0 else 0  # one device by itself
    return len(began) - alone, len(tried), any("ran out of memory" in note for note in found.notes)


@pytest.mark.slow
def test_where_memory_lacks_that_is_known_before_ranks_wait_for_each_other() -> None:
    for began, tried, noted in run_ranks(asked_first, 2, True):
        assert (tried, noted) == (1, True)
        assert began == 2  # the chains that the engine is measured with, each rank by itself
    assert run_ranks(asked_first, 2, False) == [(3, 0, False)] * 2


def resident_when_profiled(num_bytes: int) -> tuple[float, float]:
    """Bytes that the process has before it plans, after so many were freed, and when it begins to profile."""

    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    keep_freed_memory(torch.device("cpu"))
    blocks = [torch.ones(2**18) for _ in range(num_bytes // 2**20)]
    del blocks
    found = [resident()]
    make_plan(lenet(), 1, Ranks(), progress=lambda what, done, total: found.append(resident()))
    return found[0], found[1]


@pytest.mark.slow
def test_what_was_used_before_is_given_back_to_begin_with() -> None:
    ((before, after),) = run_ranks(resident_when_profiled, 1, 2**28)
    assert before - after > 2**27


def test_a_gpu_gives_back_what_its_cache_holds() -> None:
    gpu = SimpleNamespace(_workload=SimpleNamespace(device=torch.device("cuda")))
    with patch.object(torch.cuda, "empty_cache") as emptied:
        Measurements.give_back_memory(gpu)  # type: ignore[arg-type]
    emptied.assert_called_once_with()


@pytest.mark.slow
def test_any_other_failure_of_one_rank_is_one_sentence_of_all() -> None:
    for _, _, _, failure in run_ranks(planned_with_a_failure, 2, ValueError("odd shape"), 1, 1):
        assert failure == "rank 1 failed while profiling channel (ValueError: odd shape): -v shows where"


def groups_made(reused: bool) -> tuple[list[int], int]:
    """Ranks of each group that is made while plans are profiled together, and how many are left afterwards."""
    made: list[int] = []
    make = torch.distributed.new_group

    def counted(ranks: Sequence[int] | None = None, **options: object) -> object:
        made.extend([len(ranks)] if ranks else [])
        return make(ranks, **options)  # type: ignore[arg-type]

    known = torch.distributed.distributed_c10d._world.pg_map
    ranks = Ranks.here()
    before = len(known)
    with patch.object(torch.distributed, "new_group", counted), ExitStack() as stack:
        if not reused:
            stack.enter_context(patch("convoy.comm.groups._end", lambda group, keep: end(group, False)))
        make_plan(lenet(), 2, ranks, plans=[Plan.parse("sample=2"), Plan.parse("filter=2"), Plan.parse("height=2")])
    return made, len(known) - before


@pytest.mark.parametrize(("reused", "times"), [(True, 1), (False, 6)])
def test_plans_are_profiled_in_the_same_groups(reused: bool, times: int) -> None:
    """Links are measured in them too; otherwise each profiling would connect anew."""
    for made, left in run_ranks(groups_made, 2, reused):
        assert (made, left) == ([2] * times, 0)


def test_links_without_memory_on_one_rank_end_all_of_them() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")
    for failure in run_ranks(links_that_fail, 2, error):
        assert failure == f"rank 1 ran out of memory while measuring the links; {NEEDS_LESS}"


def links_that_fail(error: Exception) -> str:
    ranks = Ranks.here()
    with patch("convoy.planner.link_probe._overhead", side_effect=error if ranks.rank == 1 else lambda *of: 0.0):
        try:
            make_plan(lenet(), 2, ranks)
        except ConvoyError as failure:
            return str(failure)
    return ""


def test_only_what_given_plans_need_is_profiled() -> None:
    workload = lenet()
    assert [job.name for job in jobs_for(workload, [MESH])] == ["serial, one device", "sample", "filter", "channel"]
    plans = [Plan.parse("sample=2"), Plan.parse("filter=2")]
    given = jobs_for(workload, [MESH], plans)
    assert [(job.name, job.alone) for job in given] == [
        ("serial, one device", True),
        ("sample=2", False),
        ("filter=2", False),
    ]
    assert [job.placement.calls for job in given[1:]] == [workload.place(plan).calls for plan in plans]


def profilings(patience_s: float, unmeasured: float) -> list[str]:
    """What a search profiles that may take so long, if `unmeasured` of a plan's computing time need not be measured."""
    said: list[str] = []
    with (
        patch("convoy.planner.planner._PATIENCE_S", patience_s),
        patch("convoy.planner.planner._PATIENCE_UPDATES", 0),
        patch("convoy.planner.planner._SETTLED", unmeasured),
    ):
        make_plan(lenet(), 2, Ranks(), link="pcie4", fixes=["*=height"], progress=lambda what, *_: said.append(what))
    said = [what.partition(": ")[2] for what in said]
    names = [one.removeprefix("profiling ") for one in said if one.startswith("profiling ") and ", pass" not in one]
    return [name.removesuffix(", one device") for name in names]


@pytest.mark.slow
def test_the_plan_that_a_search_proposes_is_profiled_while_there_is_time() -> None:
    begin = ["serial", "sample", "filter", "channel"]
    assert profilings(math.inf, 0.0) == [*begin, "height=2"]
    assert profilings(math.inf, 1.0) == begin
    assert profilings(0.0, 0.0) == begin[:2]


@pytest.mark.slow
def test_every_pass_of_profiling_is_told() -> None:
    said: list[tuple[str, int, int]] = []
    make_plan(lenet(), 1, Ranks(), progress=lambda *each: said.append(each))
    *during, (_, end, total) = said
    assert end == total and {each[2] for each in said} == {total}  # the total does not move
    assert all(what.startswith(f"planning, about {total} s: ") and done < total for what, done, _ in during)
    assert any(what.endswith("profiling serial, one device, pass 1") for what, *_ in during)
    assert any(what.endswith("profiling serial, one device, pass 3") for what, *_ in during)


def recipes(devices: int, merge: int, batch: int = 64, shares: tuple[float, ...] | None = None) -> Workload:
    settings = ["model.name=lenet", "data.path=mnist-mini", f"batch={batch}", "microbatch=8"]
    settings += [f"parallel.shares={list(shares)}", f"parallel.devices={devices}"] if shares is not None else []
    recipe = load_recipe("default", settings, [])
    torch.manual_seed(0)
    sizes = (8,) * (batch // 8)
    return workload_in_passes(recipe, create("lenet"), (1, 28, 28), sizes, merge, devices, torch.device("cpu"))


@pytest.mark.parametrize(
    ("devices", "merge", "together", "alone"),
    [(4, 1, (2, 32), (8, 8)), (2, 2, (2, 32), (4, 16)), (4, 2, (1, 64), (4, 16)), (2, 8, (1, 64), (1, 64))],
)
def test_one_device_makes_passes_of_its_own(
    devices: int, merge: int, together: tuple[int, int], alone: tuple[int, int]
) -> None:
    workload = recipes(devices, merge)
    one = workload.alone or workload
    assert (workload.passes, workload.samples) == together
    assert (one.passes, one.samples) == alone
    assert one.microbatch == 8
    (first, *others) = jobs_for(workload, [Mesh(("gpu",), (devices,))])
    assert first.placement.batch.num_samples == alone[1]
    assert all(job.placement.batch.num_samples == together[1] for job in others)


def test_the_reference_of_the_speed_up_is_what_one_device_does() -> None:
    def passes(scored: Scored) -> int:
        first = scored.placement.calls[0].call.name
        spans = [span for span in scored.timeline.spans if span.task.rank == 0 and span.task.kind == "forward"]
        return sum(span.task.name == first for span in spans)

    links, _ = links_named("pcie4", True)
    found = make_plan(recipes(2, 1), 2, Ranks(), link=links, plans=[Plan.parse("sample=2")])
    assert (passes(found.best), passes(found.serial)) == (4, 8)
    assert found.serial.placement.batch.num_samples == 8


def unknown_under_autocast() -> tuple[set[str], set[str]]:
    """The types of pieces of plans that were profiled and not found again, and of what is sent."""
    torch.manual_seed(0)
    workload = workload_of(create("lenet"), IMAGES, 8, precision=torch.bfloat16)
    plans = [Plan.parse("filter=2"), Plan.parse("owt=2")]
    found = make_plan(workload, 2, Ranks.here(), plans=plans)
    assert isinstance(found.costs.times, Calibrated)
    items = [item for one in found.candidates for item in program(one.placement)]
    local_ops = [
        local_op for item in items for local_op in item.local_ops if not local_op.is_empty and local_op.op not in VIEWS
    ]
    moved = {local_op.inputs[0].dtype for local_op in local_ops if local_op.op == "redistribute"}
    return {local_op.inputs[0].dtype for local_op in local_ops if local_op not in found.costs.times.measured}, moved


@pytest.mark.slow
def test_what_is_profiled_under_autocast_is_what_is_predicted() -> None:
    for unknown, moved in run_ranks(unknown_under_autocast, 2):
        assert unknown <= {"float32"}  # images, of which the engine makes bfloat16 before it sends them
        assert moved == {"float32", "bfloat16"}


def unequal(folder: str, slower: float, shares: tuple[float, ...] | None) -> dict[str, object]:
    """A plan for two devices of which the second takes `slower` times as long, and what a second plan knows of that."""
    ranks, store = Ranks.here(), ProfileStore(Path(folder))
    run = Profiler.run

    def taking(profiler: Profiler, *args: object) -> Profile:
        found = run(profiler, *args)  # type: ignore[arg-type]
        seconds = 1e-3 * (slower if ranks.rank else 1.0)
        calls = {name: CallTimes(seconds, seconds) for name in found.calls}
        return replace(found, calls=calls, seconds=seconds, slowest=seconds)

    plans = [Plan.parse("sample=2")]
    with patch.object(Profiler, "run", taking):
        found = make_plan(recipes(2, 1, shares=shares), 2, ranks, store=store, plans=plans)
    again = make_plan(recipes(2, 1, shares=shares), 2, ranks, store=store, plans=plans)
    computing = [
        sum(span.end - span.start for span in found.best.timeline.spans if span.task.rank == rank and of(span))
        for rank in (0, 1)
    ]
    return {
        "pace": found.costs.slowdowns,
        "again": again.costs.slowdowns,
        "shares": found.shares(found.best.plan),
        "passes": found.workload.passes,
        "parts": [len(part) for part in found.best.placement.batch.parts],
        "computing": computing,
        "notes": [note for note in found.notes if "fast" in note],
        "text": explanation_text(explained(found)),
    }


def of(span: Span) -> bool:
    return span.task.stream == "compute" and span.task.kind in ("forward", "backward")


def profiled_with(batch: int, own: tuple[float, float], slowest: float) -> set[float]:
    """Seconds of operations that take 1 s, where the passes of both ranks and of the slowest of each pass take so."""
    ranks, found = Ranks.here(), lenet(batch)
    second = CallTimes(0.5, 0.5)

    def run(profiler: Profiler, *args: object) -> Profile:
        names = [OUTSIDE, *(call.name for call in found.graph.calls)]
        return Profile(dict.fromkeys(names, second), [], own[ranks.rank], slowest)

    with patch.object(Profiler, "run", run):
        profiled = profile(found, found.place(Plan.parse("sample=2")), ranks, False, Links(), together=True)
    return {round(times.total, 6) for times in profiled.times.values()}


def test_waiting_for_the_slower_rank_counts_and_uneven_work_does_not() -> None:
    cases: list[tuple[int, tuple[float, float], float, float]] = [
        (4, (1.0, 1.0), 1.0, 1.0),
        (4, (1.0, 1.0), 1.1, 1.1),  # now one rank is slower, and now the other
        (3, (2.0, 1.0), 2.0, 1.0),  # the first has two samples, and the second one
        (3, (2.0, 1.0), 2.2, 1.1),
    ]
    for batch, own, slowest, expected in cases:
        for found in run_ranks(profiled_with, 2, batch, own, slowest):
            assert found == {expected}


@pytest.mark.slow
def test_devices_that_are_not_equally_fast_get_shares_by_their_speed(tmp_path: Path) -> None:
    first, second = run_ranks(unequal, 2, str(tmp_path), 3.0, None)
    assert first == second
    assert first["pace"] == first["again"] == pytest.approx((0.5, 1.5))
    assert first["shares"] == (6, 2)  # 6 microbatches take the first what 2 take the second
    assert (first["passes"], first["parts"]) == (6, [8, 3])
    assert first["notes"] == [
        "the devices are not equally fast: the same takes them 1.00 : 3.00; "
        "plans that divide samples over all of them do so as --shares 6,2"
    ]
    assert "with --shares 6,2" in first["text"]


@pytest.mark.slow
def test_shares_that_are_asked_for_are_predicted(tmp_path: Path) -> None:
    for found in run_ranks(unequal, 2, str(tmp_path), 3.0, (1.0, 1.0)):
        assert (found["shares"], found["passes"], found["parts"]) == ((4, 4), 4, [8, 8])
        fast, slow = found["computing"]
        assert slow == pytest.approx(3 * fast)
    for found in run_ranks(unequal, 2, str(tmp_path / "equal"), 1.0, (3.0, 1.0)):
        assert (found["pace"], found["shares"], found["parts"]) == ((), (6, 2), [8, 3])


@pytest.mark.slow
def test_devices_that_are_about_equal_share_evenly(tmp_path: Path) -> None:
    for found in run_ranks(unequal, 2, str(tmp_path), 1.05, None):
        assert (found["pace"], found["shares"], found["passes"]) == ((), None, 4)
        assert found["notes"] == []


def test_parts_by_shares() -> None:
    even = recipes(3, 1)
    assert even.by_speed is not None
    found = even.by_speed([1.0, 1.0, 1.4])
    assert (found.shares, found.passes, found.samples) == ((3, 3, 2), 3, 22)
    assert found.parts(3) == (range(8), range(8, 16), range(16, 22))
    assert found.parts(2) == (range(16), range(16, 22))  # another number of parts is as even as can be
    assert even.by_speed([]).shares is None
    asked = recipes(3, 1, shares=(2.0, 1.0, 1.0)).by_speed
    assert asked is not None
    bound = asked([])
    assert (bound.shares, bound.parts(1)) == ((4, 2, 2), (range(16),))
    with pytest.raises(ConvoyError, match="shares are those of 3 parts of the batch, but the plan divides it into 2"):
        bound.parts(2)
