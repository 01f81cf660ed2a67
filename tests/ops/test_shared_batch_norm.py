"""Batch norm over several ranks as it runs on a GPU, on the CPU: exact, in few operations."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import interpreted
from batch_norm_cases import LAYOUTS, by_microbatch, make, samples, serial
from convoy.ops import shared_batch_norm
from convoy.ops.shared_batch_norm import Following, Holders, normalize_together
from convoy.plans.layout import Layout, Split, consecutive
from one_call import OneCall, rank_results, run_call, worst
from ranks import run_ranks


@contextmanager
def as_on_a_gpu(kernels: object = None) -> Iterator[None]:
    """Let the CPU do as a GPU does: by torch's operations, or by Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_batch_norm, "at_once", lambda x: True)
        patch.setattr(shared_batch_norm, "batch_norm_kernels", lambda x: kernels)
        yield


def by_torch(case: OneCall) -> dict[str, Tensor]:
    with as_on_a_gpu():
        return rank_results(case)


def by_triton(case: OneCall) -> dict[str, Tensor]:
    with as_on_a_gpu(interpreted.kernels()["microbatch"]):
        return rank_results(case)


DIVIDED = ["uneven samples", "a rank without samples", "rows", "samples and columns", "a rank without channels"]


@pytest.mark.parametrize("name", DIVIDED)
def test_a_gpu_gives_what_the_plain_layer_gives(name: str) -> None:
    sizes, given = LAYOUTS[name]
    case = make(given, sizes, passes=2)
    where, error = worst(run_call(case, results=by_torch), serial(case))
    assert error < 1e-12, where


@pytest.mark.parametrize("name", DIVIDED[:3])
def test_triton(name: str) -> None:
    interpreted.kernels()
    sizes, given = LAYOUTS[name]
    case = make(given, sizes, passes=2)
    where, error = worst(run_call(case, results=by_triton), serial(case))
    assert error < 1e-12, where


@pytest.mark.parametrize("collective", ["all_gather", "all_reduce"])
def test_an_exchange_that_is_left_out_is_noticed(collective: str) -> None:
    sizes, given = LAYOUTS["uneven samples"]
    case = make(given, sizes, sabotage=("convoy.ops.shared_batch_norm", collective))
    with pytest.raises(AssertionError):
        assert worst(run_call(case, results=by_torch), serial(case))[1] < 1e-3


@pytest.mark.parametrize("options", [{"affine": False}, {"track": False}, {"momentum": None}, {"shape": (7, 6)}])
def test_variants(options: dict[str, Any]) -> None:
    case = make(Layout.of(samples(5, 2)), (2,), **options, passes=2)
    where, error = worst(run_call(case, results=by_torch), serial(case))
    assert error < 1e-12, where


def test_microbatches_with_divided_rows() -> None:
    given = Layout.of({**samples(5, 2), 2: Split((1,), consecutive((2, 3)))})
    case = make(given, (2, 2), microbatches=(3, 2, 2), mode="microbatch", passes=2)
    where, error = worst(run_call(case, results=by_torch), by_microbatch(case))
    assert error < 1e-12, where


COUNTS = (3, 2)


