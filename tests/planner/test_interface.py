"""`convoy.plan`: a plan like any other, with the reasons for it; on one process and on the ranks that will train."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import convoy
from convoy.hardware.links import link_named
from convoy.models import create
from convoy.planner.cost.link import links_named
from convoy.planner.interface import FoundPlan
from ranks import run_ranks

IMAGES = torch.zeros(8, 1, 28, 28)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.mark.slow
def test_a_found_plan_is_a_plan(store: Path) -> None:
    model = create("lenet")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = convoy.plan(model, IMAGES, devices=2, global_batch=16, link="10gbit", store=store)
    assert isinstance(found, convoy.Plan)
    assert found == convoy.Plan.parse(found.to_yaml())
    assert convoy.Plan.parse(found) is found
    assert hash(found) == hash(convoy.Plan.parse(found.to_yaml()))
    assert type(copy.deepcopy(found)) is convoy.Plan and copy.deepcopy(found) == found
    assert f"plan {found}" in found.explain()
    assert "10gbit" in found.explain()
    assert found.to_document()["devices"] == 2
    assert found.seconds > 0 and found.speedup > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert any(store.iterdir())


@pytest.mark.slow
def test_links_that_are_not_at_hand_are_said_to_be_assumed(store: Path) -> None:
    found = convoy.plan(create("lenet"), IMAGES, devices=2, store=store)
    assert "assumed" in found.explain()


def test_a_plan_of_ones_own_is_scored(store: Path) -> None:
    found = convoy.plan(create("lenet"), IMAGES, devices=2, score=["filter=2", "sample=2"], link="pcie4", store=store)
    assert str(found) in ("filter=2", "sample=2") and found.microbatches is None


@pytest.mark.slow
def test_a_plan_with_stages_says_how_many_parts_go_through_them(store: Path) -> None:
    found = convoy.plan(create("lenet"), IMAGES, devices=2, score="stage=2", link="pcie4", store=store)
    assert found.planned is not None and found.planned.best.staging is not None
    assert found.microbatches == len(found.planned.best.staging.samples)


@pytest.mark.slow
def test_plans_of_ones_own_that_do_not_fit_are_left_out(store: Path) -> None:
    options = {"devices": 2, "link": "pcie4", "store": store}
    both = convoy.plan(create("lenet"), IMAGES, score=["filter=2", "sample=2"], **options)
    needed = {str(one.plan): one.memory.total for one in both.planned.candidates}  # type: ignore[union-attr]
    smaller, larger = sorted(needed, key=lambda plan: needed[plan])
    limit = (needed[smaller] + needed[larger]) / 2
    found = convoy.plan(create("lenet"), IMAGES, score=["filter=2", "sample=2"], memory_limit=limit, **options)
    assert str(found) == smaller
    assert f"the plan {larger} does not fit" in found.explain()


def test_fixes_hold(store: Path) -> None:
    found = convoy.plan(create("lenet"), IMAGES, devices=2, fix="classifier.*=filter", link="pcie4", store=store)
    assert found.strategy("classifier.0", "linear") == ("filter",)


@pytest.mark.slow
def test_one_device_needs_no_links(store: Path) -> None:
    found = convoy.plan(create("lenet"), IMAGES, store=store)
    assert str(found) == "serial"
    assert found.speedup == pytest.approx(1)


class Data(nn.Module):
    """Looks at its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y if y.sum() > 0 else -y


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": 0}, "at least 1"),
        ({"devices": 2, "global_batch": 0}, "batch of 0"),
        ({"devices": 2, "link": "string"}, "no link"),
        ({"devices": 2, "fix": "head=filter"}, "matches no layer"),
        ({"devices": 2, "score": "sample=4"}, "4 devices"),
        ({"devices": 2, "memory_limit": 10.0, "link": "pcie4"}, "no plan fits"),
        ({"devices": 2, "microbatches": 20}, "microbatches=20"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS computes the gradients several times"),
        (
            {"devices": 2, "link": "pcie4", "score": "sample=2", "memory_limit": 1e3},
            r"the plan sample=2 does not fit: it needs .* more than the 1 kB there are; .* takes most",
        ),
    ],
)
def test_mistakes(options: dict, words: str, store: Path) -> None:
    with pytest.raises(convoy.errors.ConvoyError, match=words):
        convoy.plan(create("lenet"), IMAGES, store=store, **options)


def test_a_network_that_is_no_graph() -> None:
    with pytest.raises(convoy.errors.ConvoyError, match="as one graph"):
        convoy.plan(Data(), torch.zeros(2, 4), devices=2, store=False)


def test_what_nobody_found_has_nothing_to_explain() -> None:
    plan = convoy.Plan.parse("sample=2")
    with pytest.raises(convoy.errors.ConvoyError, match=r"convoy\.plan"):
        FoundPlan(plan.mesh, plan.layers).explain()


def body(folder: str) -> tuple[str, int, bool]:
    model = create("lenet")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = convoy.plan(model, IMAGES, devices=2, global_batch=16, store=Path(folder))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert found.planned is not None
    measured = found.planned.measured
    assert "sample=2" in {str(plan) for plan in measured} and len(measured) > 1
    assert found == min(measured, key=lambda plan: measured[plan])
    return found.to_yaml(), len(found.planned.costs.links.measured), "assumed" in found.explain()


@pytest.mark.slow
def test_ranks_measure_together_and_find_the_same(tmp_path: Path) -> None:
    first, second = run_ranks(body, 2, str(tmp_path), timeout=120)
    assert first == second
    assert first[1] > 0
    assert not first[2]


def wrong_number() -> str:
    try:
        convoy.plan(create("lenet"), IMAGES, devices=3)
    except convoy.errors.ConvoyError as error:
        return str(error)
    return ""


def test_another_number_of_ranks_is_refused() -> None:
    assert all("2 ranks run" in said for said in run_ranks(wrong_number, 2))


@pytest.mark.parametrize(
    ("text", "rate"), [("10gbit", 1.125e9), ("5GB/s", 5e9), ("800 Mbit/s", 0.09e9), ("pcie4", 21.8e9)]
)
def test_links_by_name(text: str, rate: float) -> None:
    assert link_named(text).rate == pytest.approx(rate)


def test_links_inside_hosts_and_between_them() -> None:
    mesh = convoy.Plan.parse("sample=2,filter=4").mesh
    links, note = links_named("10gbit,4xnvlink4", on_cpu=False)
    plain, nvlink = (links_named(name, on_cpu=False)[0].of(mesh, (1,)) for name in ("10gbit", "nvlink4"))
    assert links.of(mesh, (1,)) == nvlink
    assert links.of(mesh, (0,)) == links_named("10gbit", on_cpu=False)[0].of(mesh, (0,))
    assert links.of(mesh, (0, 1)).all_reduce(1 << 20) > nvlink.all_reduce(1 << 20)
    assert plain.all_reduce(1 << 20) > nvlink.all_reduce(1 << 20)
    assert "inside hosts of 4 devices" in note
    for wrong in ("10gbit,nvlink4", "10gbit,0xnvlink4", "10gbit,4xfast"):
        with pytest.raises(convoy.errors.ConvoyError, match="is no link"):
            links_named(wrong, on_cpu=False)


def test_slow_links_leave_a_cpu_its_cycles() -> None:
    mesh = convoy.Plan.parse("sample=2").mesh
    slow, fast, gpu = (
        links_named(*each)[0].of(mesh, (0,)) for each in (("1gbit", True), ("5GB/s", True), ("5GB/s", False))
    )
    assert 0 < slow.cpu_share < 0.2
    assert (fast.cpu_share, gpu.cpu_share) == (1, 0)
