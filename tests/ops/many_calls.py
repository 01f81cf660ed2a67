"""Many calls of graphs on real processes: those on as many ranks share a group of them."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from torch import Tensor

import interpreted
from convoy.ops import shared_batch_norm
from one_call import OneCall, rank_results, whole
from ranks import run_ranks


@contextmanager
def as_on_a_gpu(triton: bool = False) -> Iterator[None]:
    """Let the CPU do as a GPU does: by torch's operations, or by Triton's interpreter."""
    kernels = interpreted.kernels()["microbatch"] if triton else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_batch_norm, "at_once", lambda x: True)
        patch.setattr(shared_batch_norm, "batch_norm_kernels", lambda x: kernels)
        yield


def on_this_rank(cases: Sequence[OneCall], kernels: str) -> list[dict[str, Tensor]]:
    if kernels == "cpu":
        return [rank_results(case) for case in cases]
    with as_on_a_gpu(kernels == "triton"):
        return [rank_results(case) for case in cases]


def run_calls(cases: Sequence[OneCall], kernels: str = "cpu") -> list[dict[str, Tensor]]:
    """The whole results of every call; asserts that what ranks have alike is alike.

    Args:
        cases: the calls.
        kernels: of batch norm: "cpu", "torch" as on a GPU without Triton, or "triton".
    """
    found: dict[int, dict[str, Tensor]] = {}
    for world in {math.prod(case.sizes) for case in cases}:
        numbers = [number for number, case in enumerate(cases) if math.prod(case.sizes) == world]
        ranks = run_ranks(on_this_rank, world, [cases[number] for number in numbers], kernels, timeout=120)
        for place, number in enumerate(numbers):
            found[number] = whole(cases[number], [rank[place] for rank in ranks])
    return [found[number] for number in range(len(cases))]
