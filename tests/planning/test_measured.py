"""What is rehearsed for which question, and what becomes of a rehearsal that fails on one rank."""

from unittest.mock import patch

import pytest
import torch

from convoy.engine.rehearsal import Rehearsal
from convoy.errors import ConvoyError
from convoy.models import create
from convoy.planning import Ranks, Workload, make_plan, workload_of
from convoy.planning.link_names import links_named
from convoy.planning.measured import jobs_for
from convoy.planning.planner import Scored
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from convoy.training import load_recipe
from convoy.training.workloads import workload_in_passes
from ranks import run_ranks

IMAGES = torch.zeros(2, 1, 28, 28)
MESH = Mesh(("gpu",), (2,))


def lenet(batch: int = 8) -> Workload:
    torch.manual_seed(0)
    return workload_of(create("lenet"), IMAGES, batch, name="lenet")


def planned_with_a_failure(error: Exception, rank: int, passes: int) -> tuple[str, list[str], list[str], str]:
    """Plan while rehearsals by channels fail on one rank, after some passes."""
    ranks, run = Ranks.here(), Rehearsal._pass
    said: list[str] = []

    def failing(rehearsal: Rehearsal) -> object:
        rehearsal.ran = getattr(rehearsal, "ran", 0) + 1  # type: ignore[attr-defined]
        channel = said and said[-1].startswith("rehearsing channel")
        if channel and ranks.rank == rank and rehearsal.ran > passes:  # type: ignore[attr-defined]
            raise error
        return run(rehearsal)

    with patch.object(Rehearsal, "_pass", failing):
        try:
            found = make_plan(lenet(), 2, ranks, progress=lambda what, done, total: said.append(what))
        except ConvoyError as failure:
            return "", [], [], str(failure)
    return str(found.best.plan), list(found.notes), [one for one in said if "pass" not in one], ""


@pytest.mark.parametrize(("rank", "passes"), [(1, 0), (0, 1)])
def test_a_rehearsal_without_memory_on_one_rank_is_left_out(rank: int, passes: int) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB")
    first, second = run_ranks(planned_with_a_failure, 2, error, rank, passes)
    assert first[0] == second[0] != ""
    for _, notes, said, _ in (first, second):
        (note,) = [note for note in notes if "memory" in note]
        assert note.startswith(f"rank {rank} ran out of memory while rehearsing channel: ")
        assert said.index("rehearsing channel") < said.index("rehearsing height")


def test_any_other_failure_of_one_rank_is_one_sentence_of_all() -> None:
    for _, _, _, failure in run_ranks(planned_with_a_failure, 2, ValueError("odd shape"), 1, 1):
        assert failure == "rank 1 failed while rehearsing channel (ValueError: odd shape): -v shows where"


def test_links_without_memory_on_one_rank_end_all_of_them() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")
    for failure in run_ranks(links_that_fail, 2, error):
        assert failure == "rank 1 ran out of memory while measuring the links"


def links_that_fail(error: Exception) -> str:
    ranks = Ranks.here()
    with patch("convoy.engine.link_probe._overhead", side_effect=error if ranks.rank == 1 else lambda *of: 0.0):
        try:
            make_plan(lenet(), 2, ranks)
        except ConvoyError as failure:
            return str(failure)
    return ""


def test_only_what_given_plans_need_is_rehearsed() -> None:
    workload = lenet()
    assert [job.name for job in jobs_for(workload, [MESH])][:3] == ["serial, one device", "sample", "filter"]
    plans = [Plan.parse("sample=2"), Plan.parse("filter=2")]
    given = jobs_for(workload, [MESH], plans)
    assert [(job.name, job.alone) for job in given] == [
        ("serial, one device", True),
        ("sample=2", False),
        ("filter=2", False),
    ]
    assert [job.placement.calls for job in given[1:]] == [workload.place(plan).calls for plan in plans]


def test_every_pass_of_a_rehearsal_is_told() -> None:
    said: list[tuple[str, int, int]] = []
    make_plan(lenet(), 1, Ranks(), progress=lambda *each: said.append(each))
    assert ("rehearsing serial, one device, pass 1", 0, 1) in said
    assert ("rehearsing serial, one device, pass 3", 0, 1) in said


def recipes(devices: int, merge: int, batch: int = 64) -> Workload:
    recipe = load_recipe("default", ["model.name=lenet", "data.path=mnist-mini", f"batch={batch}", "microbatch=8"], [])
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
    found = make_plan(recipes(2, 1), 2, Ranks(), links=links, plans=[Plan.parse("sample=2")])
    assert (passes(found.best), passes(found.serial)) == (4, 8)
    assert found.serial.placement.batch.num_samples == 8
