"""How a divided network is called, cast and put together with others; calls that not all ranks make."""

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from own_loops import IMAGES, LABELS, PLANS, far, loss_of, rank, ranks_net, small, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import convoy
from convoy.comm.collectives import close
from convoy.engine import agreement
from convoy.engine import network as network_module
from convoy.engine.output import _UndoScale
from convoy.errors import ConvoyError
from ranks import replace_processes, run_ranks


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.head = nn.Linear(6 + 2, 4)

    def forward(self, x: Tensor, meta: Tensor | None = None, *, scale: float = 1.0, both: bool = False) -> Any:
        found = F.relu(self.stem(x)).mean((2, 3)) * scale
        found = torch.cat([found, torch.zeros_like(x[:, :2, 0, 0]) if meta is None else meta], 1)
        logits = self.head(found)
        return (logits, found) if both else logits


META = torch.randn(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def called(plan: str) -> tuple[float, float]:
    """The worst difference from one device, and the difference from one device with another constant."""
    torch.manual_seed(0)
    serial = Conditioned().double()
    example = {"x": IMAGES[:4], "meta": META[:4], "scale": 0.5}
    net = convoy.parallelize(copy.deepcopy(serial), plan, example)
    assert "head" in convoy.explain(net)
    mine = convoy.local_samples(net, 8)
    worst = 0.0
    for kwargs in ({"meta": META}, {"meta": META, "scale": 3.0}, {"scale": 2.0}, {"meta": META, "both": True}):
        own = {key: value[mine] if isinstance(value, Tensor) else value for key, value in kwargs.items()}
        got, want = net(IMAGES[mine], **own), serial(IMAGES, **kwargs)
        got, want = (got[0], want[0]) if "both" in kwargs else (got, want)
        net.zero_grad(), serial.zero_grad()
        F.cross_entropy(got, LABELS[mine]).backward()
        F.cross_entropy(want, LABELS).backward()
        gradients = {name: p.grad for name, p in serial.named_parameters()}
        worst = max(worst, far(convoy.gradients(net), gradients), (got - want[mine]).abs().max().item())
    torch.testing.assert_close(net(IMAGES[mine], META[mine]), net(x=IMAGES[mine], meta=META[mine]))
    with pytest.raises((ConvoyError, TypeError), match="unexpected keyword argument 'mta'"):
        net(IMAGES[mine], mta=META[mine])
    other = net(IMAGES[mine], META[mine], scale=0.5) - serial(IMAGES, META, scale=3.0)[mine]
    if plan != "serial":
        with pytest.raises(ConvoyError, match=r"argument \w+ of the network is a list"):
            net(IMAGES[mine], meta=[META[mine]])
    return worst, other.abs().max().item()


@pytest.mark.parametrize("plan", ["serial", "sample=2", "filter=2"])
def test_keyword_arguments_and_constants(plan: str) -> None:
    for error, other in run_ranks(called, 1 if plan == "serial" else 2, plan):
        assert error < 1e-9 < 1e-3 < other


def cast(plan: str) -> tuple[float, float]:
    """The difference from one device where the network was cast too, and where it was not."""
    net = convoy.parallelize(small().float(), plan, IMAGES[:4].float())
    serial, uncast = small().float(), small().float()
    mine = convoy.local_samples(net, len(IMAGES))
    F.cross_entropy(net(IMAGES[mine].float()), LABELS[mine]).backward()
    serial(IMAGES.float())
    for each in (net, serial):
        each.zero_grad()
        with torch.no_grad():
            each[1].running_mean.zero_(), each[1].running_var.fill_(1)
    net.double(), serial.double()
    train(net, mine, None), train(serial, slice(None), None), train(uncast, slice(None), None)
    got = convoy.state_dict(net)
    return far(got, serial.state_dict()), far(got, uncast.state_dict())


@pytest.mark.parametrize("plan", ["serial", *PLANS])
def test_a_network_that_is_cast_afterwards(plan: str) -> None:
    for error, uncast in run_ranks(cast, 1 if plan == "serial" else 2, plan):
        assert error < 1e-9 < 1e-7 < uncast


def cast_by_one() -> None:
    net, mine = ranks_net("sample=2")
    if rank() == 1:
        net.float()
    with pytest.raises(ConvoyError, match="to weights of the same type"):
        net(IMAGES[mine])


def test_a_network_that_one_rank_casts() -> None:
    run_ranks(cast_by_one, 2)


def running(plan: str, mode: str) -> tuple[float, float]:
    net, mine = ranks_net(plan, batch_norm=mode)
    for _ in range(2):
        net(IMAGES[mine]).sum().backward()
    serial = small()
    halves = (IMAGES[:4], IMAGES[4:])
    local = [small(), small()]
    for _ in range(2):
        serial(IMAGES)
        for each, images in zip(local, halves, strict=True):
            each(images)
    got = convoy.state_dict(net)
    assert got["1.num_batches_tracked"] == 2
    mean = sum(each[1].running_var for each in local) / 2
    return tuple((got["1.running_var"] - want).abs().max().item() for want in (serial[1].running_var, mean))


def test_running_statistics_are_those_of_the_passes_so_far() -> None:
    for whole, local in run_ranks(running, 2, "filter=2", "microbatch"):  # a pass is one microbatch
        assert whole < 1e-12 < 1e-6 < local
    for whole, local in run_ranks(running, 2, "sample=2", "local"):  # the mean of the ranks'
        assert local < 1e-12 < 1e-6 < whole


def generator() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 3, padding=1)).double()


