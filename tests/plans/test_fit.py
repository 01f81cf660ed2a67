"""Plans for other numbers of devices."""

import pytest

from convoy.plans.fit import fit
from convoy.plans.plan import Plan


@pytest.mark.parametrize(
    ("plan", "devices", "fitted", "groups"),
    [
        ("sample=4", 3, "sample=3", (1, 1)),
        ("sample=4", 1, "sample=1", (1, 1)),
        ("owt=4", 3, "owt=3", (4, 3)),
        ("sample=4,filter=2", 6, "sample=3,filter=2", (2, 2)),
        ("filter=2,sample=4", 6, "filter=2,sample=3", (2, 2)),
        ("sample=2,filter=4", 6, "sample=2,filter=3", (4, 3)),
        ("sample=2,filter=2", 3, "sample=3,filter=1", (2, 1)),
        ("sample=2,height=2,width=2", 6, "sample=3,height=2,width=1", (4, 2)),
        ("sample=2,sample=3", 4, "sample=4,sample=1", (1, 1)),
        ("sample=2,sample=2", 8, "sample=4,sample=2", (1, 1)),
        ("height=2,width=2", 8, "sample=2,height=2,width=2", (4, 4)),
        ("stage=2,sample=4", 6, "stage=2,sample=3", (2, 2)),
        ("sample=4,stage=2", 2, "sample=1,stage=2", (2, 2)),
        ("stage=2,sample=2", 3, "stage=1,sample=3", (2, 1)),
        ("stage=4,sample=2", 6, "stage=3,sample=2", (4, 3)),
        ("stage=4,filter=2", 4, "stage=2,filter=2", (8, 4)),
        ("filter=2,stage=4", 4, "filter=2,stage=2", (8, 4)),
        ("stage=2,filter=2", 8, "stage=2,sample=2,filter=2", (4, 4)),
        ("filter=2,stage=2", 8, "sample=2,filter=2,stage=2", (4, 4)),
        ("stage=4", 3, "stage=3", (4, 3)),
        ("stage=2", 1, "stage=1", (2, 1)),
        ("stage=2", 4, "stage=2,sample=2", (2, 2)),
        ("stage=2", 3, "stage=3", (2, 3)),
    ],
)
def test_sample_axes_take_up_the_difference(plan: str, devices: int, fitted: str, groups: tuple[int, int]) -> None:
    found = fit(Plan.parse(plan), devices)
    assert str(found.plan) == fitted
    assert found.groups == groups
    assert found.plan.mesh.num_devices == devices


def test_layers_keep_their_strategies() -> None:
    layers = {"features.*": {"node": "sample", "gpu": "filter"}, "classifier.*": {"node": "filter", "gpu": "filter"}}
    found = fit(Plan.parse({"mesh": {"node": 2, "gpu": 2}, "layers": layers}), 2)
    assert found.plan.to_dict() == {"mesh": {"node": 2, "gpu": 1}, "layers": layers}
    assert found.regrouped


@pytest.mark.parametrize(
    ("devices", "fitted", "stages"),
    [
        (6, {"stage": 2, "sample": 3}, ["layer3"]),
        (2, {"stage": 2, "sample": 1}, ["layer3"]),
        (3, {"stage": 1, "sample": 3}, None),
    ],
)
def test_named_stages_stay_while_their_number_does(devices: int, fitted: dict[str, int], stages: list | None) -> None:
    plan = {"mesh": {"stage": 2, "sample": 2}, "layers": {"*": {"sample": "sample"}}, "stages": ["layer3"]}
    found = fit(Plan.parse(plan), devices).plan.to_dict()
    assert found["mesh"] == fitted
    assert found.get("stages") == stages


def test_named_stages_keep_their_places_when_samples_are_divided_as_well() -> None:
    found = fit(Plan.parse({"mesh": {"stage": 2}, "stages": ["conv1", "layer3"]}), 4).plan
    assert found.to_dict() == {
        "mesh": {"stage": 2, "sample": 2},
        "layers": {"*": {"sample": "sample"}},
        "stages": ["conv1", "layer3"],
    }
