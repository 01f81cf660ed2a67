"""Batch norm over several ranks as it runs on CUDA, on the CPU: exact, under CUDA's contracts, in few operations."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from batch_norm_cases import LAYOUTS, by_microbatch, make, samples, serial
from convoy.ops.shared_batch_norm import Following, Holders, _PlainLoops, normalize_together
from convoy.plans.layout import Layout, Split, consecutive
from cuda_batch_norm import cuda_batch_norm
from one_call import OneCall, rank_results, run_call, worst
from ranks import RankFailed, run_ranks


def as_on_cuda(case: OneCall) -> dict[str, Tensor]:
    with cuda_batch_norm():
        return rank_results(case)


def as_on_the_cpu(case: OneCall) -> dict[str, Tensor]:
    with cuda_batch_norm(_PlainLoops()):
        return rank_results(case)


@pytest.mark.parametrize(
    "name", ["uneven samples", "a rank without samples", "rows", "samples and columns", "a rank without channels"]
)
def test_cuda_gives_what_the_plain_layer_gives(name: str) -> None:
    sizes, given = LAYOUTS[name]
    case = make(given, sizes, passes=2)
    where, error = worst(run_call(case, results=as_on_cuda), serial(case))
    assert error < 1e-12, where


@pytest.mark.parametrize("options", [{"affine": False}, {"track": False}, {"momentum": None}, {"shape": (7, 6)}])
def test_variants(options: dict[str, Any]) -> None:
    case = make(Layout.of(samples(5, 2)), (2,), **options, passes=2)
    where, error = worst(run_call(case, results=as_on_cuda), serial(case))
    assert error < 1e-12, where


def test_microbatches_with_divided_rows() -> None:
    given = Layout.of({**samples(5, 2), 2: Split((1,), consecutive((2, 3)))})
    case = make(given, (2, 2), microbatches=(3, 2, 2), mode="microbatch", passes=2)
    where, error = worst(run_call(case, results=as_on_cuda), by_microbatch(case))
    assert error < 1e-12, where


@pytest.mark.parametrize("name", ["uneven samples", "a rank without samples"])
def test_cuda_refuses_what_runs_on_the_cpu(name: str) -> None:
    sizes, given = LAYOUTS[name]
    with pytest.raises(RankFailed, match="Refused"):
        run_call(make(given, sizes), results=as_on_the_cpu)


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
        with cuda_batch_norm():
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


def test_a_layer_takes_few_operations_and_copies_nothing_to_the_gpu() -> None:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        holders = Holders(dist.group.WORLD, (32,) * 8)  # type: ignore[arg-type]
        x, weight, bias = torch.randn(2, 6, 4, 4), torch.rand(6), torch.zeros(6)
        running = Following(torch.zeros(6), torch.ones(6), 0.1)
        for tensor in (x, weight, bias):
            tensor.requires_grad_()
        with cuda_batch_norm():
            normalize_together(x, weight, bias, running, 1e-5, holders).sum().backward()
        with cuda_batch_norm() as seen:
            y = normalize_together(x, weight, bias, running, 1e-5, holders)
            y.backward(torch.ones_like(y))
    finally:
        dist.destroy_process_group()

    operations = [name for name in seen.operations if not name.startswith(("detach", "ones_like", "add_"))]
    assert len(operations) - 2 <= 10, operations  # the plain layer takes two
