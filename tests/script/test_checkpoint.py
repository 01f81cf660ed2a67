"""A loop that is saved under one plan and goes on under any other is the uninterrupted one on one device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR
from torch.optim.swa_utils import AveragedModel

import convoy
from convoy.script import checkpoint
from convoy.script.checkpoint import load, save
from convoy.script.state import state_dict
from ranks import run_ranks

PLANS = {"serial": 1, "sample=2": 2, "filter=2": 2, "owt=2": 2, "sample=3": 3}
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "momentum": lambda groups: optim.SGD(groups, 0.05, momentum=0.9, weight_decay=1e-2),
    "adam": lambda groups: optim.Adam(groups, 0.01, betas=(0.8, 0.99)),
    "amsgrad": lambda groups: optim.AdamW(groups, 0.01, amsgrad=True),
}
BATCH = 12


def plain_net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, bias=False),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Conv2d(5, 4, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(36, 7),
        nn.ReLU(),
        nn.Linear(7, 4),
    ).double()


class Loop:
    """A script: network, optimizer with two groups, a schedule and an average of the weights."""

    def __init__(self, plan: str, kind: str, seed: int = 3, checks: bool = True) -> None:
        net = plain_net()
        images = torch.zeros(2, 3, 9, 9, dtype=torch.float64)
        self.net = convoy.parallelize(net, plan, example=images, seed=seed, checks=checks)
        weights = [p for p in self.net.parameters() if p.dim() > 1]
        rest = [p for p in self.net.parameters() if p.dim() == 1]
        self.optimizer = OPTIMIZERS[kind]([{"params": weights}, {"params": rest, "weight_decay": 0.0}])
        self.scheduler: LRScheduler = MultiStepLR(self.optimizer, [2, 4], gamma=0.5)
        self.ema = AveragedModel(self.net, avg_fn=lambda old, new, _: 0.7 * old + 0.3 * new)

    def train(self, updates: range) -> None:
        for update in updates:
            generator = torch.Generator().manual_seed(update)
            images = torch.randn(BATCH, 3, 9, 9, generator=generator, dtype=torch.float64)
            labels = torch.randint(4, (BATCH,), generator=generator)
            mine = convoy.local_samples(self.net, BATCH)
            self.optimizer.zero_grad()
            F.cross_entropy(self.net(images[mine]), labels[mine]).backward()
            self.optimizer.step()
            self.scheduler.step()
            self.ema.update_parameters(self.net)

    def save(self, path: Path, **anything: Any) -> None:
        save(path, self.net, self.optimizer, scheduler=self.scheduler, ema=self.ema, **anything)

    def load(self, path: Path) -> dict[str, Any]:
        return load(path, self.net, self.optimizer, scheduler=self.scheduler, ema=self.ema)

    def whole(self) -> dict[str, Tensor]:
        average = state_dict(self.ema.module)
        return state_dict(self.net) | {f"ema.{name}": tensor for name, tensor in average.items()}


def _saved(plan: str, folder: Path) -> None:
    for kind in OPTIMIZERS:
        loop = Loop(plan, kind)
        loop.train(range(3))
        loop.save(folder / f"{plan}-{kind}", epoch=3)


def _whole(plan: str, kind: str, updates: int) -> dict[str, Tensor]:
    loop = Loop(plan, kind)
    loop.train(range(updates))
    return loop.whole()


def _gone_on(plan: str, folder: Path, sources: list[str]) -> dict[tuple[str, str], dict[str, Tensor]]:
    found = {}
    for source in sources:
        for kind in OPTIMIZERS:
            loop = Loop(plan, kind, seed=99)  # the checkpoint's seed counts
            loop.train(range(7, 8))  # what is loaded takes the place of everything
            rest = loop.load(folder / f"{source}-{kind}")
            assert rest == {"epoch": 3}
            loop.train(range(3, 6))
            found[source, kind] = loop.whole()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for plan, world in PLANS.items():
        run_ranks(_saved, world, plan, folder)
    return folder


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, dict[str, Tensor]]:
    return {kind: run_ranks(_whole, 1, "serial", kind, 6)[0] for kind in OPTIMIZERS}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max() / (1e-12 + b[k].abs().max())) for k in a if a[k].is_floating_point())


SLOW = ("serial", "filter=2", "sample=3")


@pytest.mark.parametrize(
    "plan",
    [*(plan for plan in PLANS if plan not in SLOW), *(pytest.param(plan, marks=pytest.mark.slow) for plan in SLOW)],
)
def test_every_plan_goes_on_from_every_other(
    plan: str, folder: Path, uninterrupted: dict[str, dict[str, Tensor]]
) -> None:
    for found in run_ranks(_gone_on, PLANS[plan], plan, folder, list(PLANS)):
        assert len(found) == len(PLANS) * len(OPTIMIZERS)
        for (source, kind), whole in found.items():
            assert distance(whole, uninterrupted[kind]) < 1e-9, (source, plan, kind)


def _without(folder: Path) -> list[dict[str, Tensor]]:
    """What comes of it where the optimizer, the schedule or the number of passes is not loaded."""
    found, path = [], folder / "filter=2-momentum"
    for left_out in ("optimizer", "scheduler", "passes"):
        loop = Loop("filter=2", "momentum")
        parts = {"scheduler": loop.scheduler} if left_out != "scheduler" else {}
        load(path, loop.net, *([loop.optimizer] if left_out != "optimizer" else []), ema=loop.ema, **parts)
        if left_out == "passes":
            checkpoint.network_of(loop.net).passes = 0
        loop.train(range(3, 6))
        found.append(loop.whole())
    return found


def test_each_part_of_the_state_is_needed(folder: Path, uninterrupted: dict[str, dict[str, Tensor]]) -> None:
    for found in run_ranks(_without, 2, folder)[0]:
        assert distance(found, uninterrupted["momentum"]) > 1e-6


def _rank_zero_alone(folder: Path) -> dict[str, Tensor]:
    """What torch's own way does: rank 0 saves its part, and all ranks load it."""
    loop = Loop("filter=2", "momentum", checks=False)
    loop.train(range(3))
    own = {**dict(loop.net.named_parameters()), **dict(loop.net.named_buffers())}
    sent = [{name: tensor.detach() for name, tensor in own.items()}]
    dist.broadcast_object_list(sent)
    with torch.no_grad():
        for name, tensor in sent[0].items():
            if own[name].shape == tensor.shape:
                own[name].copy_(tensor)
    loop.train(range(3, 6))
    return loop.whole()


def test_rank_zeros_part_is_another_network(tmp_path: Path, uninterrupted: dict[str, dict[str, Tensor]]) -> None:
    found = run_ranks(_rank_zero_alone, 2, tmp_path)[0]
    assert distance(found, uninterrupted["momentum"]) > 1e-3
