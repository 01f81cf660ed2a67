"""A network in stages is the network on one device: plain loops, both schedules, and what is refused."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactness import build, relative, run
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import convoy
from convoy.comm.collectives import Pending
from convoy.comm.stage_links import Sent
from convoy.engine import guard
from convoy.engine.network import network_of
from convoy.engine.stages import StagedNetwork
from convoy.ops.postponed import PostponedGradients
from convoy.plans.plan import Plan
from convoy.plans.schedule import actions, bubble
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


def test_a_schedule_runs_forward_before_backward_and_both_in_order() -> None:
    assert actions("gpipe", 2, stage=0, stages=2) == [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)]
    for stage in range(3):
        order = actions("1f1b", 5, stage, 3)
        assert [part for kind, part in order if kind == "forward"] == list(range(5))
        assert [part for kind, part in order if kind == "backward"] == list(range(5))
        running = most = 0
        for kind, _ in order:
            running += 1 if kind == "forward" else -1
            most = max(most, running)
        assert most == 3 - stage
    assert bubble("1f1b", 8, 2) == pytest.approx(1 / 9)


def test_zero_bubble_computes_each_weight_gradient_once_and_after_its_backward_pass() -> None:
    for stages, parts in ((2, 1), (2, 4), (4, 3), (4, 9)):
        for stage in range(stages):
            back, weights = -1, -1
            for kind, part in actions("zero-bubble", parts, stage, stages):
                if kind == "backward":
                    assert part == back + 1
                    back = part
                elif kind == "weights":
                    assert weights < part <= back
                    weights = part
            assert back == weights == parts - 1
    assert bubble("zero-bubble", 8, 2) == pytest.approx(1 / 25)


class Branches(nn.Module):
    """A skip connection over two cuts, two outputs, one of which an early stage gives, and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.head = nn.Linear(6, 10)
        self.down = nn.Sequential(nn.Conv2d(6, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.deep = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(inplace=True), nn.Dropout(0.3))
        self.up = nn.ConvTranspose2d(8, 6, 2, 2)
        self.last = nn.Conv2d(12, 10, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        early = self.head(x.mean((2, 3)))
        y = self.deep(self.down(x))
        return self.last(torch.cat((self.up(y) + x, x), 1)).mean((2, 3)), early


def loss_of(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], labels) + 0.3 * F.cross_entropy(outputs[1], labels)


def scheduled(plan: Any, schedule: str, microbatches: int, sabotage: str = "") -> list[float]:
    """The worst differences of three updates from a plain loop over the same parts: losses, inputs, weights."""
    torch.manual_seed(0)
    model = Branches().double()
    plain = copy.deepcopy(model)
    context = convoy.engine.prepare(plain, 5, "sync")
    x = torch.randn(9, 3, 8, 8, dtype=torch.float64)
    net = convoy.parallelize(model, plan, example=x[:2], batch_norm="microbatch", seed=5, microbatches=microbatches)
    network = network_of(net)
    assert isinstance(network, StagedNetwork)
    if sabotage == "weights":  # those of the last part are left out
        before_last = PostponedGradients.compute
        PostponedGradients.compute = lambda self, last: before_last(self, min(last, microbatches - 2))  # type: ignore[method-assign]
    if sabotage == "parts":  # the second part of the batch is given twice
        before = network._announced

        def twice(*args: Any) -> Iterator[tuple[Tensor, ...]]:
            parts: list[tuple[Tensor, ...]] = []
            for part in before(*args):
                parts.append(part)
                yield parts[1] if len(parts) == 3 else part

        network._announced = twice  # type: ignore[method-assign]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (net, plain)]
    found = [0.0, 0.0, 0.0]
    for step in range(3):
        x = torch.randn(9, 3, 8, 8, dtype=torch.float64)
        y = torch.randint(0, 10, (9,))
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole, start, total = x.clone().requires_grad_(), 0, torch.zeros(())
        for size in [len(part) for part in torch.arange(9).tensor_split(microbatches)]:
            context.enter(step, start, (size,), x.device)
            value = loss_of(plain(whole[start : start + size]), y[start : start + size]) * (size / 9)
            value.backward()
            total, start = total + value.detach(), start + size
        mine = convoy.local_samples(net, 9)
        own = x[mine].clone().requires_grad_()
        if schedule == "loop":
            value = loss_of(net(own), y[mine])
            value.backward()
        else:
            value = convoy.forward_backward(net, own, y[mine], loss_of, schedule=schedule)  # type: ignore[arg-type]
        found[0] = max(found[0], relative(value.detach(), total, 1.0))
        found[1] = max(found[1], relative(own.grad, whole.grad[mine], 1.0))
        for optimizer in optimizers:
            optimizer.step()
    state = convoy.state_dict(net)
    for name, tensor in plain.state_dict().items():
        found[2] = max(found[2], relative(state[name].double(), tensor.double(), 1.0))
    held = sum(p.numel() for p in net.parameters())
    assert held < sum(p.numel() for p in plain.parameters()), "a rank holds its own stage alone"
    return found


@pytest.mark.parametrize("schedule", ["loop", "gpipe", "1f1b", "zero-bubble"])
def test_schedules_give_what_a_loop_over_the_parts_does(schedule: str) -> None:
    for found in run_ranks(scheduled, 2, "stage=2", schedule, 4):
        assert max(found) < 1e-12, found


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("plan", ["stage=3", {"mesh": {"stage": 3}, "layers": {}, "stages": ["down", "up"]}])
def test_skip_connections_pass_over_stages(plan: Any, schedule: str) -> None:
    for found in run_ranks(scheduled, 3, plan, schedule, 4):
        assert max(found) < 1e-12, found


def wide_layers() -> float:
    """Weights large enough for messages of their own; the first update follows their uses, and postpones nothing."""
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 5)).double()
    x, y = torch.randn(8, 1, 8, 8, dtype=torch.float64), torch.randint(0, 5, (8,))
    net = convoy.parallelize(copy.deepcopy(plain), "stage=2,sample=2", x[:2], microbatches=2)
    mine, worst = convoy.local_samples(net, 8), 0.0
    for _ in range(3):
        net.zero_grad()
        convoy.forward_backward(net, x[mine], y[mine], F.cross_entropy, schedule="zero-bubble")
        plain.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        worst = max(worst, worst_gradient(net, plain))
    return worst


