"""Networks built without their numbers get those of the network built at once, bit by bit."""

import contextlib
import copy
import io
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from convoy import models
from convoy.errors import ConvoyError
from convoy.graph import steps
from convoy.graph.deferred import Deferred, deferred, deferred_tensors, evaluate, fingerprint, materialize
from convoy.models.registry import REGISTRY

Factory = Callable[[], nn.Module]


def bits(tensor: Tensor) -> tuple[Any, ...]:
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad, content


def all_bits(model: nn.Module) -> dict[str, Any]:
    names = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: bits(tensor) for name, tensor in names}


def built(factory: Factory, seed: int = 5) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    return factory(), torch.get_rng_state()


def built_deferred(factory: Factory, seed: int = 5) -> tuple[nn.Module, Tensor]:
    with deferred():
        return built(factory, seed)


def check(factory: Factory) -> nn.Module:
    plain, state = built(factory)
    model, own_state = built_deferred(factory)
    assert torch.equal(own_state, state)
    torch.manual_seed(77)  # what was drawn since plays no role
    before = torch.get_rng_state()
    materialize(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert all_bits(model) == all_bits(plain)
    assert [type(p) for p in model.parameters()] == [type(p) for p in plain.parameters()]
    assert not deferred_tensors(model)
    return model


LARGE = [
    name for name in REGISTRY if name.startswith(("vgg", "alexnet", "resnet101", "resnet152", "densenet1", "densenet2"))
]
LARGE.remove("densenet121")


@pytest.mark.parametrize(
    "name", [*(n for n in REGISTRY if n not in LARGE), *(pytest.param(n, marks=pytest.mark.slow) for n in LARGE)]
)
def test_every_network_of_the_registry(name: str) -> None:
    check(lambda: models.create(name))


class Own(nn.Module):
    """A convolution, a linear layer and batch norm, and what a function does to them."""

    def __init__(self, change: Callable[["Own"], object]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 20)
        change(self)


def in_place(model: Own) -> None:
    with torch.no_grad():
        model.conv.weight.mul_(0.5).add_(model.conv.weight.mean())
        model.fc.weight[3:5] = 7
        model.fc.weight[:, 2] += torch.randn(20)
        model.fc.weight[0].normal_()
        model.conv.bias.copy_(torch.arange(8))
        model.fc.bias.clamp_(min=0)
    model.bn.weight.data.fill_(0.25)
    model.bn.weight.data[2] = 3
    model.bn.bias.data = torch.full((8,), 2.0)
    model.fc.bias.data = model.fc.bias.data * model.conv.weight.data.std()


def loops(model: Own) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            nn.init.constant_(module.bias, 0)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.zeros_(module.weight)
        elif isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.01, a=-0.02, b=0.02)
            nn.init.uniform_(module.bias)


def other_rules(model: Own) -> None:
    nn.init.orthogonal_(model.fc.weight, gain=1.5)
    nn.init.orthogonal_(model.conv.weight.view(8, 27)[:, :20])
    nn.init.dirac_(model.conv.weight[:, :, :, :])
    nn.init.xavier_uniform_(model.fc.weight[:10])
    nn.init.sparse_(model.fc.weight[:, :6], 0.3)
    nn.init.eye_(model.fc.weight[10:18])


def generators(model: Own) -> None:
    generator = torch.Generator().manual_seed(3)
    nn.init.normal_(model.fc.weight, generator=generator)
    torch.randn(17)
    nn.init.uniform_(model.fc.bias, generator=generator)
    nn.init.kaiming_uniform_(model.conv.weight)
    torch.manual_seed(9)
    nn.init.normal_(model.conv.bias)


def kinds(model: Own) -> None:
    model.double()
    model.fc.half()
    model.conv.to(memory_format=torch.channels_last)
    model.fc.weight.requires_grad_(False)
    model.register_buffer("ids", torch.arange(5))
    model.register_buffer("mask", torch.ones(4, 4).tril().bool())
    model.register_buffer("drawn", torch.bernoulli(torch.rand(9)))
    model.register_buffer("order", torch.randperm(11), persistent=False)
    model.register_parameter("old", nn.Parameter(torch.Tensor(2, 3).uniform_()))
    model.register_parameter("ints", nn.Parameter(torch.randint(0, 9, (40,)), requires_grad=False))
    model.register_parameter("like", nn.Parameter(torch.rand_like(model.conv.weight)))
    model.register_parameter("none", None)
    model.register_parameter("dropped", nn.Parameter(nn.functional.dropout(torch.ones(30))))


