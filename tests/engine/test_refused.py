"""Scripts that would be silently wrong on several devices are refused in one sentence, on every rank."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from odd_nets import UNSEEN, Layers, base
from own_loops import IMAGES, LABELS, loss_of, rank, ranks_net, small
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import convoy
from convoy.comm.collectives import close
from convoy.engine import agreement, guard
from convoy.errors import ConvoyError
from convoy.graph.given import unwrapped
from ranks import run_ranks

EXAMPLE = torch.zeros(2, 3, 8, 8, dtype=torch.float64)
Script = Callable[[str], None]


def penalized(penalty: str) -> Script:
    def script(plan: str) -> None:
        net, mine = ranks_net(plan)
        before = sum((p**2).sum() for p in net.parameters()) if penalty == "before the pass" else torch.zeros(())
        loss = loss_of(net, mine) + 1e-4 * before
        if penalty == "weights":
            loss = loss + 1e-4 * sum((p**2).sum() for p in net.parameters())
        elif penalty == "one":
            loss = loss + 1e-6 * net[5].bias.abs().sum()
        loss.backward()

    return script


def drifting(how: str) -> Script:
    """Ranks that do not go together, and how they may."""

    def script(plan: str) -> None:
        net, mine = ranks_net(plan)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01 if how != "rate" else 0.01 * (1 + rank()))
        images = IMAGES + rank() if how == "samples" else IMAGES
        for update in range(6):
            optimizer.zero_grad()
            F.cross_entropy(net(images[mine]), LABELS[mine]).backward()
            if how == "gradient" and rank() == 1:
                net[5].bias.grad.mul_(1.01)
            if not (how == "left out" and rank() == 1 and update == 2):
                optimizer.step()
            if how == "buffer" and rank() == 1:
                net[1].running_mean.add_(0.1)
            if how == "rounding" and rank() == 1:
                with torch.no_grad():
                    net[5].bias.mul_(1 + 1e-15)

    return script


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = small()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        return result


def replaced(change: Callable[[Any], object]) -> Script:
    """Refused in training and, with the same words, in evaluation."""

    def script(plan: str) -> None:
        net = convoy.parallelize(Block(), plan, EXAMPLE)
        net(IMAGES[:2])
        change(net)
        with pytest.raises(ConvoyError, match="was replaced"):
            net(IMAGES[:2])
        net.eval()(IMAGES[:2])

    return script


def changed(change: Callable[[Any], object]) -> Script:
    """After a pass something is changed, on one rank or all, and the network called again."""

    def script(plan: str) -> None:
        net, mine = ranks_net(plan)
        net(IMAGES[mine]).sum().backward()
        change(net)
        net(IMAGES[mine])

    return script


def made(net: Callable[[], nn.Module], example: Any = EXAMPLE, **options: Any) -> Script:
    return lambda plan: convoy.parallelize(net(), plan, example, **options)


def unfrozen(plan: str) -> None:
    net = small()
    net[0].requires_grad_(False)
    convoy.parallelize(net, plan, EXAMPLE)
    net(IMAGES[:2]).sum().backward()
    net[0].requires_grad_(True)
    net(IMAGES[:2])


def alone(call: Callable[[nn.Module], object]) -> Script:
    def script(plan: str) -> None:
        net, mine = ranks_net(plan)
        loss_of(net, mine).backward()
        with patch.object(agreement, "PATIENCE_S", 0.2):
            if rank() == 0:
                call(net)
            loss_of(net, mine)

    return script


def left_behind(plan: str) -> None:
    net, _ = ranks_net(plan)
    if rank() == 1:
        close(torch.distributed.group.WORLD)  # as where its process ends
        raise ConvoyError("has called convoy.state_dict, which all ranks call together")
    convoy.state_dict(net)


def copied(plan: str) -> None:
    import copy

    net, mine = ranks_net(plan)
    twin = copy.deepcopy(net)
    net.eval(), twin.eval()
    with torch.no_grad():
        net[5].bias.add_(1)
        torch.testing.assert_close(twin(IMAGES[mine]) + 1, net(IMAGES[mine]))  # copies are for evaluation
    twin.train()(IMAGES[mine])


def noisy() -> nn.Module:
    return Layers(lambda net, x: net.fc(UNSEEN["choice"](net.conv(F.dropout(x, 0.5)).mean((2, 3)))))


def table() -> nn.Module:
    return Layers(lambda net, x: net.fc(UNSEEN["choice"](net.conv(x).mean((2, 3))) + net.drop(net.scale).sum()))


def explained(plan: str) -> None:
    convoy.explain(ranks_net(plan)[0], samples=(3, 3, 3))


MISTAKES: dict[str, tuple[str, Script, str]] = {
    "penalty on all weights": ("filter=2", penalized("weights"), "outside of the network.*convoy.penalty"),
    "penalty on one weight": ("sample=2", penalized("one"), "outside of the network.*convoy.penalty"),
    "penalty before the pass": ("stage=2", penalized("before the pass"), "outside of the network.*convoy.penalty"),
    "a gradient changed": ("sample=2", drifting("gradient"), "weight 5.bias should be the same on ranks 0 and 1, and"),
    "a step left out": ("filter=2", drifting("left out"), "rank 0 has made 3 updates since .*, and rank 1 2"),
    "a step left out by samples": (
        "sample=2",
        drifting("left out"),
        r"let all ranks call optimizer.step\(\) after the",
    ),
    "a buffer changed": ("sample=2", drifting("buffer"), "the buffer 1.running_mean should be the same"),
    "another rate": ("sample=2", drifting("rate"), r"different options \(learning rate 0.01 and 0.02\)"),
    "other samples": ("filter=2", drifting("samples"), "work on the same samples under this plan, and were given diff"),
    "other sizes": (
        "height=2",
        lambda plan: ranks_net(plan)[0](torch.zeros(2, 3, 8, 8 + 4 * rank(), dtype=torch.float64)),
        "all ranks must pass images of the same size and type",
    ),
    "other numbers": (
        "filter=2",
        lambda plan: ranks_net(plan)[0](IMAGES[: 2 + rank()]),
        r"pass the samples that convoy\.local_samples says",
    ),
    "other modes": ("sample=2", changed(lambda net: net[1].train(rank() == 0)), "with every module in the same mode"),
    "other attributes": (
        "filter=2",
        changed(lambda net: setattr(net[1], "eps", 0.1 + rank())),
        "with the same attributes and hooks",
    ),
    "cast by one": ("sample=2", changed(lambda net: net.float() if rank() else None), "to weights of the same type"),
    "unfrozen later": ("sample=2", unfrozen, r"set requires_grad, then call convoy\.parallelize"),
    "a layer replaced": (
        "sample=2",
        replaced(lambda net: net.body.__setitem__(0, nn.Conv2d(3, 6, 3, padding=1).double())),
        r"body\.0 was replaced or taken out after convoy\.parallelize",
    ),
    "the last layer replaced": (
        "filter=2",
        replaced(lambda net: net.body.__setitem__(5, nn.Linear(3, 4).double())),
        r"body\.5 was replaced",
    ),
    "a parameter replaced": (
        "sample=2",
        replaced(lambda net: setattr(net.body[0], "weight", nn.Parameter(torch.zeros(6, 3, 3, 3).double()))),
        r"body\.0\.weight was replaced",
    ),
    "a block replaced": ("sample=2", replaced(lambda net: setattr(net, "body", small())), "body was replaced"),
    "a layer taken out": ("sample=2", replaced(lambda net: net.body.__delitem__(2)), r"body\.2 was replaced or taken"),
    "a copy trained": ("filter=2", copied, "train the original"),
    "state_dict on one rank": ("filter=2", alone(convoy.state_dict), "all ranks call convoy.state_dict together"),
    "gradients on one rank": ("filter=2", alone(convoy.gradients), "all ranks call convoy.gradients together"),
    "a rank that has ended": ("filter=2", left_behind, "has called convoy.state_dict, which all ranks call together"),
    "DistributedDataParallel around": (
        "sample=2",
        lambda plan: nn.parallel.DistributedDataParallel(ranks_net(plan)[0])(IMAGES[:4]),
        "would add gradients twice: take it away",
    ),
    "DistributedDataParallel inside": (
        "sample=2",
        made(lambda: nn.parallel.DistributedDataParallel(base().double())),
        r"DistributedDataParallel, which adds up .*net\.module",
    ),
    "checkpointing around": (
        "filter=2",
        lambda plan: (
            checkpoint(ranks_net(plan)[0], IMAGES.clone().requires_grad_(), use_reentrant=False).sum().backward()
        ),
        "activation checkpointing around a parallelized network",
    ),
    "numbers drawn unseen": (
        "sample=2",
        made(noisy, EXAMPLE.float()),
        "network draws random numbers that belong to no",
    ),
    "dropout of a table": (
        "sample=2",
        made(table, EXAMPLE.float()),
        "layer drop draws random numbers that belong to no sample",
    ),
    "other numbers of parts": (
        "sample=2",
        explained,
        "samples names 3 parts of the batch, but the plan divides it into 2",
    ),
    "a hook on gradients": (
        "sample=2",
        changed(lambda net: net[0].weight.register_hook(lambda gradient: gradient)),
        r"0\.weight has a gradient hook",
    ),
    "a hook after gradients": (
        "sample=2",
        changed(lambda net: net[0].weight.register_post_accumulate_grad_hook(lambda weight: None)),
        r"0\.weight has a gradient hook",
    ),
    "a backward hook": (
        "sample=2",
        changed(lambda net: net[0].register_full_backward_hook(lambda *_: None)),
        r"\(0\._backward_hooks.*it has a backward hook",
    ),
    "parts with batch norm over the batch": (
        "stage=2",
        made(lambda: base(lambda: nn.BatchNorm2d(6)).double(), microbatches=2),
        r"batch norm over the global batch .*microbatches=1 .*batch_norm='microbatch'",
    ),
    "parts with statistics of their own": (
        "stage=2",
        made(lambda: base(lambda: nn.BatchNorm2d(6, track_running_stats=False)).double(), microbatches=2),
        r"batch norm over the global batch \(layer 0.1\) .* microbatches=1 ",
    ),
}
"""A plan for two ranks, what a script does under it, and what is said."""


def refusal(name: str) -> str:
    plan, script, _ = MISTAKES[name]
    try:
        script(plan)
    except ConvoyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("under", ["sample=2", "filter=2", "height=2", "stage=2"])
def test_mistakes_are_said_on_every_rank(under: str) -> None:
    for name, (plan, _, words) in MISTAKES.items():
        for text in run_ranks(refusal, 2, name) if plan == under else ():
            assert re.search(words, text, re.DOTALL), (name, text)


def undisturbed(plan: str) -> None:
    for how in ("nothing", "rounding"):
        drifting(how)(plan)
    net, mine = ranks_net(plan)
    net.load_state_dict(net.state_dict())
    net[0].weight.data = net[0].weight.data.clone()
    net[1].running_mean = torch.ones(6, dtype=torch.float64) if plan == "sample=2" else net[1].running_mean
    loss_of(net, mine).backward()


@pytest.mark.parametrize("plan", ["sample=2", "filter=2", "owt=2", "height=2", "stage=2"])
def test_ranks_that_go_together_are_not_disturbed(plan: str) -> None:
    run_ranks(undisturbed, 2, plan)


def later(accumulated: int) -> int:
    """In which update a penalty is noticed that begins with the fourth, in each of its passes."""
    net, mine = ranks_net("sample=2")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for update in range(60):
        optimizer.zero_grad()
        for number in range(accumulated):
            with convoy.accumulate(net) if number < accumulated - 1 else nullcontext():
                loss = loss_of(net, mine)
                if update > 2:
                    loss = loss + 1e-3 * sum((p**2).sum() for p in net.parameters())
                try:
                    loss.backward()
                except ConvoyError:
                    return update
        optimizer.step()
    return 1000


def test_a_penalty_that_comes_later_is_noticed() -> None:
    assert max(run_ranks(later, 2, 1)) < 60
    assert max(run_ranks(later, 2, 4)) < 60


def test_checksums_are_those_of_all_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(7, 9)
    whole = guard._checksum(x)
    assert whole == x.view(torch.int32).sum(dtype=torch.int64)
    monkeypatch.setattr(guard, "_PIECE", 10)
    assert guard._checksum(x) == whole
    x.view(torch.int32)[6, 8] ^= 1
    assert guard._checksum(x) != whole


def all_given_the_same() -> int:
    import warnings

    net = convoy.parallelize(small(), "sample=2", IMAGES[:4])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            net(IMAGES[:4]).sum().backward()
    return sum("were given the same samples" in str(each.message) for each in caught)


def test_samples_that_all_ranks_have_are_warned_of_once() -> None:
    assert run_ranks(all_given_the_same, 2) == [1, 0]


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return base()


NO_NETWORK: dict[str, tuple[Callable[[], Any], str]] = {
    "compiled": (lambda: torch.compile(base()), r"torch.compile returned: .*net\._orig_mod.* compile=True"),
    "scripted": (lambda: torch.jit.script(base()), "the network is TorchScript.*: give the module that was scripted"),
    "traced": (lambda: torch.jit.trace(base(), EXAMPLE.float()), "the network is TorchScript"),
    "scripted inside": (lambda: nn.Sequential(torch.jit.script(base())), "layer 0 is TorchScript"),
    "lazy": (lambda: base(nn.LazyBatchNorm2d), r"weight of layer 0\.1 has no shape .*: call the network once, net\(ex"),
    "on meta": (on_meta, r"weight of layer 0\.0 is on the meta device .*convoy\.deferred\(\)"),
    "exported": (lambda: torch.export.export(base(), (EXAMPLE.float(),)).module(), "comes from torch.export"),
    "a function": (lambda: F.relu, "the network is of type function: give an nn.Module"),
    "made parallel already": (lambda: convoy.parallelize(base(), "serial", EXAMPLE.float()), "parallelized already"),
}
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"loss": "sum"}, "loss='sum' is unknown: it must be mean or part"),
    ({"batch_norm": "global"}, "batch_norm='global' is unknown: it must be sync, microbatch or local"),
    ({"plan": "sample=2"}, "needs 2 devices, but there is 1"),
    ({"example": torch.zeros(0, 3, 8, 8)}, "example must be a tensor"),
    ({"recompute": "0"}, "recompute='0' is unknown: it must be True, False, or a list"),
    ({"recompute": ["9.*"]}, r"the pattern 9\.\* matches no layer"),
    (
        {"plan": {"mesh": {"gpu": 1}, "layers": {"o": {"gpu": "filter"}}}},
        r"pattern o matches no layer .*its layers are 0",
    ),
]


@pytest.mark.filterwarnings("ignore")
def test_what_is_no_network_or_option_is_refused_before_anything_runs() -> None:
    for make, words in NO_NETWORK.values():
        with pytest.raises(ConvoyError, match=words):
            convoy.parallelize(make(), "serial", EXAMPLE.float())
    for options, words in OPTIONS:
        with pytest.raises(ConvoyError, match=words):
            convoy.parallelize(base(), **{"plan": "serial", "example": EXAMPLE.float()} | options)
    by_function = Layers(lambda net, x: F.conv2d(x, net.conv.weight))
    plan = {"mesh": {"gpu": 1}, "layers": {"conv": {"gpu": "filter"}, "*": {"gpu": "sample"}}}
    with pytest.raises(
        ConvoyError, match=r"pattern conv matches no layer .*by the network itself, which only \* match"
    ):
        convoy.parallelize(by_function, plan, EXAMPLE.float())
    with pytest.raises(ConvoyError, match="has no shape before a first pass"):
        convoy.plan(base(nn.LazyBatchNorm2d), example=EXAMPLE.float(), devices=2)
    net = base()
    assert unwrapped(nn.DataParallel(torch.compile(net))) is net
