"""Batch norm over a mesh in all its modes, on the CPU and as on a GPU, against the plain layer on real processes."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
import interpreted
from batch_norm_cases import CHANNELS, LAYOUTS, by_microbatch, layer, make, samples, serial
from convoy.engine import MicrobatchNorm, StepContext
from convoy.ops import batch_norm, shared_batch_norm
from convoy.ops.shared_batch_norm import (
    Following,
    Holders,
    all_moments,
    normalize_by,
    normalize_together,
    own_moments,
)
from convoy.plans.layout import WHOLE, Layout, Split, consecutive
from one_call import OneCall, run_call, worst
from ops.many_calls import as_on_a_gpu, run_calls
from ranks import RankFailed, run_ranks

UNEVEN = Layout.of(samples(5, 2))
DIVIDED = ["uneven samples", "a rank without samples", "rows", "samples and columns", "a rank without channels"]
OPTIONS: list[dict[str, Any]] = [{"affine": False}, {"track": False}, {"momentum": None}, {"shape": (7, 6)}]
ROWS = Layout.of({**samples(5, 2), 2: Split((1,), consecutive((2, 3)))})


def whole_pass() -> list[OneCall]:
    cases = [make(given, sizes) for sizes, given in LAYOUTS.values()]
    for name in ("uneven samples", "channel lists", "samples and columns"):
        sizes, given = LAYOUTS[name]
        cases.append(make(given, sizes, training_call=False, training=False))  # by the running statistics
    options = [*OPTIONS, {"track": False, "training": False}]
    return cases + [make(UNEVEN, (2,), **each, passes=2) for each in options]


def as_a_gpu_does() -> list[OneCall]:
    cases = [make(LAYOUTS[name][1], LAYOUTS[name][0], passes=2) for name in DIVIDED]
    return cases + [make(UNEVEN, (2,), **each, passes=2) for each in OPTIONS]


@pytest.mark.parametrize(
    ("kernels", "cases"),
    [
        ("cpu", whole_pass),
        ("torch", as_a_gpu_does),
        ("triton", lambda: [make(LAYOUTS[name][1], LAYOUTS[name][0], passes=2) for name in DIVIDED[:3]]),
    ],
    ids=["cpu", "torch", "triton"],
)
def test_statistics_are_those_of_the_whole_pass(kernels: str, cases: Callable[[], list[OneCall]]) -> None:
    if kernels == "triton":
        interpreted.kernels()
    every = cases()
    for case, got in zip(every, run_calls(every, kernels), strict=True):
        where, error = worst(got, serial(case))
        assert error < 1e-11, f"{where} {case.given} {case.attributes}"


@pytest.mark.parametrize("kernels", ["cpu", "torch"])
def test_microbatches_with_divided_rows(kernels: str) -> None:
    case = make(ROWS, (2, 2), microbatches=(3, 2, 2), mode="microbatch", passes=2)
    (got,) = run_calls([case], kernels)
    where, error = worst(got, by_microbatch(case))
    assert error < 1e-11, where


def test_an_exchange_that_is_left_out_is_noticed() -> None:
    name = shared_batch_norm.__name__
    cases = [make(UNEVEN, (2,), sabotage=(name, collective)) for collective in ("all_reduce", "all_gather")]
    where, error = worst(run_calls(cases[:1])[0], serial(cases[0]))
    assert where == "x.grad" and error > 1e-3
    for case in cases:
        with pytest.raises(AssertionError):
            assert worst(run_calls([case], "torch")[0], serial(case))[1] < 1e-3


@pytest.mark.parametrize("momentum", [0.1, None])
def test_microbatches_have_the_same_bits_on_any_number_of_ranks(momentum: float | None) -> None:
    torch.set_num_threads(1)
    given: list[tuple[tuple[int, ...], Layout]] = [
        ((2,), Layout.of(samples(3, 4))),
        ((2,), UNEVEN),
        ((2,), Layout.of(samples(7, 0))),
        ((3,), Layout.of(samples(3, 2, 2))),
        ((2, 2), Layout.of({**samples(5, 2), 1: Split((1,), CHANNELS[1].parts)})),
        ((2,), WHOLE),
    ]
    options: dict[str, Any] = {"microbatches": (3, 2, 2), "mode": "microbatch", "passes": 2, "momentum": momentum}
    cases = [make(layout, sizes, **options) for sizes, layout in given]
    for case in cases:
        case.tensors = {name: t.float() if t.is_floating_point() else t for name, t in case.tensors.items()}
        case.gradient = case.gradient.float()
    module = layer(cases[0]).float()
    module.load_state_dict({name: t for name, t in cases[0].tensors.items() if name != "x"})
    context = StepContext()
    context.enter(7, 0, cases[0].microbatches, torch.device("cpu"))
    want = serial(cases[0], MicrobatchNorm(module, context).train())  # type: ignore[arg-type]
    for case, got in zip(cases, run_calls(cases), strict=True):
        for name in ("y", "x.grad", "running_mean", "running_var", "num_batches_tracked"):
            assert torch.equal(got[name], want[name]), f"{name} {case.given}"


def test_a_divided_microbatch_is_refused() -> None:
    case = make(Layout.of(samples(4, 3)), (2,), microbatches=(3, 2, 2), mode="microbatch")
    with pytest.raises(RankFailed, match=r"layer 'layer': the plan divides a microbatch of 2 samples"):
        run_call(case)


def local_pass(as_on_gpus: bool) -> dict[str, Tensor]:
    """Gradients and buffers of a pass over two ranks, with each one's own statistics."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).double()
    images, labels = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.arange(8) % 3
    with mock.patch.object(batch_norm, "at_once", lambda x: as_on_gpus):
        net = convoy.parallelize(net, "sample=2", images[:4], batch_norm="local")
        mine = convoy.local_samples(net, 8)
        F.cross_entropy(net(images[mine]), labels[mine]).backward()
    return convoy.gradients(net) | convoy.state_dict(net)