def from_numpy(model: Own) -> None:
    filters = np.random.default_rng(0).normal(size=(8, 3, 3, 3)).astype(np.float32)
    with torch.no_grad():
        model.conv.weight.copy_(torch.from_numpy(filters))
        filters *= 0  # the copy was made
        model.fc.bias += torch.tensor([0.5]) * torch.ones(20)
    model.fc.weight = nn.Parameter(torch.from_numpy(np.eye(20, 8)))
    model.bn.weight.data = torch.tensor([float(i) for i in range(8)])
    model.register_buffer("blur", torch.outer(torch.tensor([1.0, 2, 1]), torch.tensor([1.0, 2, 1])))


def asks_for_numbers(model: Own) -> None:
    rates = [x.item() for x in torch.linspace(0, 1, 8)]
    with torch.no_grad():
        for place, rate in enumerate(rates):
            model.bn.weight[place] = rate
        while (model.fc.weight.abs() > 0.2).any():
            large = model.fc.weight.abs() > 0.2
            model.fc.weight.copy_(torch.where(large, torch.randn(20, 8), model.fc.weight))
        model.conv.bias.fill_(float(model.conv.weight.sum()))
        model.bn.bias.copy_(torch.tensor(model.conv.weight.view(8, 27).sum(1).tolist()))
        model.fc.bias.copy_(torch.from_numpy(model.fc.weight.sum(1).numpy().copy()))
        kept = model.conv.weight[model.conv.weight > 0]
        model.conv.weight.sub_(kept.mean())


def tied(model: Own) -> None:
    model.other = nn.Linear(8, 20)
    model.other.weight = model.fc.weight
    model.copies = nn.ModuleList([copy.deepcopy(model.conv), copy.deepcopy(model)])
    nn.init.normal_(model.other.weight)
    nn.init.normal_(model.copies[0].weight)


_FILE = io.BytesIO()
torch.save({"weight": torch.ones(20, 8) * 3, "bias": torch.arange(20.0)}, _FILE)
SAVED = _FILE.getvalue()


def loads(model: Own) -> None:
    model.fc.load_state_dict(torch.load(io.BytesIO(SAVED)))
    model.empty = nn.Parameter(torch.empty(0, 4))


def parametrized(model: Own) -> None:
    nn.utils.parametrizations.weight_norm(model.conv)
    nn.utils.parametrizations.spectral_norm(model.fc)


def other_default(model: Own) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model.deep = nn.Linear(3, 4)
        model.register_buffer("step", torch.arange(0, 1, 0.25))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "change",
    [
        in_place,
        loops,
        other_rules,
        generators,
        kinds,
        from_numpy,
        asks_for_numbers,
        tied,
        loads,
        parametrized,
        other_default,
    ],
)
def test_what_constructors_do(change: Callable[[Own], object]) -> None:
    model = check(lambda: Own(change))
    if change is tied:
        assert model.other.weight is model.fc.weight


def test_what_is_done_after_the_context_counts() -> None:
    def finish(model: nn.Module) -> nn.Module:
        nn.init.normal_(model.fc.weight)
        model.fc.weight.requires_grad_(False)
        model.to(torch.float64).to(memory_format=torch.channels_last)
        model.load_state_dict({"bn.weight": torch.arange(8)}, strict=False)
        return copy.deepcopy(model)

    plain = finish(built(lambda: Own(loops))[0])
    assert all_bits(materialize(finish(built_deferred(lambda: Own(loops))[0]))) == all_bits(plain)


def test_plain_attributes_get_their_numbers() -> None:
    class Anchors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = {"scales": [torch.arange(3.0) * math.pi]}

    model, _ = built_deferred(Anchors)
    materialize(model)
    assert torch.equal(model.table["scales"][0], torch.arange(3.0) * math.pi)


def test_nothing_is_there_before() -> None:
    model, _ = built_deferred(lambda: Own(loops))
    assert all(isinstance(p, Deferred) and isinstance(p, nn.Parameter) for p in model.parameters())
    assert model.conv.weight.device.type == "cpu"
    assert repr(model.bn.weight) == "deferred(size=[8], dtype=torch.float32, device='cpu')"
    with pytest.raises(ConvoyError, match=r"has no numbers yet: call convoy\.parallelize"):
        model.fc(torch.ones(2, 8))
    with pytest.raises(ConvoyError, match="no numbers to save"):
        copy.copy(model.conv.weight)