def chained(plan: str, share: int, mean: bool, undone: bool = True) -> float:
    """The worst gradient of two networks of which one feeds the other, and of one that feeds itself."""
    first, second, serial_first, serial_second = generator(), small(), generator(), small()
    convoy.parallelize(first, plan, IMAGES[:4])
    convoy.parallelize(second, plan, IMAGES[:4])
    if not undone:
        network_module.undo_scale = lambda x, share: x
    sampler = convoy.local_samples(first, 8)
    mine = sampler if sampler == slice(0, 8) else (slice(0, share) if sampler.start == 0 else slice(share, 8))
    worst = 0.0
    for feeds in ("other", "itself"):
        nets = (first, second), (serial_first, serial_second)
        for (g, d), samples, alone in ((nets[0], mine, False), (nets[1], slice(0, 8), True)):
            g.zero_grad(), d.zero_grad()
            made = g(IMAGES[samples])
            made = g(made) if feeds == "itself" else made
            losses = F.cross_entropy(d(made), LABELS[samples], reduction="none")
            direct = (made - IMAGES[samples]).abs().mean((1, 2, 3))  # beside the way through the second
            loss = (losses + direct).mean() if alone or not mean else convoy.global_mean(first, losses + direct)
            loss.backward()
        for net, serial in ((first, serial_first), (second, serial_second)):
            got, want = convoy.gradients(net), {name: p.grad for name, p in serial.named_parameters()}
            largest = max(gradient.abs().max() for gradient in want.values())  # a bias before batch norm has none
            worst = max(worst, *(((got[name] - want[name]).abs().max() / largest).item() for name in want))
    return worst


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize(("plan", "share"), [("sample=2", 4), ("sample=2", 3), ("filter=2", 4)])
def test_a_network_that_feeds_another(plan: str, share: int, mean: bool) -> None:
    assert max(run_ranks(chained, 2, plan, share, mean)) < 1e-9


def test_shares_that_count_twice_are_noticed() -> None:
    try:
        assert min(run_ranks(chained, 2, "sample=2", 4, False, False)) > 0.1
    finally:
        replace_processes()  # they have no `undo_scale` any more


def perturbed(plan: str, undo_all: bool = False) -> float:
    """The network's input may be computed from something that is trained beside it: its gradient is as on one device,
    unless the share is taken out of the gradient of all inputs, and not of other networks' outputs alone."""
    if undo_all:
        network_module.undo_scale = lambda x, share: _UndoScale.apply(x, 1 / share)
    net, mine = ranks_net(plan)
    serial = small()
    deltas = []
    for each, samples in ((net, mine), (serial, slice(0, 8))):
        delta = torch.zeros_like(IMAGES[samples], requires_grad=True)
        F.cross_entropy(each(IMAGES[samples] + 2 * delta), LABELS[samples]).backward()
        assert delta.grad is not None
        deltas.append(delta.grad)
    return ((deltas[0] - deltas[1][mine]).abs().max() / deltas[1].abs().max()).item()


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_of_what_is_added_to_the_inputs(plan: str) -> None:
    assert max(run_ranks(perturbed, 2, plan)) < 1e-9


def test_a_share_taken_out_of_all_inputs_is_noticed() -> None:
    try:
        assert min(run_ranks(perturbed, 2, "sample=2", True)) > 0.1
    finally:
        replace_processes()  # their `undo_scale` is another one


def alone(what: str) -> str | None:
    net, mine = ranks_net("filter=2")
    loss_of(net, mine).backward()
    calls = {"state": convoy.state_dict, "gradients": convoy.gradients, "clip": lambda n: convoy.clip_grad_norm_(n, 1)}
    try:
        with patch.object(agreement, "PATIENCE_S", 0.2):
            if rank() == 0:
                calls[what](net)
            loss_of(net, mine)
    except ConvoyError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("what", "name"), [("state", "state_dict"), ("gradients", "gradients")])
def test_a_call_by_one_rank_alone_is_a_sentence_on_both(what: str, name: str) -> None:
    first, second = run_ranks(alone, 2, what)
    assert f"rank 0 is in convoy.{name} while rank 1 is in a pass of the network: all ranks call convoy.{name}" in first
    assert f"all ranks call convoy.{name} together" in second


def left_behind() -> str | None:
    net, _ = ranks_net("filter=2")
    if rank() == 1:
        close(torch.distributed.group.WORLD)  # as where its process ends
        return None
    try:
        convoy.state_dict(net)
    except ConvoyError as error:
        return str(error)
    return None


def test_a_call_that_the_others_never_make_is_a_sentence() -> None:
    said = run_ranks(left_behind, 2)[0]
    assert said is not None and "has called convoy.state_dict, which all ranks call together" in said


def wrapped() -> None:
    net = nn.parallel.DistributedDataParallel(ranks_net("sample=2")[0])
    with pytest.raises(ConvoyError, match="would add gradients twice: take it away"):
        net(IMAGES[:4])
    with pytest.raises(ConvoyError, match="would add gradients twice: take it away"):
        convoy.local_samples(net, 8)


def test_data_parallelism_around_it_is_refused() -> None:
    run_ranks(wrapped, 2)


def recomputed() -> None:
    net, mine = ranks_net("filter=2")
    with pytest.raises(ConvoyError, match="activation checkpointing around a parallelized network"):
        checkpoint(net, IMAGES[mine].clone().requires_grad_(True), use_reentrant=False).sum().backward()


def test_checkpointing_around_a_network_is_refused() -> None:
    run_ranks(recomputed, 2)


def test_the_names_of_the_interface_are_found() -> None:
    import pydoc

    assert {"parallelize", "state_dict", "plan", "ConvoyError"} <= set(dir(convoy))
    assert not {"Any", "TYPE_CHECKING"} & set(dir(convoy))
    text = pydoc.plain(pydoc.render_doc(convoy))
    assert all(f" {name}(" in text for name in ("parallelize", "gradients", "clip_grad_norm_"))
    assert issubclass(convoy.ConvoyError, ValueError)