def _low(dtype: torch.dtype, wide: torch.dtype | None, cuda: bool) -> list[Tensor]:
    """Two steps of half of a batch in low precision, with scale, shift and running statistics in `wide`."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    x, gradient = (torch.randn(5, 6, 4, 4).to(dtype).split(COUNTS)[rank] for _ in range(2))
    weight, bias = (None if wide is None else torch.rand(6).to(wide).requires_grad_() for _ in range(2))
    running = [torch.zeros(6, dtype=wide or dtype), torch.ones(6, dtype=wide or dtype)]
    x.requires_grad_()
    holders = Holders(dist.group.WORLD, tuple(16 * count for count in COUNTS))  # type: ignore[arg-type]

    def step() -> None:
        y = normalize_together(x, weight, bias, Following(*running, 0.5), 1e-5, holders)
        y.backward(gradient)
        found.append(y.detach())

    found: list[Tensor] = []
    if cuda:
        with as_on_a_gpu():
            step()
    else:
        step()
    return [*found, x.grad, *running, *[p.grad for p in (weight, bias) if p is not None]]  # type: ignore[list-item]


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("cuda", [True, False])
def test_low_precision_is_rounded_to_once(wide: torch.dtype | None, cuda: bool) -> None:
    if not cuda and wide is not torch.float32:
        pytest.skip("statistics themselves are in low precision there")
    results = run_ranks(_low, 2, torch.bfloat16, wide, cuda)
    torch.manual_seed(0)
    x, gradient = (torch.randn(5, 6, 4, 4).bfloat16().double() for _ in range(2))
    weight, bias = (None if wide is None else torch.rand(6).to(wide).double().requires_grad_() for _ in range(2))
    running = [torch.zeros(6).double(), torch.ones(6).double()]
    x.requires_grad_()
    y = F.batch_norm(x, *running, weight, bias, True, 0.5, 1e-5)
    y.backward(gradient)
    half_a_digit = 2**-8  # what rounding to bfloat16 costs, beside a little for float32 before it
    for got, want in ((torch.cat([rank[0] for rank in results]), y), (torch.cat([r[1] for r in results]), x.grad)):
        assert ((got - want).abs() <= half_a_digit * 1.01 * want.abs() + 1e-6).all()
    for buffer, want in zip(results[0][2:4], running, strict=True):
        assert torch.allclose(buffer.double(), want, rtol=2**-7 if wide is not torch.float32 else 1e-5, atol=1e-3)


def _behind(relu: bool, triton: bool) -> list[Tensor]:
    """This rank's part of a layer with a ReLU behind it, or in it: the result and the gradients."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    x, gradient = (torch.randn(5, 6, 4, 4).double().split(COUNTS)[rank] for _ in range(2))
    weight, bias = (torch.randn(6).double().requires_grad_() for _ in range(2))
    x.requires_grad_()
    holders = Holders(dist.group.WORLD, tuple(16 * count for count in COUNTS))  # type: ignore[arg-type]
    with as_on_a_gpu(interpreted.kernels()["microbatch"] if triton else None):
        y = normalize_together(x, weight, bias, None, 1e-5, holders, relu)
        (y if relu else y.relu()).backward(gradient)
    return [y.detach().relu(), x.grad, weight.grad, bias.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("triton", [False, True])
def test_a_relu_in_the_same_operation(triton: bool) -> None:
    if triton:
        interpreted.kernels()
    for behind, inside in zip(run_ranks(_behind, 2, False, False), run_ranks(_behind, 2, True, triton), strict=True):
        for want, got in zip(behind, inside, strict=True):
            assert torch.allclose(got, want, rtol=1e-12, atol=1e-13)


class Own(TorchDispatchMode):
    """Notes which of Convoy's own operations are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "convoy":
            self.operations.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_a_layer_takes_few_operations_and_copies_nothing_to_the_gpu() -> None:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        holders = Holders(dist.group.WORLD, (32,) * 8)  # type: ignore[arg-type]
        x, weight, bias = torch.randn(2, 6, 4, 4), torch.rand(6), torch.zeros(6)
        running = Following(torch.zeros(6), torch.ones(6), 0.1)
        for tensor in (x, weight, bias):
            tensor.requires_grad_()
        with as_on_a_gpu():
            normalize_together(x, weight, bias, running, 1e-5, holders).sum().backward()
            with Own() as seen:
                y = normalize_together(x, weight, bias, running, 1e-5, holders, relu=True)
                y.backward(torch.ones_like(y))
    finally:
        dist.destroy_process_group()

    assert seen.operations == [
        "convoy::channel_moments",
        "convoy::normalize_shared",
        "convoy::shared_gradient_sums",
        "convoy::shared_input_gradient",
    ]