def test_zero_bubble_adds_large_gradients_over_samples() -> None:
    for found in run_ranks(wide_layers, 4):
        assert found < 1e-12


@pytest.mark.parametrize(("schedule", "sabotage"), [("1f1b", "parts"), ("zero-bubble", "weights")])
def test_wrong_parts_are_noticed(schedule: str, sabotage: str) -> None:
    for found in run_ranks(scheduled, 2, "stage=2", schedule, 4, sabotage):
        assert max(found) > 1e-3, found


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


def worst_gradient(net: nn.Module, plain: nn.Module) -> float:
    """The largest difference; infinite where one has a gradient that the other lacks."""
    found, known = convoy.gradients(net), dict(plain.named_parameters())
    if set(found) != {name for name, p in known.items() if p.grad is not None}:
        return float("inf")
    return max(relative(gradient, known[name].grad, 1.0) for name, gradient in found.items())


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


class FineTuned(nn.Module):
    """Convolutions whose weights are frozen, between norms that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.deep = nn.Conv2d(4, 4, 3).requires_grad_(False)
        self.last = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.deep(self.norm(self.stem(x)).relu()).mean((2, 3)))


def fine_tuned(accumulates: bool) -> float:
    plain = FineTuned().double()
    layers = {"last": {"gpu": "filter"}, "*": {"gpu": "sample"}}
    plan = {"mesh": {"stage": 2, "gpu": 2}, "layers": layers, "stages": ["norm"]}
    x, y = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randint(0, 6, (8,))
    net = convoy.parallelize(copy.deepcopy(plain), plan, x[:4], microbatches=2, checks=False)
    mine = convoy.local_samples(net, 8)
    for last in (False, True) if accumulates else (True,):
        F.cross_entropy(plain(x), y).backward()
        with nullcontext() if last else convoy.accumulate(net):
            convoy.forward_backward(net, x[mine], y[mine], F.cross_entropy, schedule="zero-bubble")
    return worst_gradient(net, plain)


@pytest.mark.parametrize("accumulates", [False, True])
def test_gradients_are_added_over_ranks_where_only_layers_that_are_not_have_postponed_theirs(accumulates: bool) -> None:
    for found in run_ranks(fine_tuned, 4, accumulates):
        assert found < 1e-12, found


def beside_a_plain_pass() -> float:
    layers = (layer for _ in range(4) for layer in (nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()))
    plain = nn.Sequential(*layers, nn.Flatten(), nn.Linear(192, 6)).double()
    x, y = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randint(0, 6, (8,))
    net = convoy.parallelize(copy.deepcopy(plain), "stage=2", x[:4], microbatches=2, recompute=True, checks=False)
    loss = F.cross_entropy(net(x), y)
    convoy.forward_backward(net, x, y, F.cross_entropy, schedule="zero-bubble")
    loss.backward()
    (2 * F.cross_entropy(plain(x), y)).backward()
    return worst_gradient(net, plain)


def test_a_pass_that_is_computed_again_computes_what_it_did() -> None:
    for found in run_ranks(beside_a_plain_pass, 2):
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


def test_a_returned_tensor_without_samples_is_whole() -> None:
    for found in run_ranks(without_samples, 2):
        assert found < 1e-12


def mistaken(kind: str) -> None:
    if kind == "no parts":
        two_heads("last", microbatches=0)
    elif kind == "parts":
        convoy.parallelize(WithPenalty(), "stage=2", torch.zeros(4, 4), microbatches=2)
    else:
        net, _ = two_heads("last")
        with torch.no_grad():
            convoy.forward_backward(net, torch.zeros(4, 3, 8, 8).double(), torch.zeros(4), F.cross_entropy)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("no parts", r"microbatches=0 must be at least 1"),
        ("parts", r"returns a tensor in which there are no samples, so a pass cannot be cut into 2 parts"),
        ("no_grad", r"call it outside of torch\.no_grad"),
    ],
)
def test_mistakes_are_said(kind: str, sentence: str) -> None:
    with pytest.raises(RankFailed, match=sentence):
        run_ranks(mistaken, 2, kind)


END = Sent(to=-1, part=-1, back=False, pending=Pending([], lambda: torch.empty(0)))
"""Is let go with everything else."""


def parts_on_their_way(schedule: str, release: bool) -> int:
    """Of how many parts a rank holds values or gradients for others at once, at most, in an update of six parts."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 3, 8, 8, dtype=torch.float64), torch.randint(0, 10, (6,))
    net = convoy.parallelize(Branches().double(), "stage=2", x[:2], batch_norm="microbatch", seed=5, microbatches=6)
    network, most = network_of(net), 0
    assert isinstance(network, StagedNetwork)
    links = network.links
    send, let_go = links.send, links.release

    def counting(*args: Any, **options: Any) -> None:
        nonlocal most
        send(*args, **options)
        most = max(most, len({sent.part for sent in links._sending}))

    links.send = counting  # type: ignore[method-assign]
    if not release:  # but at the end, when everything is
        links.release = lambda is_received: let_go(is_received) if is_received(END) else None  # type: ignore[method-assign]
    convoy.forward_backward(net, x, y, loss_of, schedule=schedule)  # type: ignore[arg-type]
    return most


