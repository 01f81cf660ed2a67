"""Profiling computes what the rank would compute, call by call, without the others."""

import pytest
import torch

from convoy.comm.groups import Groups
from convoy.engine.fake_inputs import tiled
from convoy.engine.profiling import OUTSIDE, Profiler
from convoy.planner import Workload, workload_of
from convoy.planner.link_probe import measure_links
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from ranks import run_ranks
from small_nets import SMALL_NETS

IMAGES = torch.zeros(8, 3, 16, 16)


def workload(name: str, **options: object) -> Workload:
    torch.manual_seed(0)
    images = torch.zeros(8, 3, 32, 32) if name == "root-mean-square" else IMAGES  # it normalizes whole pictures
    return workload_of(SMALL_NETS[name](), images, 8, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(SMALL_NETS))
@pytest.mark.parametrize("plan", ["serial", "sample=2", "filter=2", "height=2", "sample=2,filter=2"])
def test_every_call_takes_some_time_on_every_rank(name: str, plan: str) -> None:
    placement = workload(name).place(Plan.parse(plan))
    for rank in range(placement.mesh.num_devices):
        times = Profiler(placement, rank, torch.device("cpu")).run(enough=1).calls
        assert set(times) == {OUTSIDE, *(placed.call.name for placed in placement.calls)}
        convolutions = [placed.call.name for placed in placement.calls if placed.call.op in ("conv", "linear")]
        assert all(times[call].forward > 0 and times[call].backward > 0 for call in convolutions)


@pytest.mark.parametrize("batch_norm", ["sync", "microbatch", "local"])
def test_batch_norm_in_every_mode(batch_norm: str) -> None:
    found = workload("shuffle", batch_norm=batch_norm, microbatch=2)
    profiler = Profiler(
        found.place(Plan.parse("sample=2")),
        1,
        torch.device("cpu"),
        channels_last=True,
        batch_norm=batch_norm,
        microbatches=found.sizes,
    )
    first, second = (profiler.run(enough=1).calls for _ in range(2))
    assert set(first) == set(second)


def test_images_are_arranged_as_in_training() -> None:
    placement = workload("depthwise").place(Plan.parse("filter=2"))
    profiler = Profiler(placement, 0, torch.device("cpu"), channels_last=True)
    images = [t for t in profiler._tensors if t.dim() == 4 and not t.requires_grad]
    assert len(images) == 1
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in images)


def test_what_is_at_hand_is_used() -> None:
    torch.manual_seed(0)
    model = SMALL_NETS["depthwise"]()
    found = workload_of(model, torch.randn(1, 3, 16, 16), 8)
    placement = found.place(Plan.parse("filter=2"))
    profiler = Profiler(placement, 1, torch.device("cpu"), contents=found.contents)
    parts = dict(zip(profiler._program.sources, profiler._tensors, strict=True))
    weights = {name: tensor for name, tensor in parts.items() if tensor.dim() == 4 and tensor.requires_grad}
    assert weights
    whole = dict(model.named_parameters())
    for name, tensor in weights.items():
        assert torch.equal(tensor, whole[name][-len(tensor) :])  # the second half of the filters
        tensor.data.zero_()  # and never the network's own
        assert whole[name].any()
    images = parts[found.graph.inputs[0]]
    assert torch.equal(images[0], images[-1])
    assert len(images) == 8


def test_a_stand_in_resembles_what_comes_in() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert tiled(x, (2, 3)) is x
    assert tiled(x, (4, 2)).tolist() == [[0, 1], [3, 4], [0, 1], [3, 4]]
    assert tiled(x[:0], (2, 3)).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_it_ends_when_all_agree() -> None:
    said: list[bool] = []

    def agree(done: bool) -> bool:
        said.append(done)
        return len(said) == 5

    placement = workload("depthwise").place(Plan.parse("serial"))
    Profiler(placement, 0, torch.device("cpu")).run(agree, enough=1)
    assert len(said) == 5
    assert said[0]


def links() -> dict[tuple[int, ...], tuple[int, int, bool]]:
    groups = Groups(Mesh(("node", "gpu"), (2, 2)))
    found = measure_links(groups, [(0,), (1,), (0, 1)], torch.device("cpu"), sizes=(0, 4096))
    return {axes: (times.all_reduce[1][0], times.exchange[1][0], times.overlap) for axes, times in found.items()}


def test_links_of_all_groups_of_a_mesh() -> None:
    for found in run_ranks(links, 4):
        assert set(found) == {(0,), (1,), (0, 1)}
        assert found[0,][:2] == (4096, 4096)
        assert found[0, 1][0] == 4096
        assert found[0, 1][1] >= 4096
        assert not found[0, 1][2]  # shared memory: nothing runs beside
