"""The page of a plan: the network as boxes on a grid, the times on the axis of an update, and its stages."""

import torch
from torch import Tensor, nn

from convoy.models import create
from convoy.planner import Planned, score, workload_of
from convoy.planner.cost.costs import Costs, Times
from convoy.planner.cost.link import Assumed, Rate
from convoy.planner.verdict import Explained
from convoy.plans.plan import Plan
from convoy.report.network_drawing import MOST_LANES, Grid, grid_of, name_in, shown_height
from convoy.report.plan_page import plan_page, short, ticks


class Dense(nn.Module):
    """Every layer takes all before it."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(2 * (n + 1), 2, 1) for n in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer in self.layers:
            values.append(layer(torch.cat(values, 1)))
        return values[-1]


def grid(model: nn.Module, *shape: int) -> Grid:
    """The drawing of a network: no two boxes in one place, and no edge passes through a box."""
    drawing = grid_of(workload_of(model, torch.empty(1, *shape), 4).graph)
    places = {(box.depth, box.lane) for box in drawing.boxes}
    assert len(places) == len(drawing.boxes)
    for edge in drawing.edges:
        between = range(drawing.boxes[edge.source].depth + 1, drawing.boxes[edge.target].depth)
        assert not places & {(depth, edge.lane) for depth in between}
    return drawing


def test_what_follows_a_layer_joins_its_box_unless_a_cut_is_between() -> None:
    graph = workload_of(create("lenet"), torch.empty(1, 1, 28, 28), 4).graph
    whole = grid(create("lenet"), 1, 28, 28)
    layers = "features.0 features.2 features.3 features.5 classifier.0 classifier.2 classifier.4"
    assert [box.calls[0].layer for box in whole.boxes] == layers.split()
    assert [(box.depth, box.lane, box.stage) for box in whole.boxes] == [(depth, 0, 0) for depth in range(7)]

    relu = grid_of(graph, tuple(int(place > 0) for place in range(len(graph.calls)))).boxes
    assert [(box.stage, box.calls[0].layer) for box in relu[:2]] == [(0, "features.0"), (1, "features.1")]


def test_branches_stand_side_by_side_and_skips_pass_beside() -> None:
    inception = grid(create("googlenet-cifar"), 3, 32, 32)
    first = [box for box in inception.boxes if "inception3a" in box.calls[0].layer and box.depth == 3]
    assert sorted(box.lane for box in first) == [0, 1, 2, 3] and inception.omitted == 0
    residual = grid(create("resnet18-cifar"), 3, 32, 32)
    depth = [box.depth for box in residual.boxes]
    skip = next(edge for edge in residual.edges if depth[edge.target] - depth[edge.source] == 3)
    assert skip.lane > residual.boxes[skip.source].lane
    dense = grid(Dense(14), 2, 8, 8)  # for all of its connections there is no room
    assert dense.num_lanes <= MOST_LANES
    assert dense.omitted == sum(len(box.before) for box in dense.boxes) - len(dense.edges) > 0


def page_of(plan: str) -> str:
    links = Assumed(Rate(0.0, 1e9)).links()
    costs = Costs(lambda call: Times(call.flops.forward / 1e10, call.flops.backward / 1e10), links)
    workload = workload_of(create("lenet"), torch.empty(1, 1, 28, 28), 32, name="lenet")
    serial, scored = (score(workload, Plan.parse(text), costs) for text in ("serial", plan))
    return plan_page(Explained(Planned(workload, scored.plan.mesh.num_devices, (scored,), serial, None, costs)))


def test_the_page_shows_stages_and_what_crosses_cuts() -> None:
    page = page_of("stage=2,sample=2")
    for part in (
        '<h2 id="stages">Stages</h2>', "rank 0, stage 1", "rank 2, stage 2", "<title>stage 1 to stage 2: ",
        "chip stage", "stage: 2 of 2",
    ):  # fmt: skip
        assert part in page
    assert page.count('class="edge cut"') == page.count('class="crossing"') == 1 and "chip replicate" not in page
    plain = page_of("sample=2").split("</style>")[-1]
    assert not any(part in plain for part in ('id="stages"', "chip stage", "edge cut", ", stage 1"))


def test_few_round_times_whole_rows_and_the_end_of_names() -> None:
    for total in (3e-6, 0.0127, 3.26, 47.0):
        times = ticks(total)
        assert times[0] == 0 and 4 <= len(times) <= 10 and times[-1] <= total * 1.001
    assert shown_height([10, 86, 162, 212]) is None
    tops = list(range(10, 2000, 76))
    shown = shown_height(tops)
    assert shown is not None and not any(top < shown - 12 < top + 50 for top in tops)  # between two rows
    assert name_in("features.2", "max_pool", 24) == "features.2 · max_pool"
    assert name_in("inception3a.branch2.0.conv", "", 16) == "….branch2.0.conv"
    assert short(2e-3) == "2 ms"