def test_memory_of_two_tensors_is_refused() -> None:
    def share(model: Own) -> None:
        model.twin = nn.Parameter(model.fc.weight.data)

    with pytest.raises(ConvoyError, match=r"\[20, 8\] and \[20, 8\], share memory"):
        materialize(built_deferred(lambda: Own(share))[0])


def test_parts_of_one_tensor_are_parameters() -> None:
    def cut(model: Own) -> None:
        rows = torch.randn(6, 4)
        model.one, model.two = nn.Parameter(rows[:3]), nn.Parameter(rows[3:])

    check(lambda: Own(cut))


def test_changes_of_size_are_refused() -> None:
    with pytest.raises(ConvoyError, match=r"aten\.resize_\.default cannot be deferred"):
        built_deferred(lambda: Own(lambda model: model.fc.weight.data.resize_(3)))


def test_numbers_given_to_numpy_cannot_be_changed_unseen() -> None:
    with pytest.raises(ValueError, match="read-only"):
        built_deferred(lambda: Own(lambda model: model.bn.weight.detach().numpy().fill(3)))


def test_fingerprints_tell_programs_and_seeds_apart() -> None:
    def of(change: Callable[[Own], object], seed: int = 5) -> bytes:
        return fingerprint(deferred_tensors(built_deferred(lambda: Own(change), seed)[0]))

    assert of(loops) == of(loops)
    assert of(from_numpy) == of(from_numpy)
    assert len({of(loops), of(loops, 6), of(in_place), of(from_numpy)}) == 4


def test_the_random_state_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the states of then, the numbers are others."""
    monkeypatch.setattr(steps, "_drawing", lambda drawn: steps._default_dtype(torch.float32))
    with pytest.raises(AssertionError):
        check(lambda: Own(loops))


def test_a_part_takes_no_more_than_its_tensor() -> None:
    model, _ = built_deferred(lambda: Own(loops))
    assert torch.equal(evaluate(model.fc.weight[3:5]), evaluate(model.fc.weight)[3:5])
    assert evaluate(model.fc.weight[3:5]).untyped_storage().nbytes() == 2 * 8 * 4
    assert evaluate(model.fc.weight[:0]).shape == (0, 8)


def state_after(draw: Callable[[Tensor], object], size: int, dtype: torch.dtype, builds: bool) -> Tensor:
    """Torch's random state after some numbers, within `deferred()` or as usual."""
    torch.manual_seed(0)
    with deferred() if builds else contextlib.nullcontext():
        draw(torch.empty(size, dtype=dtype))
        draw(torch.empty(1, dtype=dtype))
    return torch.get_rng_state()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("draw", [Tensor.uniform_, Tensor.normal_])
def test_numbers_drawn_in_pieces_leave_the_same_state(
    draw: Callable[[Tensor], object], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convoy.graph.deferred._PIECE", 32)
    for size in (5, 32, 63, 64, 65, 79, 80, 131, 160):
        assert torch.equal(state_after(draw, size, dtype, True), state_after(draw, size, dtype, False)), size
    monkeypatch.setattr("convoy.graph.deferred._PIECE", 24)
    if draw is Tensor.normal_ and dtype == torch.float32:
        assert not torch.equal(state_after(draw, 100, dtype, True), state_after(draw, 100, dtype, False)), "the control"


PEAK = r"""
import re, sys
from pathlib import Path
import torch
from torch import nn
from convoy.graph.deferred import deferred, deferred_tensors, evaluate, fill

def build():
    return nn.Sequential(*(nn.Linear(1900, 1000, bias=False) for _ in range(80)))

def peak_mb():  # `getrusage` counts the process too that started this one
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

nn.Linear(1900, 1000)(torch.ones(2, 1900))
before = peak_mb()
if sys.argv[1] == "plain":
    model = build()
else:
    with deferred():
        model = build()
    for tensor in deferred_tensors(model):
        fill(tensor, evaluate(tensor[:500].clone()))
print(peak_mb() - before)
"""


def peak_mb(how: str) -> float:
    """What building 600 MB of weights adds to the peak of a process."""
    apart = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}  # no holes between what is kept, as in the engine
    ran = subprocess.run([sys.executable, "-c", PEAK, how], check=True, capture_output=True, text=True, env=apart)
    return float(ran.stdout)


@pytest.mark.slow
def test_the_peak_is_that_of_the_parts() -> None:
    assert 300 < peak_mb("deferred") < 300 + 50


@pytest.mark.slow
def test_a_plain_build_takes_the_whole() -> None:
    assert peak_mb("plain") > 570
