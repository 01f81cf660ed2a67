"""Every collective on one rank of NCCL: sizes that differ, none at all, all types, and what it costs the host.

`CONVOY_TEST_DEVICE=cpu` runs it over gloo, to try the test itself.
"""

import os
import statistics
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from convoy.comm import collectives
from ranks import run_ranks

DEVICE = os.environ.get("CONVOY_TEST_DEVICE", "cuda:0")
ON_GPU = DEVICE != "cpu"
HOST_S = 60e-6
COLLECTIVES = ["all_reduce", "all_gather", "all_to_all", "exchange", "exchange_into", "reduce_scatter", "broadcast"]

pytestmark = pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="torch sees no CUDA device here")


def run(name: str, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What a collective gives for a tensor; of one rank, the tensor itself."""
    if name == "exchange":
        return collectives.exchange([x], [x.shape], group)[0]
    if name == "exchange_into":
        collectives.start_exchange_into([x.flatten()], [torch.empty_like(x).flatten()], group).wait()
        return x  # what stands at the own place is left alone
    if name in ("all_to_all", "reduce_scatter"):
        found: Tensor = getattr(collectives, name)(x[None].contiguous(), group)
        return found.view(x.shape)
    function: Callable[..., Tensor] = getattr(collectives, name)
    return function(x.clone(), group).view(x.shape)


def alone(name: str) -> float:
    """Check a collective; the host's seconds for it."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo")
    group = dist.group.WORLD
    assert group is not None
    try:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
            for shape in [(5, 3), (1,), (0, 3)]:
                x = torch.arange(15, device=DEVICE)[: torch.Size(shape).numel()].view(shape).to(dtype)
                found = run(name, x, group)
                assert found.dtype == dtype and torch.equal(found, x), (dtype, shape)
        took = []
        x = torch.ones(1 << 20, device=DEVICE)
        for _ in range(50):
            began = time.perf_counter()
            run(name, x, group)
            took.append(time.perf_counter() - began)
        return statistics.median(took)
    finally:
        dist.destroy_process_group()


def over_the_backend(name: str) -> float:
    """Not through the memory that ranks of a host share on the CPU, which one alone has not."""
    with mock.patch.object(collectives, "_channel", lambda x, group: None):
        return alone(name)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_of_one_rank(name: str) -> None:
    (host_s,) = run_ranks(over_the_backend, 1, name, join=False)
    assert host_s < HOST_S or not ON_GPU
