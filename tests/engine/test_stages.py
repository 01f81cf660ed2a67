"""A network in stages is the network on one device: plain loops, both schedules, and what is refused."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactness import build, relative, run, worst_gradient
from torch import Tensor, nn

import convoy
from convoy.plans.plan import Plan
from ranks import RankFailed, run_ranks
from small_nets import SMALL_NETS

PLANS = ["stage=2", "stage=2,sample=2", "stage=2,filter=2", "stage=3"]


@pytest.mark.parametrize("net", ["lenet", *SMALL_NETS])
def test_stages_are_exact(net: str) -> None:
    check(net, "stage=2")


@pytest.mark.parametrize("plan", [*PLANS[1:], pytest.param("sample=2,stage=2", marks=pytest.mark.slow)])
def test_stages_beside_other_strategies_are_exact(plan: str) -> None:
    check("dense", plan)


@pytest.mark.parametrize(("net", "plan"), [("dense", "stage=2"), ("dropping", "stage=2,sample=2")])
def test_microbatches_have_statistics_of_their_own(net: str, plan: str) -> None:
    check(net, plan, batches=(8, 7), microbatches=3)


def test_ranks_without_samples_join_in() -> None:
    check("dense", "stage=2,sample=2", batches=(2, 1, 5))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "net",
    [
        *(pytest.param(n, marks=pytest.mark.matrix) for n in ("alexnet", "vgg11_bn", "resnet50", "googlenet")),
        "resnet18",
    ],
)
def test_larger_nets_are_exact(net: str) -> None:
    check(net, "stage=2", steps=3 if net in ("resnet50", "googlenet") else 5)


def check(net: str, plan: str, **options: Any) -> None:
    for found in run_ranks(run, Plan.parse(plan).mesh.num_devices, net, plan, options, timeout=150):
        assert found.ok, found


def parts_with_sync() -> None:
    model = SMALL_NETS["dense"]()
    convoy.parallelize(model, "stage=2", example=torch.zeros(4, 3, 8, 8), microbatches=2)


def test_batch_norm_over_the_batch_refuses_parts() -> None:
    with pytest.raises(
        RankFailed, match=r"batch norm over the global batch .*microbatches=1 .*batch_norm='microbatch'"
    ):
        run_ranks(parts_with_sync, 2)


def twice() -> None:
    net = convoy.parallelize(build("lenet")[0], "stage=2", example=torch.zeros(4, 1, 28, 28, dtype=torch.float64))
    total = net(torch.zeros(4, 1, 28, 28, dtype=torch.float64)).sum()
    total.backward(retain_graph=True)
    total.backward()


def test_a_second_backward_pass_is_refused() -> None:
    with pytest.raises(RankFailed, match="add the losses up and call it once"):
        run_ranks(twice, 2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)).relu())


def tied() -> None:
    convoy.parallelize(Tied(), {"mesh": {"stage": 2}, "layers": {}, "stages": ["middle"]}, example=torch.zeros(2, 4))


def test_weights_of_two_stages_are_refused_by_name() -> None:
    with pytest.raises(RankFailed, match=r"layers first and last share first.weight, and are in stages 1 and 2"):
        run_ranks(tied, 2)


class ReturnsEarlyWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.last(self.first(x).relu()), self.first.weight


def returns_early_weight() -> None:
    convoy.parallelize(ReturnsEarlyWeight(), {"mesh": {"stage": 2}, "stages": ["last"]}, example=torch.zeros(2, 4))


def test_a_weight_of_an_early_stage_is_not_returned() -> None:
    with pytest.raises(RankFailed, match=r"returns first.weight, which stage 1 has and the last one lacks"):
        run_ranks(returns_early_weight, 2)


class TwoHeads(nn.Module):
    """Two outputs, one of which the first stage gives, and an argument that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(2)
        self.stem = nn.Conv2d(3, 4, 3)
        self.early = nn.Linear(4, 5)
        self.last = nn.Linear(4, 5)

    def forward(self, x: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        x = self.stem(self.pool(x)).mean((2, 3))
        return self.last(x.relu() * factor), self.early(x)


def two_heads(first: str, args: tuple[Any, ...] = (), **options: Any) -> tuple[nn.Module, nn.Module]:
    """In two stages, of which the second begins at layer `first`, and on one device."""
    plan = {"mesh": {"stage": 2}, "layers": {}, "stages": [first]}
    plain = TwoHeads().double()
    example = torch.zeros(4, 3, 8, 8, dtype=torch.float64)
    return convoy.parallelize(copy.deepcopy(plain), plan, (example, *args), **options), plain


def gradients_come_and_go() -> list[float]:
    nets = two_heads("stem")
    x = torch.randn(8, 3, 8, 8, dtype=torch.float64)
    worst = []
    for layer, frozen, of_input in [
        ("", False, False),
        ("", False, True),
        ("stem", True, False),
        ("stem", False, True),
    ]:
        inputs = [x.clone().requires_grad_(of_input) for _ in nets]
        for net, own in zip(nets, inputs, strict=True):
            net.zero_grad()
            net.get_submodule(layer).requires_grad_(not frozen)
            sum(each.square().mean() for each in net(own)).backward()
        worst.append(worst_gradient(*nets))
        if of_input:
            worst.append(relative(inputs[0].grad, inputs[1].grad, 1.0))
    return worst


@pytest.mark.slow
def test_what_has_a_gradient_may_change_from_pass_to_pass() -> None:
    for found in run_ranks(gradients_come_and_go, 2):
        assert max(found) < 1e-12, found


def two_passes() -> float:
    nets = two_heads("last")
    x = torch.randn(8, 3, 8, 8, dtype=torch.float64)
    for net in nets:
        first, second = net(x), net(x.flip(0))
        sum((a * b).mean() for a, b in zip(first, second, strict=True)).backward()
    return worst_gradient(*nets)


def test_a_loss_may_need_several_passes() -> None:
    for found in run_ranks(two_passes, 2):
        assert found < 1e-12, found


def heads_are_left_out(schedule: str) -> list[float]:
    nets = two_heads("last", (3.0,))
    x, y = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randint(0, 5, (8,))
    worst = []
    for used in [(0, 1), (0,), (1,)]:
        for net in nets:
            net.zero_grad()

            def loss(outputs: Any, labels: Tensor, used: tuple[int, ...] = used) -> Tensor:
                return sum(F.cross_entropy(outputs[number], labels) for number in used)  # type: ignore[return-value]

            if schedule == "loop" or net is nets[1]:
                loss(net(x, 3.0), y).backward()
            else:
                convoy.forward_backward(net, (x, 3.0), y, loss, schedule=schedule)  # type: ignore[arg-type]
        worst.append(worst_gradient(*nets))
    return worst


@pytest.mark.parametrize("schedule", ["loop", "1f1b", "zero-bubble"])
def test_layers_that_the_loss_leaves_out_have_no_gradient(schedule: str) -> None:
    for found in run_ranks(heads_are_left_out, 2, schedule):
        assert max(found) < 1e-12, found


def changes_its_mind() -> None:
    net, _ = two_heads("last")
    passes = iter(range(8))

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs[0], labels) + (outputs[1].sum() if next(passes) else 0)

    x = torch.randn(8, 3, 8, 8, dtype=torch.float64)
    convoy.forward_backward(net, x, torch.zeros(8, dtype=torch.int64), loss)