def test_local_statistics_are_each_ranks_own_and_their_buffers_averaged() -> None:
    case = make(Layout.of(samples(4, 3)), (2,), mode="local")
    got, want = run_call(case), serial(case)
    assert worst(got, want)[1] > 1e-3  # the control: they are something else than those of the whole pass
    x, mean = case.tensors["x"], case.tensors["running_mean"]
    halves = [0.9 * mean + 0.1 * part.mean((0, 2, 3)) for part in x.split([4, 3])]
    assert torch.allclose(got["running_mean"], (halves[0] + halves[1]) / 2, atol=0, rtol=1e-13)
    # The kernel of GPUs follows the buffers itself, which are averaged over ranks before the backward pass.
    for fast, plain in zip(run_ranks(local_pass, 2, True), run_ranks(local_pass, 2, False), strict=True):
        assert fast.keys() == plain.keys()
        assert all(torch.allclose(fast[name], plain[name], rtol=1e-12, atol=1e-14) for name in plain)


class Joined(nn.Module):
    """Adds what another branch gives to a batch norm, of channels that the first of two ranks has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(2)
        self.wide, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x)[:, :2]) + self.second(self.wide(x).relu())[:, :2]
        return y.relu().flatten(1)


def joined(plan: str | None, modes: tuple[Any, ...]) -> list[dict[str, Tensor]]:
    """Gradients."""
    found = []
    for mode in modes:
        torch.manual_seed(0)
        net, images = Joined().double(), torch.randn(4, 3, 8, 8, dtype=torch.float64)
        if plan is not None:
            net = convoy.parallelize(net, plan, images, batch_norm=mode)
        net(images).square().sum().backward()
        plain = {name: p.grad for name, p in net.named_parameters()}
        found.append(convoy.gradients(net) if plan is not None else plain)
    return found


def test_a_rank_without_channels_takes_part_in_the_backward_pass_of_what_is_added() -> None:
    (want,) = joined(None, ("sync",))
    for rank in run_ranks(joined, 2, "filter=2", ("sync", "microbatch", "local")):
        for got in rank:
            assert all(torch.allclose(got[name], want[name], rtol=1e-11, atol=1e-12) for name in want)


COUNTS = (3, 2)


def _parts(*dtypes: torch.dtype) -> list[Tensor]:
    """Halves of a batch and of a gradient."""
    torch.manual_seed(0)
    return [torch.randn(5, 6, 4, 4).to(*dtypes).split(COUNTS)[dist.get_rank()] for _ in range(2)]


def _holders() -> Holders:
    return Holders(dist.group.WORLD, tuple(16 * count for count in COUNTS))  # type: ignore[arg-type]


def _low(wide: torch.dtype | None, cuda: bool) -> list[Tensor]:
    """A step of half of a batch in bfloat16, with scale, shift and running statistics in `wide`."""
    x, gradient = _parts(torch.bfloat16)
    weight, bias = (None if wide is None else torch.rand(6).to(wide).requires_grad_() for _ in range(2))
    kind = wide or torch.bfloat16
    running = [torch.zeros(6, dtype=kind), torch.ones(6, dtype=kind)]
    x.requires_grad_()
    with as_on_a_gpu() if cuda else nullcontext():
        y = normalize_together(x, weight, bias, Following(*running, 0.5), 1e-5, _holders())
        y.backward(gradient)
    return [y.detach(), x.grad, *running]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("wide", "cuda"), [(torch.float32, True), (torch.bfloat16, True), (None, True), (torch.float32, False)]
)
def test_low_precision_is_rounded_to_once(wide: torch.dtype | None, cuda: bool) -> None:
    results = run_ranks(_low, 2, wide, cuda)
    torch.manual_seed(0)
    x, gradient = (torch.randn(5, 6, 4, 4).bfloat16().double() for _ in range(2))
    weight, bias = (None if wide is None else torch.rand(6).to(wide).double().requires_grad_() for _ in range(2))
    running = [torch.zeros(6).double(), torch.ones(6).double()]
    x.requires_grad_()
    y = F.batch_norm(x, *running, weight, bias, True, 0.5, 1e-5)
    y.backward(gradient)
    half_a_digit = 2**-8  # what rounding to bfloat16 costs, beside a little for float32 before it
    for place, want in ((0, y), (1, x.grad)):
        got = torch.cat([rank[place] for rank in results])
        assert ((got - want).abs() <= half_a_digit * 1.01 * want.abs() + 1e-6).all()
    for buffer, want in zip(results[0][2:], running, strict=True):
        assert torch.allclose(buffer.double(), want, rtol=2**-7 if wide is not torch.float32 else 1e-5, atol=1e-3)


def _behind(ways: tuple[tuple[bool, bool], ...]) -> list[list[Tensor]]:
    """This rank's part of a layer with a ReLU behind it, or in it: the result and the gradients."""
    found = []
    for relu, triton in ways:
        x, gradient = _parts(torch.float64)
        weight, bias = (torch.randn(6).double().requires_grad_() for _ in range(2))
        x.requires_grad_()
        with as_on_a_gpu(triton):
            y = normalize_together(x, weight, bias, None, 1e-5, _holders(), relu)
            (y if relu else y.relu()).backward(gradient)
        found.append([y.detach().relu(), x.grad, weight.grad, bias.grad])
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("triton", [False, True])
def test_a_relu_in_the_same_operation(triton: bool) -> None:
    if triton:
        interpreted.kernels()
    for behind, inside in run_ranks(_behind, 2, ((False, False), (True, triton))):
        assert all(torch.allclose(got, want, rtol=1e-12, atol=1e-13) for want, got in zip(behind, inside, strict=True))


