"""Approximate methods: each is exactly what a few lines of plain PyTorch on one process say it is."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranks import run_ranks
from tiny import TinyPlain
from training.scenarios import session

UPDATES, SHARES = 7, (5, 3)
BASE = ("model.name=tiny:TinyPlain", "microbatch=2", "optimizer={name: sgd, lr: 0.1, momentum: 0.9}", "epochs=9ba")
BASE += ("clip_norm=null",)
LOCAL, OUTER = "parallel.local_sgd=", "parallel.averaging."
METHODS: dict[str, tuple[str, ...]] = {
    "exact": (),
    "local": (f"{LOCAL}3",),
    "post-local": (f"{LOCAL}2", f"{OUTER}start=3ba"),
    "SlowMo": (f"{LOCAL}2", f"{OUTER}outer_momentum=0.5"),
    "DiLoCo": (f"{LOCAL}2", f"{OUTER}outer_momentum=0.9", f"{OUTER}nesterov=true", f"{OUTER}outer_lr=0.7"),
    "late": (f"{LOCAL}1", f"{OUTER}staleness=2"),
    "bf16": ("parallel.gradient_compression=bf16",),
    "top-k": ("parallel.gradient_compression=topk:0.1",),
    "PowerSGD": ("parallel.gradient_compression=powersgd:1",),
    "all": (f"{LOCAL}2", f"{OUTER}staleness=1", f"{OUTER}outer_momentum=0.5", "parallel.gradient_compression=topk:0.2"),
}


def trained(data: Path, methods: dict[str, tuple[str, ...]], *more: str) -> dict[str, list[Tensor]]:
    """The mean of the ranks' weights after some updates of each."""
    result = {}
    for name, settings in methods.items():
        run = session(data, *BASE, *settings, *more)
        step = run.step()
        for update, batch in enumerate(run.batches(0, UPDATES)):
            step(batch, update)
        with run.state.exchange.agreed():
            tensors = run.network.model.named_parameters()
            result[name] = [run.network.whole(name, tensor.detach()).clone() for name, tensor in tensors]
    return result


