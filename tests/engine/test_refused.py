"""Scripts that would be silently wrong on several devices are refused in one sentence, on every rank."""

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from exactness import announce
from odd_nets import UNSEEN, base, coupled
from own_loops import IMAGES, LABELS, loss_of, rank, ranks_net, small
from torch import nn
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

import convoy
from convoy.engine import agreement
from convoy.errors import ConvoyError
from ranks import run_ranks

EXAMPLE = torch.zeros(2, 3, 8, 8, dtype=torch.float64)
Script = Callable[[str], None]


def penalized(penalty: Callable[[nn.Module], Any], before: bool = False) -> Script:
    def script(plan: str) -> None:
        net, mine = ranks_net(plan)
        early = penalty(net) if before else 0
        (loss_of(net, mine) + (early if before else penalty(net))).backward()

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


def changed(change: Callable[[Any], object]) -> Script:
    """After a pass something is changed, on one rank or all, and the network called again."""

    def script(plan: str) -> None:
        net, mine = ranks_net(plan)
        net(IMAGES[mine]).sum().backward()
        change(net)
        net(IMAGES[mine])

    return script


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


def copied(plan: str) -> None:
    net, mine = ranks_net(plan)
    twin = copy.deepcopy(net)
    net.eval(), twin.eval()
    with torch.no_grad():
        net[5].bias.add_(1)
        torch.testing.assert_close(twin(IMAGES[mine]) + 1, net(IMAGES[mine]))  # copies are for evaluation
    twin.train()(IMAGES[mine])


def second_derivatives(plan: str) -> None:
    images = IMAGES.clone().requires_grad_()
    grad(ranks_net(plan)[0](images).sum(), images, create_graph=True)[0].square().sum().backward()


def scalar_of_microbatches(plan: str) -> None:
    net = convoy.parallelize(coupled(UNSEEN["choice"], "scalar")(), plan, EXAMPLE.float(), batch_norm="microbatch")
    net(IMAGES[announce(net, 0, (3, 3, 2), IMAGES.device)].float())


def checkpointed(plan: str) -> None:
    checkpoint(ranks_net(plan)[0], IMAGES.clone().requires_grad_(), use_reentrant=False).sum().backward()


def left_open(plan: str) -> None:
    """An epoch ends within passes that are accumulated; passes that are dropped are no mistake."""
    net, mine = ranks_net(plan)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for drop in (True, False):
        with convoy.accumulate(net):
            loss_of(net, mine).backward()
        if drop:
            optimizer.zero_grad()
        optimizer.step()


def shared_trunk(plan: str) -> None:
    trunk = small()[:3]
    convoy.parallelize(nn.Sequential(trunk, nn.Flatten()), plan, IMAGES[:4])
    convoy.parallelize(nn.Sequential(trunk, nn.ReLU()), plan, IMAGES[:4])


PART = r"a plan sample=N with convoy\.parallelize\(\.\.\., loss='part'\), and divide sums"
OUTSIDE = "outside of the network.*convoy.penalty"
MISTAKES: dict[str, list[tuple[Script, str]]] = {
    "sample=2": [
        (penalized(lambda net: 1e-6 * net[5].bias.abs().sum()), OUTSIDE),
        (lambda plan: ranks_net(plan)[0][0](IMAGES[:4]).mean().backward(), OUTSIDE + ".* call the network itself"),
        (changed(lambda net: net[0](IMAGES[:4]).mean().backward()), OUTSIDE),
        (lambda p: [grad(loss_of(net, x), net[5].bias) for net, x in [ranks_net(p)]], r"grad of the weight 5\.bias"),
        (scalar_of_microbatches, r"shape \[\] for a microbatch of 3 samples.* the samples along dim 0"),
        (drifting("gradient"), "weight 5.bias should be the same on ranks 0 and 1, and"),
        (drifting("buffer"), "the buffer 1.running_mean should be the same"),
        (drifting("rate"), r"different options \(learning rate 0.01 and 0.02\)"),
        (changed(lambda net: net[1].train(rank() == 0)), "with every module in the same mode"),
        (changed(lambda net: net.float() if rank() else None), "to weights of the same type"),
        (second_derivatives, PART),
        (left_open, r"run the last pass before each update outside"),
        (shared_trunk, r"0\.0\.weight belongs to a network that is parallelized already"),
        (
            lambda plan: convoy.parallelize(nn.Embedding(4, 2, sparse=True), plan, torch.arange(4)),
            "sparse gradients, which are not added over ranks",
        ),
        (unfrozen, r"set requires_grad, then call convoy\.parallelize"),
        (lambda plan: nn.parallel.DistributedDataParallel(ranks_net(plan)[0])(IMAGES[:4]), "add gradients twice: take"),
        (changed(lambda net: net[0].weight.register_hook(lambda gradient: gradient)), r"0\.weight has a gradient hook"),
        (changed(lambda net: net[0].register_full_backward_hook(print)), r"\(0\._backward_hooks.*has a backward hook"),
    ],
    "filter=2": [
        (penalized(lambda net: 1e-4 * sum((p**2).sum() for p in net.parameters())), OUTSIDE),
        (drifting("left out"), "rank 0 has made 3 updates since .*, and rank 1 2"),
        (drifting("samples"), "work on the same samples under this plan, and were given diff"),
        (lambda plan: ranks_net(plan)[0](IMAGES[: 2 + rank()]), r"pass the samples that convoy\.local_samples says"),
        (changed(lambda net: setattr(net[1], "eps", 0.1 + rank())), "with the same attributes and hooks"),
        (copied, "train the original"),
        (alone(convoy.state_dict), "all ranks call convoy.state_dict together"),
        (checkpointed, "activation checkpointing around a parallelized network"),
    ],
    "height=2": [
        (lambda plan: ranks_net(plan)[0](EXAMPLE[..., rank() :]), "must pass images of the same size and type"),
        (second_derivatives, PART),
    ],
    "stage=2": [
        (penalized(lambda net: 1e-4 * sum((p**2).sum() for p in net.parameters()), before=True), OUTSIDE),
        (second_derivatives, PART),
        (lambda plan: convoy.parallelize(nn.Conv2d(3, 4, 3).double(), plan, EXAMPLE), "1 layer at .* without stages"),
        (lambda plan: ranks_net(plan, microbatches=2), "norm over the global batch .*microbatches=1 .*batch_norm='mic"),
    ],
}
"""By plan for two ranks: what a script does under it, and what is said on every rank."""