def _compiled_parts() -> list[Tensor]:
    """This rank's part, by the functions of which a compiled network is made: result, gradients, buffers."""
    x, gradient = _parts(torch.float64)
    weight, bias = (torch.rand(6).double().requires_grad_() for _ in range(2))
    running = [torch.zeros(6).double(), torch.ones(6).double()]
    x.requires_grad_()
    moments = all_moments(own_moments(x), Following(*running, 0.5), _holders())
    y = normalize_by(x, weight, bias, moments, 1e-5)
    y.backward(gradient)
    return [y.detach(), x.grad, weight.grad, bias.grad, *running]  # type: ignore[list-item]


def test_the_parts_of_a_compiled_layer_are_the_plain_layer_on_unequal_ranks() -> None:
    ranks = run_ranks(_compiled_parts, 2)
    torch.manual_seed(0)
    x, gradient = (torch.randn(5, 6, 4, 4).double() for _ in range(2))
    weight, bias = (torch.rand(6).double().requires_grad_() for _ in range(2))
    running = [torch.zeros(6).double(), torch.ones(6).double()]
    x.requires_grad_()
    y = F.batch_norm(x, *running, weight, bias, True, 0.5, 1e-5)
    y.backward(gradient)
    found = [torch.cat([rank[place] for rank in ranks]) for place in range(2)]
    found += [ranks[0][place] + ranks[1][place] for place in (2, 3)] + ranks[0][4:]
    for got, want in zip(found, (y, x.grad, weight.grad, bias.grad, *running), strict=True):
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-13)  # type: ignore[arg-type]