class Simulated:
    """Devices as copies of a network, one after the other."""

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        self.options, self.weights = options, [[p.detach().clone() for p in model.parameters()] for _ in SHARES]
        self.momentum = [[torch.zeros_like(p) for p in model.parameters()] for _ in SHARES]
        self.errors = [[torch.zeros_like(p) for p in model.parameters()] for _ in SHARES]
        self.factors: dict[int, Tensor] = {}
        self.anchor, self.outer = [p.clone() for p in self.weights[0]], [torch.zeros_like(p) for p in self.weights[0]]
        self.rounds: list[tuple[list[list[Tensor]], list[Tensor], float]] = []

    def total(self, xs: list[list[Tensor]]) -> list[Tensor]:
        """The sum over the devices, each of whose tensors are compressed."""
        kind, _, amount = self.options.get("compression", "").partition(":")
        result = []
        for i in range(len(xs[0])):
            parts = [x[i] + error[i] for x, error in zip(xs, self.errors, strict=True)]
            sent, total = parts, parts[0] + parts[1]
            if kind == "bf16":
                sent, total = [x.bfloat16().double() for x in parts], (parts[0].bfloat16() + parts[1].bfloat16()).double()
            elif kind == "topk":
                number = -int(-float(amount) * parts[0].numel() // 1)
                least = [x.abs().flatten().sort().values[-number] for x in parts]
                sent = [x * (x.abs() >= bound) for x, bound in zip(parts, least, strict=True)]
                total = sent[0] + sent[1]
            elif kind == "powersgd" and parts[0].dim() > 1:
                generator = torch.Generator().manual_seed(i)
                first = torch.randn(parts[0][0].numel(), 1, generator=generator, dtype=torch.float64)
                q = self.factors.get(i, first)
                p = torch.linalg.qr(sum(x.flatten(1) @ q for x in parts)).Q
                projected = [p @ (x.flatten(1).T @ p).T for x in parts]
                self.factors[i] = sum(x.flatten(1).T @ p for x in parts)
                sent = [x.view(parts[0].shape) for x in projected]
                total = sent[0] + sent[1]
            for error, x, s in zip(self.errors, parts, sent, strict=True):
                error[i] = x - s
            result.append(total)
        return result

    def update(self, number: int, gradients: list[list[Tensor]], rate: float) -> None:
        options, shares = self.options, [share / sum(SHARES) for share in SHARES]
        every, start = options.get("every"), options.get("start", 0)
        if every is None or number < start:
            total = self.total([[share * g for g in of_one] for share, of_one in zip(shares, gradients, strict=True)])
            gradients = [total for _ in SHARES]
        for weights, momentum, of_one in zip(self.weights, self.momentum, gradients, strict=True):
            for w, m, g in zip(weights, momentum, of_one, strict=True):
                m.mul_(0.9).add_(g)
                w.sub_(rate * m)
        if every is None or number < start:
            self.anchor = [w.clone() for w in self.weights[0]]
        elif (number + 1 - start) % every == 0:
            self.meet(shares, rate)

    def meet(self, shares: list[float], rate: float) -> None:
        def begin(device: int) -> list[Tensor]:
            return [x - sum(ways[device][i] for ways, _, _ in self.rounds) for i, x in enumerate(self.anchor)]

        ways = [[b - w for b, w in zip(begin(k), self.weights[k], strict=True)] for k in range(len(shares))]
        total = self.total([[share * x for x in way] for share, way in zip(shares, ways, strict=True)])
        self.rounds.append((ways, total, rate))
        if len(self.rounds) > self.options.get("staleness", 0):
            _, change, rate = self.rounds.pop(0)
            beta, nesterov = self.options.get("outer_momentum", 0.0), self.options.get("nesterov")
            scale = rate if beta and not nesterov else 1.0
            for x, u, c in zip(self.anchor, self.outer, change, strict=True):
                u.mul_(beta).add_(c / scale)
                x.sub_(self.options.get("outer_lr", 1.0) * scale * (c / scale + beta * u if nesterov else u))
        self.weights = [begin(k) for k in range(len(shares))]

    def mean(self) -> list[Tensor]:
        shares = [share / sum(SHARES) for share in SHARES]
        return [sum(s * x for s, x in zip(shares, xs, strict=True)) for xs in zip(*self.weights, strict=True)]


def options_of(settings: tuple[str, ...]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for key, _, value in (setting.partition("=") for setting in settings):
        last = key.rpartition(".")[2]
        name = {"local_sgd": "every", "gradient_compression": "compression"}.get(last, last)
        plain = value.removesuffix("ba")
        is_name = name == "compression"
        options[name] = value if is_name else value == "true" if not plain[0].isdigit() else float(plain)
    return options


def simulated(data: Path, methods: dict[str, tuple[str, ...]]) -> dict[str, list[Tensor]]:
    run, model, result = session(data, *BASE), TinyPlain(), {}
    for name, settings in methods.items():
        devices = Simulated(run.model, options_of(settings))
        for number, batch in enumerate(run.batches(0, UPDATES)):
            gradients, end = [], 0
            for weights, share in zip(devices.weights, SHARES, strict=True):
                start, end = end, end + 2 * share
                images, labels = run.pipeline(batch, start, end), run.pipeline.labels(batch)[start:end]
                names = dict(zip(dict(model.named_parameters()), weights, strict=True))
                leaves = {key: value.clone().requires_grad_() for key, value in names.items()}
                loss = F.cross_entropy(torch.func.functional_call(model, leaves, (images,)), labels)
                gradients.append(list(torch.autograd.grad(loss, list(leaves.values()))))
            devices.update(number, gradients, run.quantities.schedule.lr(number))
        result[name] = devices.mean()
    return result


def apart(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def plain(data: Path) -> dict[str, list[Tensor]]:
    return run_ranks(simulated, 1, data, METHODS)[0]


SHARED = f"parallel.shares={list(SHARES)}"


def test_every_method_is_what_plain_pytorch_says(data: Path, plain: dict[str, list[Tensor]]) -> None:
    for found in run_ranks(trained, 2, data, METHODS, SHARED):
        distances = {name: apart(found[name], plain[name]) for name in METHODS}
        assert max(distances.values()) < 1e-12, distances
    for one, other in combinations(METHODS, 2):
        assert apart(plain[one], plain[other]) > 1e-6, (one, other)
