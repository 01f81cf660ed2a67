"""The network as boxes on a grid, and the times on the axis of an update."""

import pytest
import torch
from torch import Tensor, nn

from convoy.models import create
from convoy.planner import Planned, score, workload_of
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.link import Assumed, Rate
from convoy.planner.cost.times import Times
from convoy.planner.verdict import explained
from convoy.plans.plan import Plan
from convoy.report.network_drawing import MOST_LANES, Grid, grid_of, name_in, shown_height
from convoy.report.plan_page import plan_page
from convoy.report.timeline_drawing import short, ticks


def grid(model: nn.Module, *shape: int) -> Grid:
    return grid_of(workload_of(model, torch.empty(1, *shape), 4).graph)


def names(found: Grid) -> list[str]:
    return [box.calls[0].layer for box in found.boxes]


def apart(found: Grid) -> bool:
    """No two boxes in one place, and no edge passes through a box."""
    places = {(box.depth, box.lane) for box in found.boxes}
    passed = {
        (depth, edge.lane)
        for edge in found.edges
        for depth in range(found.boxes[edge.source].depth + 1, found.boxes[edge.target].depth)
    }
    return len(places) == len(found.boxes) and not places & passed


def test_what_follows_a_layer_joins_its_box() -> None:
    found = grid(create("lenet"), 1, 28, 28)
    assert names(found) == [
        "features.0", "features.2", "features.3", "features.5", "classifier.0", "classifier.2", "classifier.4"
    ]  # fmt: skip
    assert [box.depth for box in found.boxes] == list(range(7))
    assert {box.lane for box in found.boxes} == {0}


def test_no_box_is_in_two_stages() -> None:
    graph = workload_of(create("lenet"), torch.empty(1, 1, 28, 28), 4).graph
    stages = tuple(int(call.layer not in ("features.0", "features.1")) for call in graph.calls)
    whole, cut = grid_of(graph), grid_of(graph, stages)
    assert [box.stage for box in cut.boxes] == sorted(box.stage for box in cut.boxes)
    assert {box.stage for box in whole.boxes} == {0}
    relu = tuple(int(place > 0) for place in range(len(graph.calls)))  # cut off from the convolution before it
    assert [call.layer for call in whole.boxes[0].calls] == ["features.0", "features.1"]
    assert [call.layer for call in grid_of(graph, relu).boxes[0].calls] == ["features.0"]


def staged_page(plan: str) -> str:
    costs = Costs(
        lambda one: Times(one.flops.forward / 1e10, one.flops.backward / 1e10), Assumed(Rate(0.0, 1e9)).links()
    )
    workload = workload_of(create("lenet"), torch.empty(1, 1, 28, 28), 32, name="lenet")
    serial, scored = (score(workload, Plan.parse(text), costs) for text in ("serial", plan))
    planned = Planned(workload, scored.plan.mesh.num_devices, (scored,), serial, None, costs)
    return plan_page(explained(planned))


def test_the_page_shows_stages_and_what_crosses_cuts() -> None:
    page = staged_page("stage=2,sample=2")
    assert '<h2 id="stages">Stages</h2>' in page
    assert "rank 0, stage 1" in page and "rank 2, stage 2" in page
    assert "<title>stage 1 to stage 2: " in page
    assert page.count('class="edge cut"') == page.count('class="crossing"') == 1
    assert "chip stage" in page and "chip replicate" not in page
    assert "stage: 2 of 2" in page
    plain = staged_page("sample=2")
    for words in ('id="stages"', "chip stage", "edge cut", ", stage 1"):
        assert words not in plain.split("</style>")[-1]


def test_branches_stand_side_by_side() -> None:
    found = grid(create("googlenet-cifar"), 3, 32, 32)
    first = [box for box in found.boxes if "inception3a" in box.calls[0].layer and box.depth == 3]
    assert sorted(box.lane for box in first) == [0, 1, 2, 3]
    assert apart(found)
    assert found.omitted == 0


def test_a_skip_passes_beside_what_it_skips() -> None:
    found = grid(create("resnet18-cifar"), 3, 32, 32)
    assert apart(found)
    skip = next(e for e in found.edges if found.boxes[e.target].depth - found.boxes[e.source].depth == 3)
    assert skip.lane > found.boxes[skip.source].lane


class Dense(nn.Module):
    """Every layer takes all before it."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(2 * (n + 1), 2, 1) for n in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return found[-1]


def test_connections_for_which_there_is_no_room_are_counted() -> None:
    found = grid(Dense(14), 2, 8, 8)
    assert apart(found)
    assert found.num_lanes <= MOST_LANES
    wanted = sum(len(box.before) for box in found.boxes)
    assert found.omitted == wanted - len(found.edges) > 0


@pytest.mark.parametrize("total", [3e-6, 8.6e-3, 0.0127, 1.0, 3.26, 47.0])
def test_few_round_times(total: float) -> None:
    found = ticks(total)
    assert found[0] == 0
    assert 4 <= len(found) <= 10
    assert found[-1] <= total * 1.001


def test_a_long_drawing_ends_between_two_rows() -> None:
    assert shown_height([10, 86, 162, 212]) is None
    tops = list(range(10, 2000, 76))
    shown = shown_height(tops)
    assert shown is not None
    visible = shown - 12
    assert not any(top < visible < top + 50 for top in tops)


def test_names_end_with_what_says_most() -> None:
    assert name_in("features.2", "max_pool", 24) == "features.2 · max_pool"
    assert name_in("inception3a.branch2.0.conv", "", 16) == "…branch2.0.conv"[:1] + "a.branch2.0.conv"[-15:]
    assert short(2e-3) == "2 ms"
