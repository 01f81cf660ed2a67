"""Means over the global batch and penalties on the weights have, under every plan, one device's value and gradients."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy.script.loss import global_mean, penalty
from ranks import run_ranks
from script.saved import refused

CLASSES = 6
Data = dict[str, Tensor]


class TwoHeads(nn.Module):
    """A class and a position for every picture."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.hidden, self.classes, self.position = nn.Linear(8 * 4, 10), nn.Linear(10, CLASSES), nn.Linear(10, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.adaptive_avg_pool2d(F.silu(self.norm(self.first(x))), 2).flatten(1)
        x = torch.tanh(self.hidden(x))
        return self.classes(x), self.position(x)


class Unforeseen(TwoHeads):
    """Asks for the numbers, so that it cannot be captured."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x if x.sum() > -1e9 else -x)


def mean(net: nn.Module | None, values: Tensor, count: Tensor | float | None = None) -> Tensor:
    """`global_mean`; of the plain network what it stands for."""
    if net is not None:
        return global_mean(net, values, count)
    return values.sum() / (values.numel() if count is None else torch.as_tensor(count).sum())


WEIGHTS = torch.arange(1.0, CLASSES + 1, dtype=torch.float64)
SMOOTHED: dict[str, Any] = {"weight": WEIGHTS, "label_smoothing": 0.1, "ignore_index": -1}


def ignoring(net: nn.Module | None, outputs: Any, data: Data) -> Tensor:
    if net is None:
        return F.cross_entropy(outputs[0], data["labels"], ignore_index=-1)
    losses = F.cross_entropy(outputs[0], data["labels"], ignore_index=-1, reduction="sum")
    return global_mean(net, losses, data["labels"] != -1)


def smoothed(net: nn.Module | None, outputs: Any, data: Data) -> Tensor:
    labels = data["labels"]
    if net is None:
        return F.cross_entropy(outputs[0], labels, **SMOOTHED)
    losses = F.cross_entropy(outputs[0], labels, **SMOOTHED, reduction="none")
    return global_mean(net, losses, WEIGHTS[labels.clamp(min=0)] * (labels != -1))


def two_heads(net: nn.Module | None, outputs: Any, data: Data) -> Tensor:
    labels, seen = data["labels"], data["seen"]
    classes = F.cross_entropy(outputs[0], labels, ignore_index=-1, reduction="sum")
    position = F.smooth_l1_loss(outputs[1], data["positions"], reduction="none") * seen[:, None]
    return mean(net, classes, labels != -1) + 0.5 * mean(net, position, seen)


def dice(net: nn.Module | None, outputs: Any, data: Data) -> Tensor:
    """The ratio's denominator has a gradient too; and a function of several means."""
    chance, target = outputs[0].softmax(1)[:, 1], (data["labels"] == 1).double()
    return 1 - 2 * mean(net, chance * target, chance + target) + mean(net, chance).log() ** 2


def each_alone(net: nn.Module | None, outputs: Any, data: Data) -> Tensor:
    """The control: a mean for each rank, as one would write it."""
    return F.cross_entropy(outputs[0], data["labels"], ignore_index=-1)


Penalty = Callable[[Data], Tensor]
PENALTIES: dict[str, Penalty] = {
    "squares": lambda weights: 1e-1 * sum(weight.square().sum() for weight in weights.values()),
    # no sums over elements
    "norms": lambda weights: sum(weight.norm() for weight in weights.values()) * weights["classes.weight"].norm(),
    "spectral": lambda ws: sum(torch.linalg.matrix_norm(w.flatten(1), 2) for w in ws.values() if w.dim() > 1),
    "orthogonal": lambda ws: (ws["hidden.weight"] @ ws["hidden.weight"].T - torch.eye(10).double()).square().sum(),
}


def penalized(name: str, names: str = "*", of_ranks: bool = False, plain: bool = False) -> Callable[..., Tensor]:
    """A penalty beside a mean over the global batch, or over each rank's samples; or as one would write it."""

    def loss(net: nn.Module | None, outputs: Any, data: Data, weights: Data) -> Tensor:
        squared, function = outputs[0].square(), PENALTIES[name]
        if net is None:
            return squared.mean() + function(weights)
        term = function(dict(net.named_parameters())) if plain else penalty(net, function, names)
        return (squared.mean() if of_ranks else global_mean(net, squared)) + term

    return loss


def batch(samples: int = 8) -> Data:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, CLASSES, (samples,), generator=generator)
    labels[:4:3] = -1  # two of the first rank's in an uneven division
    labels[5:] = -1  # and all of the second's
    return {
        "x": torch.randn(samples, 3, 6, 6, dtype=torch.float64, generator=generator),
        "labels": labels,
        "positions": torch.rand(samples, 2, dtype=torch.float64, generator=generator),
        "seen": torch.arange(samples) % 3 > 0,
    }


def own(net: nn.Module, data: Data, sizes: tuple[int, ...]) -> Data:
    """This rank's samples of a batch, with so many for each sample rank."""
    place = net._convoy.sample_rank
    start = sum(sizes[:place])
    return {name: tensor[start : start + sizes[place]] for name, tensor in data.items()}


def difference(net: nn.Module, serial: nn.Module) -> float:
    """The largest error of a gradient, relative to the largest gradient."""
    got, want = convoy.gradients(net), {name: p.grad for name, p in serial.named_parameters() if p.grad is not None}
    assert got.keys() == want.keys()
    largest = max(gradient.abs().max().item() for gradient in want.values())
    return max((got[name] - want[name]).abs().max().item() for name in want) / largest


