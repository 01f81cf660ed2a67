"""Approximate methods: each is exactly what a few lines of plain PyTorch on one process say it is."""

import re
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.checkpoint.files import Checkpoint
from convoy.errors import ConvoyError
from convoy.plans.compression import rounds_of
from convoy.recipe.recipe import load_recipe
from ranks import run_ranks
from tasks.test_tasks import write_task
from tiny import TinyPlain
from training.scenarios import refusals, session

UPDATES, SHARES = 7, (5, 3)
BASE = ("model.name=tiny:TinyPlain", "microbatch=2", "optimizer={name: sgd, lr: 0.1, momentum: 0.9}", "epochs=9ba")
BASE += ("clip_norm=null",)
LOCAL, OUTER = "parallel.local_sgd=", "parallel.averaging."
METHODS: dict[str, tuple[str, ...]] = {
    "exact": (),
    "local": (f"{LOCAL}3",),
    "post-local": (f"{LOCAL}2", f"{OUTER}start=3ba"),
    "SlowMo": (f"{LOCAL}2", f"{OUTER}outer_momentum=0.5"),
    "DiLoCo": (f"{LOCAL}2", f"{OUTER}outer_momentum=0.9", f"{OUTER}outer_nesterov=true", f"{OUTER}outer_lr=0.7"),
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
            if "optimizer.groups" in "".join(more):
                assert [p.grad is None for p in run.model.parameters()] == [update > 2] * 2 + [False] * 2
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
                halves = [x.bfloat16() for x in parts]
                sent, total = [x.double() for x in halves], (halves[0] + halves[1]).double()
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
            beta, nesterov = self.options.get("outer_momentum", 0.0), self.options.get("outer_nesterov")
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
                images, labels = run.pipeline(batch, start, end), run.pipeline.targets(batch)[start:end]
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


def test_until_its_start_averaging_is_exact_also_where_devices_have_other_numbers_of_pixels(tmp_path: Path) -> None:
    data = write_task(tmp_path / "masks", "segmentation")
    methods = {"exact": (), "post-local": (f"{LOCAL}2", f"{OUTER}start=8ba"), "local": (f"{LOCAL}2",)}
    images = "model.name=tasks.test_tasks:TinyUNet", "data.image_size=16", "data.workers=0"
    found, _ = run_ranks(trained, 2, data, methods, *images, "parallel.shares=[3,1]", "batch=12")
    assert apart(found["post-local"], found["exact"]) < 1e-12
    assert apart(found["local"], found["exact"]) > 1e-4


def test_every_method_is_what_plain_pytorch_says(data: Path, plain: dict[str, list[Tensor]]) -> None:
    for found in run_ranks(trained, 2, data, METHODS, SHARED):
        distances = {name: apart(found[name], plain[name]) for name in METHODS}
        assert max(distances.values()) < 1e-12, distances
    for one, other in combinations(METHODS, 2):
        assert apart(plain[one], plain[other]) > 1e-6, (one, other)


STEADY = ("optimizer={name: sgd, lr: 0.1, momentum: 0}",)
EQUAL = {
    "exact": STEADY,
    "every update": (*STEADY, f"{LOCAL}1"),
    "full rank": (*STEADY, "parallel.gradient_compression=powersgd:99"),
    "all of it": (*STEADY, f"{LOCAL}1", "parallel.gradient_compression=topk:1"),
}


def test_what_is_left_to_send_of_a_group_that_has_ended_counts_nowhere(data: Path) -> None:
    run_ranks(trained, 2, data, {"top-k": METHODS["top-k"]}, "optimizer.groups=[{parameters: '0.*', until: 3ba}]")


def test_methods_that_leave_nothing_out_are_exact(data: Path) -> None:
    methods = EQUAL | {"half": (*STEADY, "parallel.gradient_compression=topk:0.5")}
    found, _ = run_ranks(trained, 2, data, methods, SHARED)
    assert all(apart(found[name], found["exact"]) < 1e-12 for name in EQUAL)
    assert apart(found["half"], found["exact"]) > 1e-6


@pytest.mark.slow
def test_model_axes_stay_exact(data: Path, plain: dict[str, list[Tensor]]) -> None:
    methods = {name: METHODS[name] for name in ("local", "post-local", "DiLoCo", "late", "bf16")}
    for found in run_ranks(trained, 4, data, methods, SHARED, "parallel.plan=sample=2,filter=2", timeout=120):
        assert max(apart(found[name], plain[name]) for name in methods) < 1e-12


def interrupted(data: Path, settings: tuple[str, ...], loses: bool) -> tuple[bool, list[str], Checkpoint]:
    """Whether a run that goes on from its checkpoint, after an evaluation, ends as one that was not interrupted; what
    it said of that, and the checkpoint. Or the state of the ranks `loses` something."""
    whole = trained(data, {"": settings}, SHARED)[""]
    run = session(data, *BASE, *settings, SHARED)
    step = run.step()
    for update, batch in enumerate(run.batches(0, 5)):
        step(batch, update)
    run.evaluate()
    run.model.train()
    tensors, values = run.state.contents({})
    checkpoint = Checkpoint(5, "", {name: tensor.clone() for name, tensor in tensors}, values)
    if loses:
        checkpoint.values["approximate"]["place"] = "elsewhere"
    for update, batch in enumerate(run.batches(5, UPDATES - 5), 5):
        step(batch, update)
    with run.state.exchange.agreed():
        assert all(map(torch.equal, (p.detach() for p in run.model.parameters()), whole)), "saving changes the course"
    later, said = session(data, *BASE, *settings, SHARED), list[str]()
    sent = later.ranks.broadcast_tensors(checkpoint.tensors if later.ranks.rank == 0 else None)
    later.state.unpack(replace(checkpoint, tensors=sent), said.append)
    step = later.step()
    for update, batch in enumerate(later.batches(5, UPDATES - 5), 5):
        step(batch, update)
    with later.state.exchange.agreed():
        return all(map(torch.equal, (p.detach() for p in later.model.parameters()), whole)), said, checkpoint


def begun(data: Path, settings: tuple[str, ...], checkpoint: Checkpoint) -> list[str]:
    said: list[str] = []
    session(data, *BASE, *settings).state.unpack(checkpoint, said.append)
    return said


@pytest.mark.parametrize("name", ["all", "PowerSGD", pytest.param("late", marks=pytest.mark.slow)])
def test_a_run_goes_on_bit_for_bit(data: Path, name: str) -> None:
    for equal, said, _ in run_ranks(interrupted, 2, data, METHODS[name], False):
        assert equal and not said
    without = run_ranks(interrupted, 2, data, METHODS[name], True)
    assert all(not equal and "begin anew" in said[0] for equal, said, _ in without)
    checkpoint = without[0][2]
    said = run_ranks(begun, 1, data, METHODS[name], checkpoint)[0]
    assert len(said) == 1 and said[0].startswith("goes on from the mean of all devices' weights")


def longest_update(data: Path, staleness: int, updates: int = 12) -> float:
    """Seconds of rank 0's longest update but the first two, while rank 1 stops for a while in one."""
    run = session(data, *BASE, f"{LOCAL}2", f"{OUTER}staleness={staleness}")
    step, seconds = run.step(), []
    for update, batch in enumerate(run.batches(0, UPDATES)):
        began = time.perf_counter()
        step(batch, update)
        if update == 4 and run.ranks.rank == 1:
            time.sleep(1.0)
        seconds.append(time.perf_counter() - began)
    with run.state.exchange.agreed():
        return max(seconds[2:9])


def test_devices_go_on_while_one_stops(data: Path) -> None:
    assert run_ranks(longest_update, 2, data, 0)[0] > 0.7
    assert run_ranks(longest_update, 2, data, 3)[0] < 0.4


def chosen(data: Path, staleness: int) -> tuple[int, str]:
    run = session(data, *BASE, f"{LOCAL}auto", f"{OUTER}staleness={staleness}")
    said = run.choose_interval()
    return run.state.exchange.every, said


def test_the_interval_follows_from_measured_times(data: Path) -> None:
    for every, said in run_ranks(chosen, 2, data, 0):
        assert every >= 1 and said.startswith(f"weights are averaged every {every} update")
    assert (rounds_of(0.1, 0), rounds_of(1, 0), rounds_of(0.6, 1), rounds_of(7, 2)) == (1, 4, 1, 7)


REFUSED = {
    ("parallel.gradient_compression=topk:0",): "'topk:0' is no way to compress: the part is more than 0 and at most 1",
    ("parallel.gradient_compression=powersgd:0.5",): "the rank is 1 or more",
    ("parallel.gradient_compression=fp8",): "'fp8' is no way to compress: write bf16, powersgd:RANK",
    (f"{OUTER}outer_momentum=0.5",): "parallel.averaging.outer_momentum has no effect without parallel.local_sgd",
    (f"{LOCAL}2", f"{OUTER}outer_nesterov=true"): "nesterov needs outer_momentum",
    (f"{LOCAL}2", f"{OUTER}staleness=1", "parallel.gradient_compression=powersgd:2"): "PowerSGD sends twice",
    (f"{LOCAL}2", f"{OUTER}staleness=1", "on_nan=skip"): "on_nan=skip asks all devices in every update",
    (f"{LOCAL}2", f"{OUTER}staleness=1", "precision=fp16"): "precision=fp16 asks all devices in every update",
    (f"{LOCAL}2", "lookahead.every=2"): "lookahead needs the weights of all updates",
    (f"{LOCAL}2", "reproducible=true"): "but local SGD averages the weights every 2 updates: leave one of them out",
    ("parallel.gradient_compression=bf16", "precision=fp16"): "set precision=bf16",
}


@pytest.mark.parametrize(("settings", "words"), REFUSED.items())
def test_options_that_exclude_each_other_are_refused(settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConvoyError, match=re.escape(words)):
        load_recipe("default", ["model.name=lenet", *settings])


def test_a_plan_that_divides_layers_over_the_samples_is_refused(data: Path, tmp_path: Path) -> None:
    settings = {"model.name": "lenet", "parallel.plan": "owt=2", "parallel.local_sgd": "2"}
    assert "divides classifier.0.weight over them" in run_ranks(refusals, 2, data, tmp_path / "run", [settings])[0][0]
