"""Which plans a network and its devices can have, and how a plan is fitted to others."""

from typing import Any

import pytest
from torch import nn

from convoy.errors import ConvoyError
from convoy.plans.fit import check_devices, fit
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from plans.made_graph import chain, placed, small_net

TWO_AXES = {"mesh": {"node": 2, "gpu": 5}, "layers": {"*": {"node": "filter", "gpu": "filter"}}}


def grouped(channels: int, groups: int) -> Any:
    stem, block = nn.Conv2d(4, channels, 3), nn.Conv2d(channels, channels, 3, groups=groups)
    return chain((8, 4, 9, 9), stem=stem, block=block)


def refusal(check: Any, *arguments: Any) -> str:
    with pytest.raises(ConvoyError) as caught:
        check(*arguments)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    return str(caught.value)


def test_what_a_layer_cannot_be_divided_into_is_refused_by_its_name_and_its_axis() -> None:
    for graph, plan, words in (
        (small_net(), "filter=9", "layer 'features.0'|8 output channels|9 ranks of axis filter|at most 8"),
        (small_net(), TWO_AXES, "layer 'features.0'|10 ranks of axes node·gpu|at most 8"),
        (small_net(), "channel=4", "layer 'features.0'|3 input channels|at most 3|replicate on it in a YAML"),
        (grouped(6, 2), "filter=3", "layer 'block'|2 groups|3 ranks of axis filter"),
        (grouped(6, 3), "channel=4", "layer 'block'|3 groups|at most 3"),
    ):
        sentence = refusal(placed, graph, plan)
        assert all(part in sentence for part in words.split("|")), sentence
    for plan in ("filter=8", "channel=3", "height=8", "sample=8", "sample=3,height=5,width=2", "owt=7"):
        placed(small_net(), plan)  # up to that it is divided


FITTED = {  # the plan of more or fewer devices, and how often a layer is divided but by samples, before and after
    ("sample=4", 3): ("sample=3", (1, 1)),
    ("sample=2,filter=4", 6): ("sample=2,filter=3", (4, 3)),
    ("sample=2,height=2,width=2", 6): ("sample=3,height=2,width=1", (4, 2)),
    ("stage=4,filter=2", 4): ("stage=2,filter=2", (8, 4)),
    ("stage=2", 4): ("stage=2,sample=2", (2, 2)),
    ("stage=2", 3): ("stage=3", (2, 3)),
}


def test_samples_take_up_the_difference_where_a_plan_gets_other_devices() -> None:
    for (plan, devices), (text, groups) in FITTED.items():
        fitted, *now = fit(Plan.parse(plan), devices)
        assert (str(fitted), tuple(now), fitted.mesh.num_devices) == (text, groups, devices), plan
    named = {"mesh": {"stage": 2, "sample": 2}, "layers": {"*": {"sample": "sample"}}, "stages": ["layer3"]}
    for devices, mesh, stages in ((6, (2, 3), ["layer3"]), (3, (1, 3), None)):  # as long as their number stays
        again, *_ = fit(Plan.parse(named), devices)
        assert (again.mesh.sizes, again.to_dict().get("stages")) == (mesh, stages)
    rows = {pattern: dict.fromkeys(("sample", "model"), pattern) for pattern in ("sample", "filter")}
    mixed, *_ = fit(Plan(Mesh(("sample", "model"), (2, 2)), rows), 8)  # no axis divides samples alone
    assert mixed.mesh == Mesh(("sample2", "sample", "model"), (2, 2, 2))
    assert mixed.strategy("filter", "linear") == ("sample", "filter", "filter")
    words = "sample=2 × filter=3 needs 6 devices, but there are 4: "
    assert words in refusal(check_devices, Mesh(("sample", "filter"), (2, 3)), 4)