def built(build: type[nn.Module], plan: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A plain network in float64, whose batch norm has a frozen bias, and its copy under a plan."""
    torch.manual_seed(0)
    serial = build().double()
    serial.norm.bias.requires_grad_(False)
    return serial, convoy.parallelize(copy.deepcopy(serial), plan, batch()["x"][:2], **options)


def errors(
    plan: str, sizes: tuple[int, ...], cases: list[Any], kind: str = "mean", build: type[nn.Module] = TwoHeads
) -> list[tuple[float, float]]:
    """Of each loss and of its gradients. A loss is a function here, or arguments of `penalized`."""
    found = []
    for case in cases:
        is_penalty = isinstance(case, tuple)
        serial, net = built(build, plan, loss=kind, checks=plan != "sample=2")
        mine = own(net, batch(), sizes)
        weights = {name: p for name, p in serial.named_parameters() if p.requires_grad}
        function, more = (penalized(*case), [weights]) if is_penalty else (case, [])
        want = function(None, serial(batch()["x"]), batch(), *more)
        got = function(net, net(mine["x"]), mine, *more)
        for value in (want, got):
            value.backward()
        of_ranks = is_penalty and len(case) > 2 and case[2]
        found.append((0.0 if of_ranks else abs(got.item() - want.item()), difference(net, serial)))
    return found


def worst(plan: str, sizes: tuple[int, ...], *args: Any) -> float:
    world = 1 if plan == "serial" else 4 if "," in plan else 2
    return max(error for ranks in run_ranks(errors, world, plan, sizes, *args) for pair in ranks for error in pair)


slow = pytest.mark.slow
ALL = [ignoring, smoothed, two_heads, dice, *((name,) for name in PENALTIES)]


@pytest.mark.parametrize(
    ("plan", "sizes"),
    [
        ("sample=2", (5, 3)),
        ("sample=2", (8, 0)),
        ("owt=2", (5, 3)),
        pytest.param("sample=2,filter=2", (5, 3), marks=slow),
    ],
)
def test_means_and_penalties_are_those_of_one_device(plan: str, sizes: tuple[int, ...]) -> None:
    assert worst(plan, sizes, ALL) < 1e-12
    if 0 not in sizes:
        assert worst(plan, sizes, [("squares", "*", True)]) < 1e-12
        assert worst(plan, sizes, [ignoring, ("norms",)], "mean", Unforeseen) < 1e-12
        assert worst(plan, sizes, [ignoring], "part") < 1e-12


@pytest.mark.parametrize("plan", ["channel=2", "height=2"])
def test_penalties_under_more_plans(plan: str) -> None:
    assert worst(plan, (8,), [("norms",)], "part") < 1e-12
    assert worst(plan, (8,), [("orthogonal", "hid*.weight")]) < 1e-12  # some weights alone are gathered


def test_means_and_penalties_of_each_rank_alone_are_other_losses() -> None:
    cases = [each_alone, ("squares", "*", False, True)]
    for alone, plain in run_ranks(errors, 2, "sample=2", (4, 4), cases):
        assert min(alone) > 1e-3 and plain[1] > 1e-3


def two_passes() -> float:
    """Two passes of different division, and one without gradients in between; means of means are refused."""
    serial, net = built(TwoHeads, "sample=2")
    data, losses = batch(), []
    for sizes in ((5, 3), (1, 7)):
        losses.append(net(own(net, data, sizes)["x"])[1].square().sum(1))
    with torch.no_grad():
        net(data["x"])
    (2 * serial(data["x"])[1].square().sum(1).mean()).backward()
    assert "take the mean of each pass and add the means" in refused(global_mean, net, torch.cat(losses), 8.0)
    for of_all in (global_mean(net, losses[0]), penalty(net, lambda w: w["first.weight"].sum())):
        assert "would count several times" in refused(global_mean, net, (losses[0] - of_all).square())
    (global_mean(net, losses[0]) + global_mean(net, losses[1])).backward()
    return difference(net, serial)


def test_every_mean_knows_its_pass() -> None:
    assert max(run_ranks(two_passes, 2)) < 1e-12


def metrics() -> list[tuple[float, str]]:
    """Of integers and booleans, of half precision, of nothing."""
    net = convoy.parallelize(nn.Linear(4, 3), "sample=2", torch.zeros(2, 4))
    labels = torch.arange(3 + torch.distributed.get_rank())
    with torch.inference_mode():
        found = [
            global_mean(net, labels == 0),
            global_mean(net, labels),
            global_mean(net, labels.to(torch.bfloat16)),
            global_mean(net, labels.double(), 2),
            global_mean(net, labels, torch.zeros(2)),
            global_mean(net, torch.zeros(0)),
        ]
    return [(x.item(), str(x.dtype)) for x in found]


def test_metrics_are_the_same_on_every_rank() -> None:
    first, second = run_ranks(metrics, 2)
    values, types = zip(*first, strict=True)
    assert str(first) == str(second) and values[4] == float("inf") and values[5] != values[5]
    assert values[:4] == pytest.approx((2 / 7, 9 / 7, 9 / 7, 9 / 4))
    assert types == ("torch.float32",) * 3 + ("torch.float64",) + ("torch.float32",) * 2


def test_wrong_values_and_penalties_are_refused() -> None:
    net = convoy.parallelize(nn.Linear(4, 3), "serial", torch.zeros(2, 4))
    for words, call, *args in (
        ("real numbers", global_mean, net, torch.zeros(2, dtype=torch.complex64)),
        ("real numbers", global_mean, net, 1.0),
        ("not parallelized", global_mean, nn.Linear(4, 3), torch.zeros(2)),
        ("'conv*': their names are the plain network's: weight, bias", penalty, net, len, ("weight", "conv*")),
        ("but it returned a tensor of shape [3, 4]", penalty, net, lambda weights: weights["weight"]),
        ("scalar tensor, but it returned float", penalty, net, lambda weights: 1.0),
    ):
        assert words in refused(call, *args)