@pytest.mark.parametrize(("schedule", "parts"), [("1f1b", 2), ("zero-bubble", 3)])
def test_what_others_have_received_is_let_go(schedule: str, parts: int) -> None:
    """As many parts as the first stage runs ahead: it holds values of them, and the second one gradients."""
    assert run_ranks(parts_on_their_way, 2, schedule, False) == [6, 6], "the control holds what it sends to the end"
    assert run_ranks(parts_on_their_way, 2, schedule, True) == [parts, parts]


@dataclass
class Backward(TorchDispatchMode):
    """Counts weight gradients that are computed before the one before them has been added to `.grad`."""

    waits: bool = False
    count: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.convolution_backward.default:
            self.count += self.waits
            self.waits = True
        elif function is torch.ops.aten.add_.Tensor:
            self.waits = False
        return function(*args, **(kwargs or {}))


def waiting_gradients(at_once: bool) -> int:
    if not at_once:
        guard._AT_ONCE = 0
    model = nn.Sequential(*(nn.Conv2d(4, 4, 1, bias=False) for _ in range(6)))
    x, y = torch.randn(6, 4, 5, 5), torch.zeros(6, 5, 5, dtype=torch.int64)
    net = convoy.parallelize(model, "stage=2", x[:2], microbatches=6)
    with Backward() as backward:
        convoy.forward_backward(net, x, y, F.cross_entropy)
    return backward.count


def test_a_weights_gradient_is_added_at_once_while_uses_of_weights_are_followed() -> None:
    """The first part's become `.grad` as they are. The second part went forward before the first came back, so that
    its uses are followed too: the control keeps all of its gradients until its backward pass ends."""
    first, _ = run_ranks(waiting_gradients, 2, True)
    control, _ = run_ranks(waiting_gradients, 2, False)
    assert control == first + 2
