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
