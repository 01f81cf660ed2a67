"""The network as boxes on a grid, and the times on the axis of an update."""

import pytest
import torch
from torch import Tensor, nn

from convoy.models import create
from convoy.planner import workload_of
from convoy.report.network_drawing import MOST_LANES, Grid, grid_of, name_in, shown_height
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
