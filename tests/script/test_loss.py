"""Means over the global batch and penalties on the weights have, under every plan, one device's value and gradients."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy.errors import ConvoyError
from convoy.script.loss import global_mean, penalty
from ranks import run_ranks

CLASSES = 6
PLANS = [
    ("serial", (8,)),
    ("sample=2", (4, 4)),
    ("sample=2", (5, 3)),
    ("sample=2", (8, 0)),
    ("filter=2", (8,)),
    ("owt=2", (5, 3)),
    ("sample=2,filter=2", (5, 3)),
]


class Segmenting(nn.Module):
    """A class for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(F.silu(self.norm(self.first(x))))))


class TwoHeads(nn.Module):
    """A class and a position for every picture."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.hidden = nn.Linear(8 * 4, 10)
        self.classes = nn.Linear(10, CLASSES)
        self.position = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.adaptive_avg_pool2d(F.silu(self.norm(self.first(x))), 2).flatten(1)
        x = torch.tanh(self.hidden(x))
        return self.classes(x), self.position(x)


class Contrasting(nn.Module):
    """Compares every picture with every other in its forward pass: a loss for each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        z = F.normalize(self.last(torch.tanh(self.first(x)).mean((2, 3))), dim=1)
        same = (labels[:, None] == labels[None]).to(z.dtype)
        return -(F.log_softmax(z @ z.T / self.temperature, 1) * same).sum(1) / same.sum(1)


class Unforeseen(TwoHeads):
    """Asks for the numbers, so that it cannot be captured."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x if x.sum() > -1e9 else -x)


Loss = Callable[[nn.Module | None, object, dict[str, Tensor]], Tensor]


def mean(net: nn.Module | None, values: Tensor, count: Tensor | float | None = None) -> Tensor:
    """`global_mean`; of the plain network what it stands for."""
    if net is not None:
        return global_mean(net, values, count)
    return values.sum() / (values.numel() if count is None else torch.as_tensor(count).sum())


def ignoring(net, outputs, data):
    if net is None:
        return F.cross_entropy(outputs[0], data["labels"], ignore_index=-1)
    losses = F.cross_entropy(outputs[0], data["labels"], ignore_index=-1, reduction="sum")
    return global_mean(net, losses, data["labels"] != -1)


def weighted(net, outputs, data):
    weights = torch.arange(1.0, CLASSES + 1, dtype=torch.float64)
    if net is None:
        return F.cross_entropy(outputs[0], data["labels"].clamp(min=0), weights)
    labels = data["labels"].clamp(min=0)
    return global_mean(net, F.cross_entropy(outputs[0], labels, weights, reduction="sum"), weights[labels])


def smoothed(net, outputs, data):
    weights = torch.arange(1.0, CLASSES + 1, dtype=torch.float64)
    options = {"weight": weights, "label_smoothing": 0.1, "ignore_index": -1}
    if net is None:
        return F.cross_entropy(outputs[0], data["labels"], **options)
    losses = F.cross_entropy(outputs[0], data["labels"], **options, reduction="none")
    labels = data["labels"]
    return global_mean(net, losses, weights[labels.clamp(min=0)] * (labels != -1))


def two_heads(net, outputs, data):
    labels, seen = data["labels"], data["seen"]
    classes = F.cross_entropy(outputs[0], labels, ignore_index=-1, reduction="sum")
    position = F.smooth_l1_loss(outputs[1], data["positions"], reduction="none") * seen[:, None]
    return mean(net, classes, labels != -1) + 0.5 * mean(net, position, seen)


def plain_mean(net, outputs, data):
    losses = F.cross_entropy(outputs[0], data["labels"].clamp(min=0), reduction="none")
    return mean(net, losses)


def pixels(net, outputs, data):
    if net is None:
        return F.cross_entropy(outputs, data["pixels"], ignore_index=-1)
    losses = F.cross_entropy(outputs, data["pixels"], ignore_index=-1, reduction="none")
    return global_mean(net, losses, data["pixels"] != -1)


def dice(net, outputs, data):
    """The ratio's denominator has a gradient too; and a function of several means."""
    chance, target = outputs.softmax(1)[:, 1], (data["pixels"] == 1).double()
    return 1 - 2 * mean(net, chance * target, chance + target) + mean(net, chance).log() ** 2


