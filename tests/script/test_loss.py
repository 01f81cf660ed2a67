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


class Segmenting(nn.Module):
    """A class for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(F.silu(self.norm(self.first(x))))))


class Contrasting(nn.Module):
    """Compares every picture with every other in its forward pass: a loss for each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 5)
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        z = F.normalize(self.last(torch.tanh(self.first(x)).mean((2, 3))), dim=1)
        same = (labels[:, None] == labels[None]).to(z.dtype)
        return -(F.log_softmax(z @ z.T / self.temperature, 1) * same).sum(1) / same.sum(1)


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


def plain_mean(net: nn.Module | None, outputs: Any, data: Data) -> Tensor:
    return mean(net, F.cross_entropy(outputs[0], data["labels"].clamp(min=0), reduction="none"))


def pixels(net: nn.Module | None, outputs: Any, data: Data) -> Tensor:
    if net is None:
        return F.cross_entropy(outputs, data["pixels"], ignore_index=-1)
    losses = F.cross_entropy(outputs, data["pixels"], ignore_index=-1, reduction="none")
    return global_mean(net, losses, data["pixels"] != -1)


def dice(net: nn.Module | None, outputs: Any, data: Data) -> Tensor:
    """The ratio's denominator has a gradient too; and a function of several means."""
    chance, target = outputs.softmax(1)[:, 1], (data["pixels"] == 1).double()
    return 1 - 2 * mean(net, chance * target, chance + target) + mean(net, chance).log() ** 2


def contrast(net: nn.Module | None, outputs: Any, data: Data) -> Tensor:
    return mean(net, outputs)


def each_alone(net: nn.Module | None, outputs: Any, data: Data) -> Tensor:
    """The control: a mean for each rank, as one would write it."""
    return F.cross_entropy(outputs[0], data["labels"], ignore_index=-1)


Penalty = Callable[[Data], Tensor]
PENALTIES: dict[str, Penalty] = {
    "squares": lambda weights: 1e-1 * sum(weight.square().sum() for weight in weights.values()),
    "absolute": lambda weights: 1e-1 * sum(weight.abs().sum() for weight in weights.values()),
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
    labels[:4:3] = -1  # half of the first rank's in an even division, none of the second's
    pixels = torch.randint(0, CLASSES, (samples, 6, 6), generator=generator)
    pixels[torch.rand(samples, 6, 6, generator=generator) < 0.4] = -1
    pixels[5:] = -1  # the second rank has no pixel that counts in an uneven division
    return {
        "x": torch.randn(samples, 3, 6, 6, dtype=torch.float64, generator=generator),
        "labels": labels,
        "positions": torch.rand(samples, 2, dtype=torch.float64, generator=generator),
        "seen": torch.arange(samples) % 3 > 0,
        "pixels": pixels,
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
    serial, data = build().double(), batch()
    if hasattr(serial, "norm"):
        serial.norm.bias.requires_grad_(False)
    example = (data["x"][:2], data["labels"][:2]) if build is Contrasting else data["x"][:2]
    return serial, convoy.parallelize(copy.deepcopy(serial), plan, example, **options)


def errors(
    plan: str, sizes: tuple[int, ...], cases: list[tuple[type[nn.Module], Any]], loss: str = "mean", checks: bool = True
) -> list[tuple[float, float]]:
    """Of each loss and of its gradients. A loss is a function here, or arguments of `penalized`."""
    found = []
    for build, case in cases:
        serial, net = built(build, plan, loss=loss, checks=checks)
        data = batch()
        mine = own(net, data, sizes)
        takes = [[of["x"], of["labels"]] if build is Contrasting else [of["x"]] for of in (data, mine)]
        weights = (
            [{name: p for name, p in serial.named_parameters() if p.requires_grad}] if isinstance(case, tuple) else []
        )
        function = penalized(*case) if isinstance(case, tuple) else case
        want, got = function(None, serial(*takes[0]), data, *weights), function(net, net(*takes[1]), mine, *weights)
        for value in (want, got):
            value.backward()
        of_ranks = isinstance(case, tuple) and len(case) > 2 and case[2]
        found.append((0.0 if of_ranks else abs(got.item() - want.item()), difference(net, serial)))
    return found


def worst(plan: str, sizes: tuple[int, ...], *args: Any) -> float:
    world = 1 if plan == "serial" else 4 if "," in plan else 2
    return max(error for ranks in run_ranks(errors, world, plan, sizes, *args) for pair in ranks for error in pair)


slow = pytest.mark.slow
ALL = [(TwoHeads, loss) for loss in (ignoring, smoothed, two_heads, plain_mean)]
ALL += [(Segmenting, pixels), (Segmenting, dice), *((TwoHeads, (name,)) for name in PENALTIES)]


@pytest.mark.parametrize(
    ("plan", "sizes"),
    [
        ("sample=2", (5, 3)),
        ("sample=2", (8, 0)),
        ("owt=2", (5, 3)),
        pytest.param("serial", (8,), marks=slow),
        pytest.param("filter=2", (8,), marks=slow),
        pytest.param("sample=2,filter=2", (5, 3), marks=slow),
    ],
)
def test_means_and_penalties_are_those_of_one_device(plan: str, sizes: tuple[int, ...]) -> None:
    assert worst(plan, sizes, ALL) < 1e-12
    if 0 not in sizes:
        more = [(TwoHeads, ("squares", "*", True)), (Unforeseen, ignoring), (Unforeseen, ("norms",))]
        assert worst(plan, sizes, [*more, (Contrasting, contrast)]) < 1e-12
        assert worst(plan, sizes, [(TwoHeads, ignoring)], "part") < 1e-12


@pytest.mark.parametrize("plan", ["channel=2", "height=2", pytest.param("replicate=2", marks=slow)])
def test_penalties_under_more_plans(plan: str) -> None:
    assert worst(plan, (8,), [(TwoHeads, ("norms",))], "part") < 1e-12
    assert worst(plan, (8,), [(TwoHeads, ("orthogonal", "hid*.weight"))]) < 1e-12  # some weights alone are gathered


def test_means_and_penalties_of_each_rank_alone_are_other_losses() -> None:
    cases = [(TwoHeads, each_alone), (TwoHeads, ("squares", "*", False, True))]
    for alone, plain in run_ranks(errors, 2, "sample=2", (4, 4), cases, "mean", False):
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
