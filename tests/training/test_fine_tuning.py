"""Fine-tuning: frozen layers, layers that are trained from some update on, and rates that fall with the depth."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from convoy.models import create
from convoy.ops.memory import predict_memory
from convoy.planner.cost.costs import Costs, Roofline
from convoy.planner.cost.step import step_tasks
from convoy.planner.measured import ASSUMED_LINKS
from convoy.planner.workload import workload_of
from convoy.plans.plan import Plan
from convoy.training.build import choose_trained
from convoy.training.optimizer import layer_scales
from ranks import run_ranks
from training.scenarios import lines, refusals
from training.test_devices import distance, on_plan
from whole_runs import recipe_of, train_here, train_until

TUNED = {"model.name": "tiny:TinyResidual", "epochs": "5ba", "optimizer.layer_decay": "0.7", "clip_norm": "0.5"}
TUNED |= {"optimizer.freeze": "[conv, 'block:2ba']", "optimizer.groups": "[{parameters: '*.bias', lr_factor: 2}]"}


@pytest.fixture(scope="module")
def serial(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("serial") / "run"
    on_plan(data, out, "serial", TUNED)
    return out


def curve(run: Path) -> list[float]:
    return [loss for (loss,) in lines(run, "loss")]


@pytest.mark.parametrize("plan", ["filter=2", "height=2", "sample=2", "stage=2"])
def test_layers_that_thaw_train_as_on_one_device(data: Path, tmp_path: Path, serial: Path, plan: str) -> None:
    settings = TUNED | ({"parallel.shares": "[3,1]"} if plan == "sample=2" else {})
    for ended in on_plan(data, tmp_path / "run", plan, settings):
        assert ended.curve == pytest.approx(curve(serial), rel=1e-6)  # recorded in float32
    assert distance(tmp_path / "run", serial) < 1e-9
    if plan == "sample=2":
        for unlike in ("[conv, 'block:3ba']", "[conv, 'block.conv?:2ba']"):  # of the latter batch norm trains at once
            on_plan(data, tmp_path / unlike, plan, settings | {"optimizer.freeze": unlike})
            assert distance(tmp_path / unlike, serial) > 1e-6


def _bits_through_crashes(data: Path, out: Path) -> tuple[str, str]:
    """Digests of a run in one piece, and of one that goes on elsewhere before and after layers thaw."""
    settings = TUNED | {"reproducible": "true", "checkpoint.every": "1ba", "epochs": "6ba", "optimizer.name": "adamw"}
    (want,) = run_ranks(train_here, 1, data, out / "serial", settings)
    for plan, after in (("sample=2", 2), ("serial", 4), ("sample=2", None)):
        world = 1 if plan == "serial" else 2
        ended = run_ranks(train_until, world, data, out / "run", settings | {"parallel.plan": plan}, after)[0]
    assert ended is not None
    return ended.digest, want.digest


def test_a_run_goes_on_over_the_thaw_bit_for_bit(data: Path, tmp_path: Path) -> None:
    ended, want = _bits_through_crashes(data, tmp_path)
    assert ended == want


def test_no_backward_pass_goes_through_frozen_layers_and_none_is_predicted(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, {"model.name": "resnet18-cifar", "optimizer.freeze": "[trunk]"})
    whole, tuned = create("resnet18-cifar"), create("resnet18-cifar")
    (note,) = choose_trained(tuned, recipe)
    assert note == "11,168,832 of 11,173,962 parameters are frozen (trunk)"
    before = {name: buffer.clone() for name, buffer in tuned.named_buffers()}
    loss = tuned.train()(torch.randn(2, 3, 32, 32)).sum()
    loss.backward()
    assert [name for name, p in tuned.named_parameters() if p.grad is not None] == ["fc.weight", "fc.bias"]
    assert all(torch.equal(buffer, before[name]) for name, buffer in tuned.named_buffers())
    graphs = [workload_of(net, torch.empty(1, 3, 32, 32), 4) for net in (whole, tuned)]
    placements = [workload.place(Plan.by_samples(2)) for workload in graphs]
    of_whole, of_tuned = (predict_memory(placement)[0] for placement in placements)
    assert (of_tuned.parameters, of_tuned.gradients) == (of_whole.parameters, 4 * 5130)
    assert 40 * of_tuned.activations < of_whole.activations
    tasks = step_tasks(placements[1], Costs(Roofline(1e12, 1e11), ASSUMED_LINKS))
    assert {task.layer for task in tasks if task.kind == "backward"} <= {"fc", ""}


def test_rates_fall_with_the_depth_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    scales = layer_scales(create("resnet18-cifar"), 0.5)
    depths = {"conv1.weight": 9, "bn1.bias": 9, "layer1.0.conv2.weight": 8, "layer4.1.bn2.weight": 1, "fc.bias": 0}
    assert {name: scales[name] for name in depths} == {name: 0.5**depth for name, depth in depths.items()}
    within = nn.Sequential(nn.Module(), nn.Linear(4, 2))  # a network in a network, of which the layers count
    within[0].body = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    assert list(layer_scales(within, 0.5).values()) == [0.25, 0.25, 0.5, 0.5, 0.5, 0.5, 1.0, 1.0]
    of_timm = ModuleType("timm.models")
    of_timm.group_parameters = lambda model, matcher, reverse: dict.fromkeys(matcher, 0)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm.models", of_timm)
    monkeypatch.setattr(nn.Linear, "group_matcher", lambda self, coarse: ["weight", "bias"], raising=False)
    assert layer_scales(nn.Linear(2, 2), 0.5) == {"weight": 1.0, "bias": 1.0}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (
            "freeze",
            "[conv, laier]",
            "optimizer.freeze: 'laier' fits no layer of the network with parameters: there are conv, ",
        ),
        ("freeze", "['*']", "optimizer.freeze leaves no layer to train: "),
        ("groups", "[{parameters: '*', until: 3ba}]", "optimizer.groups leaves no layer to train from update 4 on: "),
        ("freeze", "[conv, 'block:1ep', 'head:2ba']", "optimizer.freeze leaves no layer to train at first: "),
    ],
)
def test_what_cannot_be_frozen_is_one_sentence(data: Path, tmp_path: Path, key: str, value: str, words: str) -> None:
    (said,) = refusals(data, tmp_path / "run", [TUNED | {f"optimizer.{key}": value}])
    assert said.startswith(words)
    assert not (tmp_path / "run").exists()
