"""Optimizers and clipping over divided parameters: as on one device, or refused before the first step."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from own_loops import IMAGES, LABELS, PLANS, far, loss_of, rank, ranks_net, small, train
from torch import Tensor, nn

import convoy
from convoy.errors import ConvoyError
from ranks import run_ranks


class Lion(torch.optim.Optimizer):
    """Treats every number by itself, and nobody knows it."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.add_((0.9 * mean + 0.1 * p.grad).tanh(), alpha=-group["lr"])
                mean.lerp_(p.grad, 0.01)


def make(name: str, net: nn.Module) -> torch.optim.Optimizer:
    parameters = list(net.parameters())
    if name in ("Lion", "Muon", "LBFGS"):
        matrices = [p for p in parameters if p.dim() == 2]
        return Lion(parameters, 0.01) if name == "Lion" else getattr(torch.optim, name)(matrices)
    import pytorch_optimizer

    optimizer: torch.optim.Optimizer = getattr(pytorch_optimizer, name)(parameters, lr=0.01)
    return optimizer


def optimized(name: str, plan: str) -> str | float:
    serial = small()
    serial[0] = nn.Conv2d(3, 6, 3, bias=False).double()  # a gradient that is nothing but rounding would be blown up
    net = convoy.parallelize(copy.deepcopy(serial), plan, IMAGES[:4])
    mine = convoy.local_samples(net, len(IMAGES))
    optimizer, alone = make(name, net), make(name, serial)
    try:
        for _ in range(3):
            for each, samples, opt in ((net, mine, optimizer), (serial, slice(None), alone)):
                opt.zero_grad()
                loss_of(each, samples).backward()
                opt.step()
    except ConvoyError as error:
        return str(error)
    return far(convoy.state_dict(net), serial.state_dict())


def test_optimizers_that_look_at_whole_tensors_are_refused_on_parts_alone() -> None:
    for name in ("Lamb", "Muon", "LBFGS"):
        for text in run_ranks(optimized, 2, name, "filter=2"):
            assert isinstance(text, str) and text.startswith(f"{name} "), name
            assert "divided over ranks: take an optimizer" in text
    for name, plan in [("Lion", "filter=2"), ("Lamb", "sample=2")]:
        for error in run_ranks(optimized, 2, name, plan):
            assert isinstance(error, float) and error < 1e-9, name


def clip_by_hand(parameters: list[nn.Parameter]) -> Tensor:
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = sum((g.detach() ** 2).sum() for g in gradients) ** 0.5
    also = sum(g.norm(2).item() ** 2 for g in gradients) ** 0.5
    assert abs(float(total) - also) < 1e-12
    for gradient in gradients:
        gradient.mul_(min(1.0, 0.1 / also))
    assert all(bool(g.isfinite().all()) for g in gradients)
    return torch.tensor(float(max(g.abs().max() for g in gradients)) + also + float(sum(g.mean() for g in gradients)))


CLIPS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1),
    "third": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1, norm_type=3, foreach=False),
    "by hand": clip_by_hand,
}


def clipped(plan: str) -> dict[str, tuple[float, float]]:
    """How far norms and weights are from one device's, by torch's clipping and by Convoy's."""
    found = {}
    for name, clip in CLIPS.items():
        net, mine = ranks_net(plan, checks=name != "third")  # gradients answer without the comparisons too
        serial = small()
        norms, want = train(net, mine, clip), train(serial, slice(None), clip)
        differences = [abs(a - b) for a, b in zip(norms, want, strict=True)]
        found[name] = max(differences), far(convoy.state_dict(net), serial.state_dict())
    net, mine = ranks_net(plan)
    serial = small()
    norms = train(net, mine, lambda _: convoy.clip_grad_norm_(net, 0.1))
    want = train(serial, slice(None), CLIPS["norm"])
    found["convoy"] = max(map(abs, map(float.__sub__, norms, want))), far(convoy.state_dict(net), serial.state_dict())
    return found


def test_clipping_is_that_of_one_device() -> None:
    for plan in PLANS:
        for found in run_ranks(clipped, 2, plan):
            assert all(norms < 1e-12 and weights < 1e-9 for norms, weights in found.values()), (plan, found)


def scaled() -> tuple[float, float]:
    """A loss scale that is too large on the rank with the largest gradient alone: all leave the update out."""
    net = convoy.parallelize(small().float(), "filter=2", IMAGES[:4].float())
    mine = convoy.local_samples(net, len(IMAGES))
    before = convoy.state_dict(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(F.cross_entropy(net(IMAGES[mine].float()), LABELS[mine])).backward()
    if rank() == 1:
        with torch._C.DisableTorchFunctionSubclass():
            net[0].weight.grad[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    return far(convoy.state_dict(net), {"0.weight": before["0.weight"]}), scaler.get_scale()


def test_what_one_rank_cannot_update_none_does() -> None:
    assert run_ranks(scaled, 2) == [(0.0, 512.0)] * 2
