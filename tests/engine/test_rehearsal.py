"""A rehearsal computes what the rank would compute, call by call, without the others."""

import pytest
import torch

from convoy.engine.groups import Groups
from convoy.engine.link_probe import measure_links
from convoy.engine.rehearsal import OUTSIDE, Rehearsal
from convoy.planning import Workload, workload_of
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from ranks import run_ranks
from small_nets import SMALL_NETS

IMAGES = torch.zeros(8, 3, 16, 16)


def workload(name: str, **options: object) -> Workload:
    torch.manual_seed(0)
    return workload_of(SMALL_NETS[name](), IMAGES, 8, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(SMALL_NETS))
@pytest.mark.parametrize("plan", ["serial", "sample=2", "filter=2", "height=2", "sample=2,filter=2"])
def test_every_call_takes_some_time_on_every_rank(name: str, plan: str) -> None:
    placement = workload(name).place(Plan.parse(plan))
    for rank in range(placement.mesh.num_devices):
        times = Rehearsal(placement, rank, torch.device("cpu")).run(passes=1, warm_up=0)
        assert set(times) == {OUTSIDE, *(placed.call.name for placed in placement.calls)}
        convolutions = [placed.call.name for placed in placement.calls if placed.call.op in ("conv", "linear")]
        assert all(times[call].forward > 0 and times[call].backward > 0 for call in convolutions)


@pytest.mark.parametrize("batch_norm", ["sync", "microbatch", "local"])
def test_batch_norm_in_every_mode(batch_norm: str) -> None:
    found = workload("shuffle", batch_norm=batch_norm, microbatch=2)
    rehearsal = Rehearsal(
        found.place(Plan.parse("sample=2")),
        1,
        torch.device("cpu"),
        channels_last=True,
        batch_norm=batch_norm,
        microbatches=found.sizes,
    )
    first, second = (rehearsal.run(passes=1, warm_up=0) for _ in range(2))
    assert set(first) == set(second)


def test_images_are_arranged_as_in_training() -> None:
    placement = workload("depthwise").place(Plan.parse("filter=2"))
    rehearsal = Rehearsal(placement, 0, torch.device("cpu"), channels_last=True)
    images = [t for t in rehearsal._tensors if t.dim() == 4]
    assert images
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in images)


def test_it_waits_before_every_pass() -> None:
    waited: list[int] = []
    placement = workload("depthwise").place(Plan.parse("serial"))
    Rehearsal(placement, 0, torch.device("cpu")).run(passes=2, warm_up=1, ready=lambda: waited.append(1))
    assert len(waited) == 3


def links() -> dict[tuple[int, ...], tuple[int, int, bool]]:
    groups = Groups(Mesh(("node", "gpu"), (2, 2)))
    found = measure_links(groups, [(0,), (1,), (0, 1)], sizes=(0, 4096), repetitions=2)
    return {axes: (times.all_reduce[1][0], times.exchange[1][0], times.overlap) for axes, times in found.items()}


def test_links_of_all_groups_of_a_mesh() -> None:
    for found in run_ranks(links, 4):
        assert set(found) == {(0,), (1,), (0, 1)}
        assert found[0,][:2] == (4096, 4096)
        assert found[0, 1][0] == 4096
        assert found[0, 1][1] >= 4096
        assert not found[0, 1][2]  # shared memory: nothing runs beside