def refusal(plan: str, number: int) -> str:
    try:
        MISTAKES[plan][number][0](plan)
    except (ConvoyError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("plan", MISTAKES)
def test_mistakes_are_said_on_every_rank(plan: str) -> None:
    for number, (_, words) in enumerate(MISTAKES[plan]):
        for text in run_ranks(refusal, 2, plan, number):
            assert re.search(words, text, re.DOTALL), (words, text)


def undisturbed(plan: str) -> None:
    for how in ("nothing", "rounding"):
        drifting(how)(plan)
    net, mine = ranks_net(plan)
    net.load_state_dict(net.state_dict())
    net[0].weight.data = net[0].weight.data.clone()
    net[1].running_mean = torch.ones(6, dtype=torch.float64) if plan == "sample=2" else net[1].running_mean
    loss_of(net, mine).backward()


def test_ranks_that_go_together_are_not_disturbed() -> None:
    for plan in ("sample=2", "filter=2", "stage=2"):
        run_ranks(undisturbed, 2, plan)


def all_given_the_same(own: int, words: str) -> int:
    layer = nn.TransformerDecoderLayer(8, 1, 8, batch_first=True).double()
    net = convoy.parallelize(layer, "sample=2", (IMAGES[:4, 0], IMAGES[:4, 1]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            net(IMAGES[:4, own * rank()], IMAGES[:4, 1]).sum().backward()
    return sum(words in str(each.message) for each in caught)


def clips() -> int:
    with warnings.catch_warnings(record=True) as caught:
        convoy.parallelize(nn.Sequential(small(), nn.Unflatten(0, (-1, 2)), nn.Flatten()), "sample=2", EXAMPLE)
    return sum("2 rows for 4 samples" in str(each.message) for each in caught)


def test_what_all_ranks_have_is_warned_of_once() -> None:
    assert run_ranks(all_given_the_same, 2, 0, "were given the same samples") == [1, 0]
    assert run_ranks(all_given_the_same, 2, 1, "tensor 2 of the network's inputs is the same") == [1, 0]
    assert run_ranks(clips, 2) == [1, 0]


NO_NETWORK: dict[str, Callable[[], Any]] = {
    r"torch.compile returned: .*net\._orig_mod.* compile=True": lambda: torch.compile(base()),
    "the network is TorchScript.*: give the module that was scripted": lambda: torch.jit.script(base()),
    r"weight of layer 0\.1 has no shape .*: call the network once, net\(ex": lambda: base(nn.LazyBatchNorm2d),
    "comes from torch.export": lambda: torch.export.export(base(), (EXAMPLE.float(),)).module(),
    "parallelized already": lambda: convoy.parallelize(base(), "serial", EXAMPLE.float()),
}


@pytest.mark.filterwarnings("ignore")
def test_what_is_no_network_is_refused_before_anything_runs() -> None:
    for words, make in NO_NETWORK.items():
        with pytest.raises(ConvoyError, match=words):
            convoy.parallelize(make(), "serial", EXAMPLE.float())
