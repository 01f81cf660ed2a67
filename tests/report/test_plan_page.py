"""The page of a plan: the network as boxes on a grid, the times on the axis of an update, and its stages."""

import re
from dataclasses import replace

import torch
from torch import nn

from convoy.hardware.catalog import Hop
from convoy.models import create
from convoy.planner.cost.costs import Costs, Times
from convoy.planner.cost.link import assumed
from convoy.planner.explanation import Explanation
from convoy.planner.planner import Planned, score
from convoy.planner.workload import workload_of
from convoy.plans.plan import Plan
from convoy.report.plan_page import plan_page


class Strange(nn.Sequential):
    """Its layers have names that a page must escape."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 26 * 26, 4)
        for name, layer in zip(("<b>bold</b>", "a & b", "'quoted'"), layers, strict=True):
            self.add_module(name, layer)


def page_of(plan: str, network: nn.Module, raced_s: float | None = None) -> str:
    links = assumed(Hop(0.0, 1e9))
    costs = Costs(lambda call: Times(call.flops.forward / 1e10, call.flops.backward / 1e10), links)
    workload = workload_of(network, torch.empty(1, 1, 28, 28), 32, name="<i>net</i>")
    serial, scored = (score(workload, Plan.parse(text), costs) for text in ("serial", plan))
    planned = Planned(workload, scored.plan.mesh.num_devices, (scored,), serial, None, costs)
    measured = {} if raced_s is None else {scored.plan: raced_s}
    return plan_page(Explanation(replace(planned, measured=measured)))


def test_the_page_shows_stages_and_what_crosses_cuts() -> None:
    page = page_of("stage=2,sample=2", create("lenet"))
    for part in (
        '<h2 id="stages">Stages</h2>', "rank 0, stage 1", "rank 2, stage 2", "<title>stage 1 to stage 2: ",
        "chip stage", "stage: 2 of 2",
    ):  # fmt: skip
        assert part in page
    assert page.count('class="edge cut"') == page.count('class="crossing"') == 1 and "chip replicate" not in page
    plain = page_of("sample=2", create("lenet")).split("</style>")[-1]
    assert not any(part in plain for part in ('id="stages"', "chip stage", "edge cut", ", stage 1", "measured"))
    assert page_of("sample=2", create("lenet"), 0.25).count("measured 250 ms") == 1


def test_names_of_strangers_are_text_on_it() -> None:
    page = page_of("sample=2", Strange())
    assert "&lt;b&gt;bold&lt;/b&gt;" in page and "<b>bold</b>" not in page and "<i>net</i>" not in page
    assert re.findall(r'<(?!a )[^>]* (?:src|href)="(?!data:)[^"]*', page) == []