def test_a_loss_of_other_outputs_for_some_parts_is_refused() -> None:
    with pytest.raises(RankFailed, match=r"a value of the network itself for one part .* same outputs"):
        run_ranks(changes_its_mind, 2)


class WithPenalty(nn.Module):
    """Returns a tensor without samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.last(self.first(x).relu()), self.last.weight.sum(0)


def without_samples() -> float:
    plain = WithPenalty().double()
    x = torch.randn(8, 4, dtype=torch.float64)
    net = convoy.parallelize(copy.deepcopy(plain), "stage=2", x[:4])
    for each in (net, plain):
        outputs = each(x)
        (outputs[0].square().mean() + outputs[1].square().sum()).backward()
    return worst_gradient(net, plain)


@pytest.mark.slow
def test_a_returned_tensor_without_samples_is_whole() -> None:
    for found in run_ranks(without_samples, 2):
        assert found < 1e-12


class Unsendable(nn.Module):
    """Its second layer gives what stages cannot send."""

    def __init__(self, function: str, *args: Any, returns: bool = False) -> None:
        super().__init__()
        self.first, self.strange, self.plain = nn.Conv2d(3, 4, 3), Calls(function, *args), Calls("abs")
        self.last = nn.LazyLinear(4)
        self.returns = returns

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        strange = self.strange(self.first(x))
        y = self.last(self.plain(strange).flatten(1))
        return (y, strange) if self.returns else y


class Calls(nn.Module):
    """A method of tensors as a layer."""

    def __init__(self, function: str, *args: Any) -> None:
        super().__init__()
        self.function, self.args = function, args

    def forward(self, x: Tensor) -> Tensor:
        return getattr(torch if hasattr(torch, self.function) else torch.fft, self.function)(x, *self.args)


NINE = ("reshape", (-1, 1, 1, 1, 1, 1, 4, 6, 6))


def unsendable(begins: str, function: str, *args: Any) -> float:
    plain = Unsendable(function, *args)
    x = torch.randn(8, 3, 8, 8)
    plain(x)  # makes the last layer
    plain, x = plain.double(), x.double()
    net = convoy.parallelize(copy.deepcopy(plain), {"mesh": {"stage": 2}, "stages": [begins]}, x[:4])
    for each in (net, plain):
        each(x).square().mean().backward()
    return worst_gradient(net, plain)


@pytest.mark.parametrize(("call", "what"), [(("fft2",), "complex128"), (NINE, "of 9 dimensions")])
def test_what_stages_cannot_send_is_refused_at_its_cut_alone(call: tuple[Any, ...], what: str) -> None:
    sentence = f"layer strange gives a tensor that is {what}, which stage 1 cannot send to stage 2: begin a stage elsew"
    with pytest.raises(RankFailed, match=sentence):
        run_ranks(unsendable, 2, "plain", *call)
    for found in run_ranks(unsendable, 2, "last", *call):
        assert found < 1e-12


def mistaken(kind: str) -> None:
    if kind == "complex":
        net, x = Unsendable("fft2", returns=True), torch.zeros(4, 3, 8, 8)
        net(x)
        convoy.parallelize(net, {"mesh": {"stage": 2}, "stages": ["strange"]}, x)(x)
    elif kind == "compiled":
        two_heads("last", compile=True)
    elif kind == "other samples":
        net = convoy.parallelize(
            nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 2)), "stage=2", torch.zeros(4, 3, 4)
        )
        net(torch.zeros(4, 3, 5))
    elif kind == "no parts":
        two_heads("last", microbatches=0)
    elif kind == "parts":
        convoy.parallelize(WithPenalty(), "stage=2", torch.zeros(4, 4), microbatches=2)
    else:
        net, _ = two_heads("last", microbatches=2)
        with torch.set_grad_enabled(kind != "no_grad"):
            targets = torch.zeros(8 if kind == "targets of others" else 4)
            losses = {
                "no loss": lambda y, x: None,
                "losses": lambda y, x: F.cross_entropy(y[0], x, reduction="none"),
                "detached": lambda y, x: F.cross_entropy(y[0].detach(), x),
                "hits": lambda y, x: (y[0].argmax(1) == x).sum(),
            }
            loss = losses.get(kind, lambda y, x: F.cross_entropy(y[0], x))
            given = torch.zeros(4, 3, 8, 8).double(), targets.long(), loss
            if kind == "later schedules":
                convoy.forward_backward(net, *given)
            if kind == "a loop" and convoy.rank():
                net(given[0])
            other = kind in ("schedules", "later schedules") and convoy.rank()
            convoy.forward_backward(net, *given, schedule="gpipe" if other else "1f1b")


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("other samples", r"cannot be run in training with samples of \[3, 5\] of .*: layer 1: .*; the example .* has"),
        ("no parts", r"microbatches=0 must be a whole number from 1"),
        ("parts", r"returns a tensor in which there are no samples, so a pass cannot be cut into 2 parts"),
        ("compiled", r"in stages is not compiled, .*: leave compile away, or choose a plan without stages"),
        ("complex", r"returns a tensor that is complex64, which the last stage cannot send to the others"),
        ("no_grad", r"call it outside of torch\.no_grad"),
        ("targets of others", r"given 4 samples, and a target of shape \[8\]: pass the targets of this rank's"),
        ("no loss", r"the loss function .* returned None: let it return a scalar"),
        ("losses", r"the loss function .* returned a tensor of shape \[\d\]: let it return a scalar"),
        ("detached", r"the loss function .* returned float64 without a gradient: let it return a real number"),
        ("hits", r"the loss function .* returned int64 without a gradient: let it return a real number"),
        ("schedules", r"in convoy.forward_backward with schedule='gpipe' while rank 0 is in .* with schedule='1f1b'"),
        (
            "later schedules",
            r"in convoy.forward_backward with schedule='gpipe' while rank 0 is in .* with schedule='1f1b'",
        ),
        (
            "a loop",
            r"rank 1 is in a pass of the network while rank 0 is in .*: all ranks call convoy.forward_backward with",
        ),
    ],
)
def test_mistakes_are_said(kind: str, sentence: str) -> None:
    with pytest.raises(RankFailed, match=sentence):
        run_ranks(mistaken, 2, kind)
