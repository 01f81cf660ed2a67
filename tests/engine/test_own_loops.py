"""What loops of one's own do around a divided network: as on one device, or refused with a sentence."""

import copy
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import convoy
from convoy.comm.collectives import close
from convoy.engine import agreement
from convoy.engine import network as network_module
from convoy.engine.gradients.divided import DividedGradient
from convoy.engine.network import network_of
from convoy.engine.parallelize import take_part
from convoy.errors import ConvoyError
from ranks import replace_processes, run_ranks

IMAGES = torch.randn(8, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
PLANS = ["sample=2", "filter=2", "owt=2", "height=2"]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    ).double()


def ranks_net(plan: str, **options: Any) -> tuple[nn.Module, slice]:
    net = convoy.parallelize(small(), plan, IMAGES[:4], **options)
    return net, convoy.local_samples(net, len(IMAGES))


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def loss_of(net: nn.Module, mine: slice) -> Tensor:
    return F.cross_entropy(net(IMAGES[mine]), LABELS[mine])


def far(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    return max(((got[name] - want[name]).abs().max() / want[name].abs().max()).item() for name in want)


# Clipping: torch's own functions.


def clip_norm(parameters: list[nn.Parameter], **options: Any) -> Tensor:
    return nn.utils.clip_grad_norm_(parameters, 0.1, **options)


def clip_largest(parameters: list[nn.Parameter]) -> Tensor:
    return nn.utils.clip_grad_norm_(parameters, 0.01, norm_type=float("inf"))


def clip_third(parameters: list[nn.Parameter]) -> Tensor:
    return nn.utils.clip_grad_norm_(parameters, 0.1, norm_type=3, foreach=False)


def clip_value(parameters: list[nn.Parameter]) -> Tensor:
    nn.utils.clip_grad_value_(parameters, 0.01)
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def clip_by_hand(parameters: list[nn.Parameter]) -> Tensor:
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = sum((g.detach() ** 2).sum() for g in gradients) ** 0.5
    also = sum(g.norm(2).item() ** 2 for g in gradients) ** 0.5
    assert abs(float(total) - also) < 1e-12
    for gradient in gradients:
        gradient.mul_(min(1.0, 0.1 / also))
    assert all(bool(g.isfinite().all()) for g in gradients)
    return torch.tensor(float(max(g.abs().max() for g in gradients)) + also + float(sum(g.mean() for g in gradients)))


CLIPS = {f.__name__: f for f in (clip_norm, clip_largest, clip_third, clip_value, clip_by_hand)}


def train(net: nn.Module, mine: slice, clip: Callable[..., Any] | None, updates: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    norms = []
    for _ in range(updates):
        optimizer.zero_grad()
        loss_of(net, mine).backward()
        if clip is not None:
            norms.append(float(clip(list(net.parameters()))))
        optimizer.step()
    return norms


def clipped(plan: str, clip: str) -> tuple[float, float]:
    net, mine = ranks_net(plan, checks=clip != "clip_value")  # gradients answer without the comparisons too
    serial = small()
    norms, want = train(net, mine, CLIPS[clip]), train(serial, slice(None), CLIPS[clip])
    assert all(type(v) is Tensor for p in net.parameters() if p.grad is not None for v in [p.data])
    return max(abs(a - b) for a, b in zip(norms, want, strict=True)), far(convoy.state_dict(net), serial.state_dict())


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("clip", CLIPS)
def test_torchs_clipping_is_that_of_one_device(plan: str, clip: str) -> None:
    for norms, weights in run_ranks(clipped, 2, plan, clip):
        assert norms < 1e-12
        assert weights < 1e-9


def clipped_alone() -> tuple[float, float]:
    net = small()
    take_part(net, "filter=2", IMAGES[:4])  # as it was before gradients answered for their whole tensors
    mine = convoy.local_samples(net, len(IMAGES))
    serial = small()
    norms, want = train(net, mine, clip_norm), train(serial, slice(None), clip_norm)
    return max(abs(a - b) for a, b in zip(norms, want, strict=True)), 0.0


def test_a_part_has_another_norm() -> None:
    assert max(run_ranks(clipped_alone, 2))[0] > 1e-3


def looked_into() -> None:
    net, mine = ranks_net("filter=2")
    loss_of(net, mine).backward()
    gradient = net[0].weight.grad
    whole = convoy.gradients(net)["0.weight"]
    for function in (lambda g: g.sum(0), lambda g: g.flatten(), lambda g: g.numpy(), lambda g: g.std()):
        with pytest.raises(ConvoyError, match=r"convoy\.gradients"):
            function(gradient)
    with pytest.raises(ConvoyError, match=r"convoy\.gradients"):
        torch.save(gradient, os.devnull)
    assert gradient.shape == (3, 3, 3, 3) and "DividedGradient" in repr(gradient)
    assert copy.deepcopy(gradient).norm() == gradient.norm()
    torch.testing.assert_close(gradient.norm(), whole.norm())
    torch.testing.assert_close((gradient * 2 + 1).mean(), (whole * 2 + 1).mean())
    loss_of(net, mine).backward()  # it adds up as ever
    torch.testing.assert_close(convoy.gradients(net)["0.weight"], 2 * whole)
    optimizer = torch.optim.Adam(net.parameters())
    optimizer.step()
    assert all(type(v) is Tensor for state in optimizer.state.values() for v in state.values())


def test_what_would_take_a_part_for_the_whole_is_refused() -> None:
    run_ranks(looked_into, 2)


def scaled(plan: str) -> tuple[float, float]:
    """A loss scale that is too large on the rank with the largest gradient alone: all leave the update out."""
    net = convoy.parallelize(small().float(), plan, IMAGES[:4].float())
    mine = convoy.local_samples(net, len(IMAGES))
    before = convoy.state_dict(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(F.cross_entropy(net(IMAGES[mine].float()), LABELS[mine])).backward()
    if rank() == 1:
        with torch._C.DisableTorchFunctionSubclass():
            net[0].weight.grad[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    return far(convoy.state_dict(net), {"0.weight": before["0.weight"]}), scaler.get_scale()


def test_all_ranks_leave_out_the_update_that_one_cannot_make() -> None:
    assert run_ranks(scaled, 2, "filter=2") == [(0.0, 512.0)] * 2


# Optimizers that look at whole tensors.


class Lion(torch.optim.Optimizer):
    """Treats every number by itself, and nobody knows it."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.add_((0.9 * mean + 0.1 * p.grad).tanh(), alpha=-group["lr"])
                mean.lerp_(p.grad, 0.01)


def make(name: str, net: nn.Module) -> torch.optim.Optimizer:
    parameters = list(net.parameters())
    if name == "Lion":
        return Lion(parameters, 0.01)
    if name == "Adafactor":
        return torch.optim.Adafactor(parameters)
    if name == "Muon":
        return torch.optim.Muon([p for p in parameters if p.dim() == 2])
    import pytorch_optimizer

    return getattr(pytorch_optimizer, name)(parameters, lr=0.01)


def optimized(name: str, plan: str) -> str | float:
    serial = small()
    serial[0] = nn.Conv2d(3, 6, 3, bias=False).double()  # a gradient that is nothing but rounding would be blown up
    net = convoy.parallelize(copy.deepcopy(serial), plan, IMAGES[:4])
    mine = convoy.local_samples(net, len(IMAGES))
    optimizer, alone = make(name, net), make(name, serial)
    try:
        for _ in range(3):
            for each, samples, opt in ((net, mine, optimizer), (serial, slice(None), alone)):
                opt.zero_grad()
                loss_of(each, samples).backward()
                opt.step()
    except ConvoyError as error:
        return str(error)
    return far(convoy.state_dict(net), serial.state_dict())


@pytest.mark.parametrize("name", ["Lamb", "LARS", "Adafactor", "Muon", "SOAP"])
def test_optimizers_that_look_at_whole_tensors_are_refused_on_parts(name: str) -> None:
    for said in run_ranks(optimized, 2, name, "filter=2"):
        assert isinstance(said, str) and said.startswith(f"{name} ") and "divided over ranks: take an optimizer" in said


@pytest.mark.parametrize(("name", "plan"), [("Lion", "filter=2"), ("AdaBelief", "filter=2"), ("Lamb", "sample=2")])
def test_other_optimizers_are_as_on_one_device(name: str, plan: str) -> None:
    for error in run_ranks(optimized, 2, name, plan):
        assert isinstance(error, float) and error < 1e-9


# Weights used outside of the network.


def penalized(plan: str, penalty: str, updates: int = 2) -> str | None:
    net, mine = ranks_net(plan)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(updates):
        optimizer.zero_grad()
        loss = loss_of(net, mine)
        if penalty == "weights":
            loss = loss + 1e-4 * sum((p**2).sum() for p in net.parameters())
        elif penalty == "one":
            loss = loss + 1e-6 * net[5].bias.abs().sum()
        elif penalty == "two passes":
            loss = loss + loss_of(net, mine)
        elif penalty == "body":
            loss = loss + net[0](IMAGES[mine]).mean()
        try:
            loss.backward()
        except ConvoyError as error:
            return str(error)
        optimizer.step()
    return None


@pytest.mark.parametrize("plan", ["sample=2", "filter=2"])
@pytest.mark.parametrize("penalty", ["weights", "one"])
def test_a_penalty_outside_of_the_network_is_refused(plan: str, penalty: str) -> None:
    for said in run_ranks(penalized, 2, plan, penalty):
        assert said and "outside of the network" in said and "convoy.penalty" in said


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("penalty", ["none", "two passes"])
def test_what_the_network_computes_is_not_taken_for_a_penalty(plan: str, penalty: str) -> None:
    assert run_ranks(penalized, 2, plan, penalty, 6) == [None, None]


# What drifts apart.


def drifting(plan: str, how: str) -> str | None:
    net, mine = ranks_net(plan)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01 if how != "rate" else 0.01 * (1 + rank()))
    images = IMAGES + rank() if how == "samples" else IMAGES
    try:
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
    except ConvoyError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("plan", "how", "words"),
    [
        ("sample=2", "gradient", "the weight 5.bias should be the same on ranks 0 and 1, and differs by"),
        ("filter=2", "left out", "rank 0 has made 3 updates since it made its network parallel, and rank 1 2"),
        ("sample=2", "left out", "let all ranks call optimizer.step() after the same passes"),
        ("sample=2", "buffer", "the buffer 1.running_mean should be the same"),
        ("sample=2", "rate", "different options (learning rate 0.01 and 0.02)"),
        ("filter=2", "samples", "work on the same samples under this plan, and were given different ones"),
    ],
)
def test_what_drifts_apart_is_named(plan: str, how: str, words: str) -> None:
    for said in run_ranks(drifting, 2, plan, how):
        assert said is not None and words in said


@pytest.mark.parametrize("how", ["nothing", "rounding"])
@pytest.mark.parametrize("plan", PLANS)
def test_ranks_that_go_together_are_not_disturbed(plan: str, how: str) -> None:
    assert run_ranks(drifting, 2, plan, how) == [None, None]


def all_given_the_same() -> int:
    net = convoy.parallelize(small(), "sample=2", IMAGES[:4])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            net(IMAGES[:4]).sum().backward()
    return sum("were given the same samples" in str(each.message) for each in caught)


def test_samples_that_all_ranks_have_are_warned_of_once() -> None:
    assert run_ranks(all_given_the_same, 2) == [1, 0]


# Calls that not all ranks make.


def alone(what: str) -> str | None:
    net, mine = ranks_net("filter=2")
    agreement.PATIENCE_S = 0.2
    loss_of(net, mine).backward()
    calls = {"state": convoy.state_dict, "gradients": convoy.gradients, "clip": lambda n: convoy.clip_grad_norm_(n, 1)}
    try:
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


# States of parts.


def states(plan: str) -> None:
    net = ranks_net(plan)[0]
    own = net.state_dict()
    assert own["0.weight"].data_ptr() == net[0].weight.data_ptr()
    other = convoy.parallelize(small(), plan, IMAGES[:4])
    with torch.no_grad():
        net[0].weight.add_(1)
    other.load_state_dict(copy.deepcopy(net.state_dict()))  # the same parts
    assert torch.equal(other[0].weight, net[0].weight)
    whole = {name: tensor * 2 for name, tensor in small().state_dict().items()}
    other.load_state_dict(whole)  # cut
    assert all(torch.equal(tensor, whole[name]) for name, tensor in convoy.state_dict(other).items())
    folder = torch.distributed.distributed_c10d._get_default_store()
    if rank() == 0:
        folder.set("state", _packed(net.state_dict()))
    theirs = _unpacked(folder.get("state"))
    if rank() == 1:
        with pytest.raises(ConvoyError, match=r"rank 0 of 2 under plan .* save with convoy\.save"):
            other.load_state_dict(theirs)
        unmarked = {name: tensor for name, tensor in theirs.items() if name in small().state_dict()}
        with pytest.raises(ConvoyError, match="does not say of which"):
            other.load_state_dict(unmarked)
        with pytest.raises(RuntimeError, match="rank 0 of 2 under plan"):
            small().load_state_dict(theirs)
        with pytest.raises(ConvoyError, match="does not say of which"):
            other.load_state_dict(unmarked, strict=False)


def _packed(value: Any) -> bytes:
    import io

    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpacked(data: bytes) -> Any:
    import io

    return torch.load(io.BytesIO(data), weights_only=True)


@pytest.mark.parametrize("plan", ["filter=2", "owt=2"])
def test_a_state_of_parts_is_not_loaded_where_it_does_not_fit(plan: str) -> None:
    run_ranks(states, 2, plan)


def optimizer_states(plan: str, kind: str) -> str | None:
    net, mine = ranks_net(plan)
    if kind == "whole":
        serial = small()
        optimizer = torch.optim.Adam(serial.parameters())
        F.cross_entropy(serial(IMAGES), LABELS).backward()
    else:
        optimizer = torch.optim.Adam(net.parameters())
        loss_of(net, mine).backward()
    optimizer.step()
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank() == 0:
        store.set("optimizer", _packed(optimizer.state_dict()))
    saved = _unpacked(store.get("optimizer")) if kind != "own" else copy.deepcopy(optimizer.state_dict())
    fresh = torch.optim.Adam(net.parameters())
    fresh.load_state_dict(saved)
    net.zero_grad()
    loss_of(net, mine).backward()
    try:
        fresh.step()
    except ConvoyError as error:
        return str(error)
    return None


def test_an_optimizers_state_of_other_parts_is_refused_before_it_steps() -> None:
    first, second = run_ranks(optimizer_states, 2, "filter=2", "first")
    assert first is None and second is not None and "rank 0 of 2 under plan filter=2" in second
    for said in run_ranks(optimizer_states, 2, "filter=2", "whole"):
        assert said is not None and "load it with convoy.load_optimizer_state_dict" in said
    assert run_ranks(optimizer_states, 2, "filter=2", "own") == [None, None]
    assert run_ranks(optimizer_states, 2, "sample=2", "first") == [None, None]


def checkpointed() -> str:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    net = ranks_net("filter=2")[0]
    with pytest.raises((AttributeError, ConvoyError, RuntimeError)) as caught:
        get_state_dict(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return str(caught.value)


def test_torchs_distributed_checkpoint_refuses_parts() -> None:
    for said in run_ranks(checkpointed, 2):
        assert "under plan filter=2" in said and "convoy" in said


def wrapped() -> None:
    net = nn.parallel.DistributedDataParallel(ranks_net("sample=2")[0])
    with pytest.raises(ConvoyError, match="would add gradients twice: take it away"):
        net(IMAGES[:4])
    with pytest.raises(ConvoyError, match="would add gradients twice: take it away"):
        convoy.local_samples(net, 8)


def test_data_parallelism_around_it_is_refused() -> None:
    run_ranks(wrapped, 2)


def test_a_network_is_not_pickled() -> None:
    net = convoy.parallelize(small(), "serial", IMAGES[:4])
    with pytest.raises(ConvoyError, match=r"save it by convoy\.save"):
        torch.save(net, os.devnull)


# How networks are called, and what changes them.


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


def called(plan: str) -> float:
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
    if plan == "serial":
        return worst
    with pytest.raises(ConvoyError, match=r"argument \w+ of the network is a list"):
        net(IMAGES[mine], meta=[META[mine]])
    return worst


@pytest.mark.parametrize("plan", ["serial", "sample=2", "filter=2"])
def test_keyword_arguments_and_constants(plan: str) -> None:
    assert max(run_ranks(called, 1 if plan == "serial" else 2, plan)) < 1e-9


def cast(plan: str) -> float:
    torch.manual_seed(0)
    net = convoy.parallelize(small().float(), plan, IMAGES[:4].float())
    serial = small().float()
    mine = convoy.local_samples(net, len(IMAGES))
    F.cross_entropy(net(IMAGES[mine].float()), LABELS[mine]).backward()
    serial(IMAGES.float())
    for each in (net, serial):
        each.zero_grad()
        with torch.no_grad():
            each[1].running_mean.zero_(), each[1].running_var.fill_(1)
    net.double(), serial.double()
    train(net, mine, None), train(serial, slice(None), None)
    return far(convoy.state_dict(net), serial.state_dict())


@pytest.mark.parametrize("plan", ["serial", *PLANS])
def test_a_network_that_is_cast_afterwards(plan: str) -> None:
    assert max(run_ranks(cast, 1 if plan == "serial" else 2, plan)) < 1e-9


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


def test_the_names_of_the_interface_are_found() -> None:
    import pydoc

    assert {"parallelize", "state_dict", "plan", "ConvoyError"} <= set(dir(convoy))
    assert not {"Any", "TYPE_CHECKING"} & set(dir(convoy))
    text = pydoc.plain(pydoc.render_doc(convoy))
    assert all(f" {name}(" in text for name in ("parallelize", "gradients", "clip_grad_norm_"))
    assert issubclass(convoy.ConvoyError, ValueError)


# Networks in a chain, and loops of other shapes.


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


def perturbed(plan: str) -> float:
    """What the network is given may be computed from what is trained beside it: that gradient is as on one device."""
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


def looped(how: str) -> str | None:
    """Loops that are right: nothing is to be said of them."""
    net, mine = ranks_net("filter=2" if how == "closure" else "sample=2")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    guard = network_of(net).guard
    for _ in range(40):
        optimizer.zero_grad()
        if how == "accumulates":
            for _ in range(3):
                with convoy.accumulate(net):
                    loss_of(net, mine).backward()
        elif how == "asks for gradients":
            loss = loss_of(net, mine)
            torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
            loss.backward()
            optimizer.step()
            continue
        elif how == "looks first":
            loss_of(net, mine)
        elif how == "closure":

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(net, mine)
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                return loss

            optimizer.step(closure)
            assert all(type(v) is Tensor for state in optimizer.state.values() for v in state.values())
            continue
        loss_of(net, mine).backward()
        optimizer.step()
        assert sum(map(len, guard._uses.values())) == 0
    return None


@pytest.mark.parametrize("how", ["accumulates", "asks for gradients", "looks first", "closure"])
def test_loops_of_other_shapes_are_let_alone(how: str) -> None:
    assert run_ranks(looped, 2, how) == [None, None]


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


def grouped() -> None:
    net, mine = ranks_net("filter=2")
    optimizer = make("Lamb", nn.Linear(2, 2).double())
    loss_of(net, mine).backward()
    optimizer.param_groups[0]["params"][0].grad = torch.zeros_like(optimizer.param_groups[0]["params"][0])
    optimizer.step()
    optimizer.add_param_group({"params": list(net.parameters())})
    with pytest.raises(ConvoyError, match="divided over ranks: take an optimizer"):
        optimizer.step()


def test_groups_that_come_later_are_looked_at() -> None:
    run_ranks(grouped, 2)


def broken_off() -> None:
    net, mine = ranks_net("filter=2")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    handle = net[0].weight.register_hook(_break)
    with pytest.raises(ZeroDivisionError):
        loss_of(net, mine).backward()
    handle.remove()
    for _ in range(4):
        optimizer.zero_grad()
        loss_of(net, mine).backward()
        assert isinstance(net[0].weight.grad, DividedGradient)
        optimizer.step()


def _break(gradient: Tensor) -> Tensor:
    raise ZeroDivisionError


def test_a_backward_pass_that_broke_off_is_forgotten() -> None:
    run_ranks(broken_off, 2)


def recomputed() -> None:
    net, mine = ranks_net("filter=2")
    with pytest.raises(ConvoyError, match="activation checkpointing around a parallelized network"):
        checkpoint(net, IMAGES[mine].clone().requires_grad_(True), use_reentrant=False).sum().backward()


def test_checkpointing_around_a_network_is_refused() -> None:
    run_ranks(recomputed, 2)
