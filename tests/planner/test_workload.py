"""What is planned is what is trained: samples of a pass, whole microbatches, the network as it is."""

import copy

import pytest
import torch
from torch import nn

from convoy.errors import ConvoyError
from convoy.planner import workload_of
from convoy.planner.measured import plans_to_profile
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from small_nets import SMALL_NETS

IMAGES = torch.zeros(2, 3, 16, 16)


def net() -> nn.Module:
    torch.manual_seed(0)
    return SMALL_NETS["depthwise"]()


def test_the_network_is_left_alone() -> None:
    model = net().eval()
    before = copy.deepcopy(model.state_dict())
    workload_of(model, IMAGES, 8)
    assert not model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_pass_has_its_part_of_the_batch() -> None:
    found = workload_of(net(), IMAGES, 64, passes=4)
    assert found.samples == 16
    assert found.parts(3) == (range(6), range(6, 11), range(11, 16))


def test_microbatches_stay_whole() -> None:
    found = workload_of(net(), IMAGES, 20, microbatch=8)
    assert found.sizes == (8, 8, 4)
    assert found.parts(2) == (range(16), range(16, 20))
    with pytest.raises(ConvoyError, match="4 ranks cannot share 3 microbatches"):
        found.parts(4)


def test_too_many_ranks_for_the_samples() -> None:
    with pytest.raises(ConvoyError, match="16 ranks cannot share 8 samples"):
        workload_of(net(), IMAGES, 8).place(Plan.parse("sample=16"))


@pytest.mark.parametrize("batch", [0, -3])
def test_a_batch_must_have_samples(batch: int) -> None:
    with pytest.raises(ConvoyError, match="must be at least 1"):
        workload_of(net(), IMAGES, batch)


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


def test_a_network_that_is_no_graph_is_refused_with_a_way_out() -> None:
    with pytest.raises(ConvoyError, match=r"needs the network as one graph, but .*: write a plan yourself"):
        workload_of(Branching(), IMAGES, 8)


def test_profiled_placements_show_the_strategies_that_the_others_are_predicted_from() -> None:
    mesh = Mesh(("gpu",), (2,))
    found = dict(plans_to_profile(workload_of(net(), IMAGES, 8), mesh))
    assert list(found) == ["sample", "filter", "channel"]
    assert all(plan.mesh.sizes == mesh.sizes for plan in found.values())
