"""`convoy.plan`: a plan like any other, with the reasons for it; on one process and on the ranks that will train."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import convoy
from convoy.errors import ConvoyError
from convoy.models import create
from ranks import run_ranks

IMAGES = torch.zeros(8, 1, 28, 28)
REFUSED: dict[str, dict[str, Any]] = {
    "no plan fits": {"memory_limit": 10.0},
    "microbatches=20": {"microbatches": 20},
    "LBFGS computes the gradients several times": {"optimizer": torch.optim.LBFGS},
    "devices='2'": {"devices": "2"},
    "example must be a tensor": {"example": IMAGES.numpy()},
    "samples along dim 0": {"example": ()},
    "batch_norm='microbatches'": {"batch_norm": "microbatches"},
    "'bf17' is no precision": {"precision": "bf17"},
    "matches no layer": {"score": {"mesh": {"gpu": 2}, "layers": {"nosuch": {"gpu": "filter"}}}},
}


def planned(store: Path, **options: Any) -> Any:
    asked = {"model": create("lenet"), "example": [IMAGES], "store": str(store), "link": "pcie4", "devices": 2}
    return convoy.plan(**asked | options)


@pytest.mark.slow
def test_plans_of_ones_own_are_scored_and_left_out_where_they_do_not_fit(tmp_path: Path) -> None:
    both = planned(tmp_path, score=["filter=2", "sample=2"])
    assert list(tmp_path.glob("*.json"))  # the times are kept there
    assert both == convoy.Plan.parse(both.to_yaml()) and hash(both) == hash(convoy.Plan.parse(both.to_yaml()))
    assert type(copy.deepcopy(both)) is convoy.Plan  # without the reasons
    assert f"plan {both}" in both.explain() and both.to_document()["devices"] == 2 and both.microbatches is None
    needed = {str(one.plan): one.memory.total for one in both.planned.candidates}
    smaller, larger = sorted(needed, key=lambda plan: needed[plan])
    limit = (needed[smaller] + needed[larger]) / 2
    plan = planned(tmp_path, score=["filter=2", "sample=2"], memory_limit=limit)
    assert str(plan) == smaller and f"the plan {larger} does not fit" in plan.explain()
    for words, options in REFUSED.items():
        with pytest.raises(ConvoyError, match=words):
            planned(tmp_path, **options)


def together(folder: str) -> tuple[str, int, bool, str]:
    model = create("lenet")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = convoy.plan(model, IMAGES, devices=2, global_batch=16, store=Path(folder))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    measured = plan.planned.measured
    assert "sample=2" in {str(plan) for plan in measured} and len(measured) > 1
    assert plan == min(measured, key=lambda plan: measured[plan])
    with pytest.raises(ConvoyError) as refused:
        convoy.plan(model, IMAGES, devices=3)
    links = len(plan.planned.costs.links.measured)
    return plan.to_yaml(), links, "assumed" in plan.explain(), str(refused.value)


@pytest.mark.slow
def test_ranks_measure_together_and_find_the_same(tmp_path: Path) -> None:
    first, second = run_ranks(together, 2, str(tmp_path), timeout=150)
    assert first == second and first[1] > 0 and not first[2] and "2 ranks run" in first[3]