def each_alone(net, outputs, data):
    """The control: a mean for each rank, as one would write it."""
    return F.cross_entropy(outputs[0], data["labels"], ignore_index=-1)


def batch(samples: int = 8) -> dict[str, Tensor]:
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


def own(net: nn.Module, data: dict[str, Tensor], sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """This rank's samples of a batch, with so many for each sample rank."""
    place = net._convoy.sample_rank
    start = sum(sizes[:place])
    return {name: tensor[start : start + sizes[place]] for name, tensor in data.items()}


def difference(net: nn.Module, serial: nn.Module) -> float:
    """The largest error of a gradient, relative to the largest gradient."""
    got = convoy.gradients(net)
    want = {name: p.grad for name, p in serial.named_parameters() if p.grad is not None}
    assert got.keys() == want.keys()
    largest = max(gradient.abs().max().item() for gradient in want.values())
    return max((got[name] - want[name]).abs().max().item() for name in want) / largest


def compare(build: type[nn.Module], losses: list[Loss], plan: str, sizes: tuple[int, ...], kind: str = "mean"):
    """Errors of each loss and of its gradients."""
    return {loss.__name__: compare_one(build, loss, plan, sizes, kind) for loss in losses}


def compare_one(build: type[nn.Module], loss: Loss, plan: str, sizes: tuple[int, ...], kind: str):
    torch.manual_seed(0)
    serial = build().double()
    data = batch()
    example = torch.zeros(2, 3, 6, 6, dtype=torch.float64)
    net = convoy.parallelize(copy.deepcopy(serial), plan, example, loss=kind)
    want = loss(None, serial(data["x"]), data)
    want.backward()
    mine = own(net, data, sizes)
    got = loss(net, net(mine["x"]), mine)
    got.backward()
    return abs(got.item() - want.item()), difference(net, serial)


def world(plan: str) -> int:
    return {"serial": 1}.get(plan, 4 if "," in plan else 2)


def worst(ranks: list[dict[str, tuple[float, float]]]) -> tuple[float, str]:
    """The largest error on any rank, and of which loss."""
    return max((error, name) for errors in ranks for name, pair in errors.items() for error in pair)


slow = pytest.mark.slow
MOST = [*PLANS[1:4:2], PLANS[5]]
"""Uneven samples, samples of one rank alone, and filters beside samples."""


@pytest.mark.parametrize(("plan", "sizes"), [pytest.param(*each, marks=() if each in MOST else slow) for each in PLANS])
def test_means_and_penalties_are_those_of_one_device(plan: str, sizes: tuple[int, ...]) -> None:
    losses = [ignoring, weighted, smoothed, two_heads, plain_mean]
    assert worst(run_ranks(compare, world(plan), TwoHeads, losses, plan, sizes)) < (1e-12,)
    assert worst(run_ranks(compare, world(plan), Segmenting, [pixels, dice], plan, sizes)) < (1e-12,)
    functions = [squares, absolute, norms, spectral, orthogonal]
    assert worst(run_ranks(penalized, world(plan), TwoHeads, functions, plan, sizes)) < (1e-12,)


@pytest.mark.parametrize("plan", ["owt=2", pytest.param("sample=2,filter=2", marks=slow)])
def test_networks_that_run_layer_by_layer_and_losses_that_are_added_as_they_are(plan: str) -> None:
    assert worst(run_ranks(compare, world(plan), Unforeseen, [ignoring], plan, (5, 3))) < (1e-12,)
    assert worst(run_ranks(penalized, world(plan), Unforeseen, [norms], plan, (5, 3))) < (1e-12,)
    assert worst(run_ranks(compare, world(plan), TwoHeads, [ignoring], plan, (5, 3), "part")) < (1e-12,)


def contrasted(plan: str, sizes: tuple[int, ...]) -> float:
    torch.manual_seed(0)
    serial = Contrasting().double()
    data = batch()
    examples = (data["x"][:2], data["labels"][:2])
    net = convoy.parallelize(copy.deepcopy(serial), plan, examples)
    serial(data["x"], data["labels"]).mean().backward()
    mine = own(net, data, sizes)
    global_mean(net, net(mine["x"], mine["labels"])).backward()
    return difference(net, serial)


@pytest.mark.parametrize(("plan", "sizes"), [("sample=2", (5, 3)), pytest.param("owt=2", (4, 4), marks=slow)])
def test_comparisons_within_the_batch_belong_into_the_network(plan: str, sizes: tuple[int, ...]) -> None:
    assert max(run_ranks(contrasted, 2, plan, sizes)) < 1e-12


def two_passes() -> float:
    """Two passes of different division, and one without gradients in between."""
    torch.manual_seed(0)
    serial = TwoHeads().double()
    data = batch()
    net = convoy.parallelize(copy.deepcopy(serial), "sample=2", torch.zeros(2, 3, 6, 6, dtype=torch.float64))
    losses = []
    for sizes in ((5, 3), (1, 7)):
        mine = own(net, data, sizes)
        losses.append(net(mine["x"])[1].square().sum(1))
    with torch.no_grad():
        net(data["x"])
    (2 * serial(data["x"])[1].square().sum(1).mean()).backward()
    with pytest.raises(ConvoyError, match="take the mean of each pass and add the means"):
        global_mean(net, torch.cat(losses), 8.0)
    (global_mean(net, losses[0]) + global_mean(net, losses[1])).backward()
    return difference(net, serial)


def test_every_mean_knows_its_pass() -> None:
    assert max(run_ranks(two_passes, 2)) < 1e-12


def nested(plan: str) -> float:
    torch.manual_seed(0)
    net = convoy.parallelize(TwoHeads().double(), plan, torch.zeros(2, 3, 6, 6, dtype=torch.float64))
    outputs = net(torch.ones(4, 3, 6, 6, dtype=torch.float64))[1]
    inner = global_mean(net, outputs)
    for each in (inner, penalty(net, lambda w: w["first.weight"].sum())) if plan != "serial" else ():
        with pytest.raises(ConvoyError, match="would count several times"):
            global_mean(net, (outputs - each).square())
    return global_mean(net, (outputs - (inner if plan == "serial" else inner.detach())).square()).item()


def test_a_mean_of_what_depends_on_a_mean_is_refused() -> None:
    first, second = run_ranks(nested, 2, "sample=2")
    assert first == second and nested("serial") > 0


def metrics() -> list:
    """Of integers and booleans, of half precision, of nothing."""
    net = convoy.parallelize(nn.Linear(4, 3), "sample=2", torch.zeros(2, 4))
    rank = torch.distributed.get_rank()
    labels = torch.arange(3 + rank)
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
    assert str(first) == str(second)
    values, types = zip(*first, strict=True)
    assert values[:4] == pytest.approx((2 / 7, 9 / 7, 9 / 7, 9 / 4))
    assert values[4] == float("inf")
    assert values[5] != values[5]
    assert types == ("torch.float32",) * 3 + ("torch.float64",) + ("torch.float32",) * 2


def squares(weights: dict[str, Tensor]) -> Tensor:
    return 1e-1 * sum(weight.square().sum() for weight in weights.values())


def absolute(weights: dict[str, Tensor]) -> Tensor:
    return 1e-1 * sum(weight.abs().sum() for weight in weights.values())


def norms(weights: dict[str, Tensor]) -> Tensor:
    """Not a sum over elements."""
    return sum(weight.norm() for weight in weights.values()) * weights["classes.weight"].norm()


def spectral(weights: dict[str, Tensor]) -> Tensor:
    return sum(torch.linalg.matrix_norm(w.flatten(1), 2) for w in weights.values() if w.dim() > 1)


def orthogonal(weights: dict[str, Tensor]) -> Tensor:
    w = weights["hidden.weight"]
    return (w @ w.T - torch.eye(len(w), dtype=w.dtype)).square().sum()


def penalized(build, functions, plan: str, *options):
    """Errors of the loss and of its gradients, for each penalty."""
    return {function.__name__: penalized_by(build, function, plan, *options) for function in functions}


def penalized_by(
    build, function, plan: str, sizes: tuple[int, ...], kind: str = "mean", names="*", plain: bool = False
):
    """Of two backward passes; the loss beside the penalty is a mean over the global batch, or over each rank's."""
    torch.manual_seed(0)
    serial = build().double()
    serial.norm.bias.requires_grad_(False)
    data = batch()
    example = torch.zeros(2, 3, 6, 6, dtype=torch.float64)
    net = convoy.parallelize(copy.deepcopy(serial), plan, example, loss=kind, checks=not plain)
    mine = own(net, data, sizes)
    error = 0.0
    for each in (False, True) if kind == "mean" and 0 not in sizes else (False,):
        trained = {name: p for name, p in serial.named_parameters() if p.requires_grad}
        want = serial(data["x"])[0].square().mean() + function(trained)
        want.backward()
        squared = net(mine["x"])[0].square()
        own_penalty = function(dict(net.named_parameters())) if plain else penalty(net, function, names)
        loss = (squared.mean() if each else global_mean(net, squared)) + own_penalty
        loss.backward()
        if not each:
            error = abs(loss.item() - want.item())
    return error, difference(net, serial)


@pytest.mark.parametrize(
    ("plan", "sizes"), [("channel=2", (8,)), ("height=2", (8,)), pytest.param("replicate=2", (8,), marks=slow)]
)
def test_penalties_under_more_plans(plan: str, sizes: tuple[int, ...]) -> None:
    assert worst(run_ranks(penalized, world(plan), TwoHeads, [norms], plan, sizes, "part")) < (1e-12,)
    only = ("mean", "hid*.weight")  # some weights alone are gathered
    assert worst(run_ranks(penalized, world(plan), TwoHeads, [orthogonal], plan, sizes, *only)) < (1e-12,)


def test_means_and_penalties_of_each_rank_alone_are_other_losses() -> None:
    for errors in run_ranks(compare, 2, TwoHeads, [each_alone], "sample=2", (4, 4)):
        assert min(errors["each_alone"]) > 1e-3
    for errors in run_ranks(penalized, 2, TwoHeads, [squares], "sample=2", (4, 4), "mean", "*", True):
        assert errors["squares"][1] > 1e-3


def test_wrong_values_and_penalties_are_refused() -> None:
    net = convoy.parallelize(nn.Linear(4, 3), "serial", torch.zeros(2, 4))
    for values in (torch.zeros(2, dtype=torch.complex64), 1.0):
        with pytest.raises(ConvoyError, match="real numbers"):
            global_mean(net, values)  # type: ignore[arg-type]
    with pytest.raises(ConvoyError, match="not parallelized"):
        global_mean(nn.Linear(4, 3), torch.zeros(2))
    with pytest.raises(ConvoyError, match=r"'conv\*': their names are .*: weight, bias$"):
        penalty(net, squares, names=("weight", "conv*"))
    with pytest.raises(ConvoyError, match=r"scalar tensor, but it returned a tensor of shape \[3, 4\]"):
        penalty(net, lambda weights: weights["weight"])
    with pytest.raises(ConvoyError, match="scalar tensor, but it returned float"):
        penalty(net, lambda weights: 1.0)  # type: ignore[arg-type,return-value]
