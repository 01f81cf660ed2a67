"""A loop's state is the same under every plan, by the plain names, and any goes on from what another saved."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR
from torch.optim.swa_utils import AveragedModel

import convoy
from convoy.script import checkpoint
from convoy.script.checkpoint import load, save
from convoy.script.state import load_optimizer_state_dict, optimizer_state_dict, state_dict
from ranks import run_ranks
from script.saved import alike

State = dict[str, Any]
PLANS = {"serial": 1, "sample=2": 2, "filter=2": 2, "channel=2": 2}
BATCH = 12


def two_groups(kind: type[optim.Optimizer], rest: State, **options: Any) -> Callable[[nn.Module], optim.Optimizer]:
    def make(net: nn.Module) -> optim.Optimizer:
        weights, others = ([p for p in net.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
        return kind([{"params": weights}, {"params": others, **rest}], **options)

    return make


OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "momentum": two_groups(optim.SGD, {"weight_decay": 0.0}, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "not all stepped": two_groups(optim.Adam, {"lr": 0.02, "betas": (0.5, 0.9)}, lr=0.01),
    "some parameters": lambda net: optim.AdamW([net[7].weight, *net[3].parameters()], lr=0.01, amsgrad=True),
}


class Tied(nn.Module):
    """Two layers with one weight, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((4,), 0.1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.scale)


class Loop:
    """A script: network, optimizer, a schedule and an average of the weights; a second network; a plain module."""

    def __init__(self, plan: str, kind: str, seed: int = 3) -> None:
        torch.manual_seed(5)
        net = nn.Sequential(
            *(nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 3, stride=2), nn.ReLU()),
            *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(36, 7), nn.ReLU(), nn.Linear(7, 4)),
        ).double()
        net[0].weight.requires_grad_(kind != "momentum")
        images = torch.zeros(2, 3, 9, 9, dtype=torch.float64)
        self.kind, self.net = kind, convoy.parallelize(net, plan, example=images, seed=seed)
        self.optimizer = OPTIMIZERS[kind](self.net)
        self.scheduler: LRScheduler = MultiStepLR(self.optimizer, [2, 4], gamma=0.5)
        self.ema = AveragedModel(self.net, avg_fn=lambda old, new, _: 0.7 * old + 0.3 * new)
        self.critic = convoy.parallelize(Tied().double(), plan, example=torch.zeros(2, 4, dtype=torch.float64))
        self.judge, self.table = optim.AdamW(self.critic.parameters(), 0.05), nn.Embedding(2, 3)
        self.rest = {"scheduler": self.scheduler, "ema": self.ema, "critic": self.critic}
        self.rest |= {"judge": self.judge, "table": self.table}

    def train(self, updates: range) -> None:
        for update in updates:
            generator = torch.Generator().manual_seed(update)
            images = torch.randn(BATCH, 3, 9, 9, generator=generator, dtype=torch.float64)
            labels = torch.randint(4, (BATCH,), generator=generator)
            mine = convoy.local_samples(self.net, BATCH)
            self.optimizer.zero_grad()
            self.judge.zero_grad()
            F.cross_entropy(self.net(images[mine]), labels[mine]).backward()
            self.critic(images[mine, 0, 0, :4]).square().mean().backward()
            if self.kind == "not all stepped":
                self.net[3].weight.grad = None
            self.optimizer.step()
            self.judge.step()
            self.scheduler.step()
            self.ema.update_parameters(self.net)
            with torch.no_grad():
                self.table.weight.mul_(0.5)

    def load(self, path: Path, without: str = "") -> None:
        more = {name: thing for name, thing in self.rest.items() if name != without}
        rest = load(path, self.net, self.optimizer if without != "optimizer" else None, **more)
        assert rest["epoch"] == 3 and (without or len(rest) == 1)

    def whole(self) -> State:
        optimizers = ((self.net, self.optimizer), (self.critic, self.judge))
        states = [state_dict(self.net), state_dict(self.ema.module), state_dict(self.critic), self.table.state_dict()]
        return {"networks": [*map(dict, states)], "optimizers": [optimizer_state_dict(*pair) for pair in optimizers]}


def _saved(plan: str, folder: Path) -> dict[str, State]:
    states = {}
    for kind in OPTIMIZERS:
        loop = Loop(plan, kind)
        loop.train(range(3))
        save(folder / f"{plan}-{kind}", loop.net, loop.optimizer, epoch=3, **loop.rest)
        states[kind] = loop.whole()
    return states


def _uninterrupted() -> dict[str, State]:
    wholes = {}
    for kind in OPTIMIZERS:
        loop = Loop("serial", kind)
        loop.train(range(6))
        wholes[kind] = loop.whole()
    return wholes


def _gone_on(plan: str, folder: Path) -> list[tuple[str, str, State]]:
    """Each optimizer from another plan, in a loop with other numbers before."""
    ends, others = [], [other for other in PLANS if other != plan]
    for source, kind in zip(others, OPTIMIZERS, strict=True):
        loop = Loop(plan, kind, seed=99)  # the checkpoint's seed counts
        loop.train(range(7, 8))
        loop.load(folder / f"{source}-{kind}")
        state = optimizer_state_dict(loop.net, loop.optimizer)
        other, before = OPTIMIZERS[kind](loop.net), copy.deepcopy(state)
        load_optimizer_state_dict(loop.net, other, state)
        assert alike(optimizer_state_dict(loop.net, other), state, 0.0)
        loop.train(range(3, 6))
        assert alike(state, before, 0.0), "what was loaded was changed by the update"
        ends.append((source, kind, loop.whole()))
    return ends


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    serial, *others = ((plan, run_ranks(_saved, world, plan, folder)) for plan, world in PLANS.items())
    for plan, ranks in others:
        assert all(alike(state, serial[1][0][kind]) for states in ranks for kind, state in states.items()), plan
    return folder


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, State]:
    return run_ranks(_uninterrupted, 1)[0]


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_gives_the_serial_state_and_goes_on_from_another(
    plan: str, folder: Path, uninterrupted: dict[str, State]
) -> None:
    for ends in run_ranks(_gone_on, PLANS[plan], plan, folder):
        for source, kind, end in ends:
            assert alike(end, uninterrupted[kind]), (source, plan, kind)


def _without(folder: Path) -> list[State]:
    """What comes of it where the optimizer, the schedule or the number of passes is not loaded."""
    ends = []
    for part in ("optimizer", "scheduler", "passes"):
        loop = Loop("filter=2", "momentum")
        loop.load(folder / "filter=2-momentum", without=part)
        if part == "passes":
            checkpoint.network_of(loop.net).passes = 0
        loop.train(range(3, 6))
        ends.append(loop.whole())
    return ends


def test_each_part_of_the_state_is_needed(folder: Path, uninterrupted: dict[str, State]) -> None:
    for end in run_ranks(_without, 2, folder)[0]:
        assert not alike(end, uninterrupted["momentum"], 1e-6)
