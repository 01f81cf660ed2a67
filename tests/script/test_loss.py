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
Loss = Callable[[nn.Module | None, Any, Data, Data], Tensor]  # of a net (None: the plain one), outputs, data, weights


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


def mean(net: nn.Module | None, values: Tensor, count: Tensor | None = None) -> Tensor:
    """`global_mean`; of the plain network what it stands for."""
    if net is not None:
        return global_mean(net, values, count)
    return values.sum() / (values.numel() if count is None else count.sum())


def two_heads(net: nn.Module | None, outputs: Any, data: Data, weights: Data) -> Tensor:
    labels, seen = data["labels"], data["seen"]
    classes = F.cross_entropy(outputs[0], labels, ignore_index=-1, reduction="sum")
    position = F.smooth_l1_loss(outputs[1], data["positions"], reduction="none") * seen[:, None]
    return mean(net, classes, labels != -1) + 0.5 * mean(net, position, seen)


def dice(net: nn.Module | None, outputs: Any, data: Data, weights: Data) -> Tensor:
    """The ratio's denominator has a gradient too; and a function of several means."""
    chance, target = outputs[0].softmax(1)[:, 1], (data["labels"] == 1).double()
    return 1 - 2 * mean(net, chance * target, chance + target) + mean(net, chance).log() ** 2


def norms(weights: Data) -> Tensor:
    """No sums over elements."""
    return sum(weight.norm() for weight in weights.values()) * weights["classes.weight"].norm()


def penalized(net: nn.Module | None, outputs: Any, data: Data, weights: Data) -> Tensor:
    return mean(net, outputs[0].square()) + (norms(weights) if net is None else penalty(net, norms))


def orthogonal(net: nn.Module | None, outputs: Any, data: Data, weights: Data) -> Tensor:
    """Some weights alone are gathered."""

    def of_hidden(weights: Data) -> Tensor:
        return (weights["hidden.weight"] @ weights["hidden.weight"].T - torch.eye(10).double()).square().sum()

    squared = mean(net, outputs[0].square())
    return squared + (of_hidden(weights) if net is None else penalty(net, of_hidden, "hid*.weight"))


def each_alone(net: nn.Module | None, outputs: Any, data: Data, weights: Data) -> Tensor:
    """The control: a mean for each rank, as one would write it."""
    return F.cross_entropy(outputs[0], data["labels"], ignore_index=-1)


def plainly_penalized(net: nn.Module | None, outputs: Any, data: Data, weights: Data) -> Tensor:
    """The other control: of the ranks' own weights, as one would write it."""
    return mean(net, outputs[0].square()) + norms(weights if net is None else dict(net.named_parameters()))


def batch(samples: int = 8) -> Data:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, CLASSES, (samples,), generator=generator)
    labels[:4:3] = -1  # two of the first rank's in an uneven division
    labels[5:] = -1  # and all of the second's
    images = torch.randn(samples, 3, 6, 6, dtype=torch.float64, generator=generator)
    positions = torch.rand(samples, 2, dtype=torch.float64, generator=generator)
    return {"x": images, "labels": labels, "positions": positions, "seen": torch.arange(samples) % 3 > 0}


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


def built(plan: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A plain network in float64, whose batch norm has a frozen bias, and its copy under a plan."""
    torch.manual_seed(0)
    serial = TwoHeads().double()
    serial.norm.bias.requires_grad_(False)
    return serial, convoy.parallelize(copy.deepcopy(serial), plan, batch()["x"][:2], **options)


def errors(plan: str, sizes: tuple[int, ...], losses: list[Loss], kind: str = "mean") -> list[tuple[float, float]]:
    """Of each loss and of its gradients."""
    results = []
    for loss in losses:
        serial, net = built(plan, loss=kind, checks=plan != "sample=2")
        mine = own(net, batch(), sizes)
        weights = {name: p for name, p in serial.named_parameters() if p.requires_grad}
        want = loss(None, serial(batch()["x"]), batch(), weights)
        got = loss(net, net(mine["x"]), mine, weights)
        for value in (want, got):
            value.backward()
        results.append((abs(got.item() - want.item()), difference(net, serial)))
    return results


def worst(plan: str, sizes: tuple[int, ...], *args: Any) -> float:
    world = 4 if "," in plan else 2
    return max(error for ranks in run_ranks(errors, world, plan, sizes, *args) for pair in ranks for error in pair)


@pytest.mark.parametrize(
    ("plan", "sizes"),
    [
        ("sample=2", (5, 3)),
        ("sample=2", (8, 0)),
        ("owt=2", (5, 3)),
        ("channel=2", (8,)),
        pytest.param("sample=2,filter=2", (5, 3), marks=pytest.mark.slow),
    ],
)
def test_means_and_penalties_are_those_of_one_device(plan: str, sizes: tuple[int, ...]) -> None:
    assert worst(plan, sizes, [two_heads, dice, penalized, orthogonal]) < 1e-12
    if plan == "owt=2":
        assert worst(plan, sizes, [two_heads], "part") < 1e-12


def test_means_and_penalties_of_each_rank_alone_are_other_losses() -> None:
    for alone, plain in run_ranks(errors, 2, "sample=2", (4, 4), [each_alone, plainly_penalized]):
        assert min(alone) > 1e-3 and plain[1] > 1e-3


def two_passes() -> float:
    """Two passes of different division, and one without gradients in between; means of means are refused."""
    serial, net = built("sample=2")
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
