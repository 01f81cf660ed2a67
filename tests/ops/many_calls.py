"""Many calls of graphs on real processes, those on as many ranks in one group of them; layouts and shapes at random."""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from torch import Tensor

import interpreted
from convoy.ops import batch_norm
from convoy.plans.layout import Indices, Layout, Split, balanced, consecutive, indices
from convoy.plans.mesh import Mesh
from one_call import OneCall, rank_results, whole
from ranks import run_ranks

TWO, THREE, GRID = Mesh(("a",), (2,)), Mesh(("a",), (3,)), Mesh(("a", "b"), (2, 2))


class Draw(random.Random):
    """Random divisions of tensors over meshes."""

    def parts(self, size: int, number: int, in_order: bool = False) -> tuple[Indices, ...]:
        """Even, uneven, empty, lists, or lists out of order."""
        cuts = sorted(self.randint(0, size) for _ in range(number - 1))
        every = self.sample(range(size), size)
        lists = tuple(indices(every[start:stop]) for start, stop in zip([0, *cuts], [*cuts, size], strict=True))
        uneven = consecutive([len(each) for each in lists])
        ways = [balanced(size, number), uneven]
        return self.choice(ways if in_order else [*ways, lists, tuple(indices(sorted(each)) for each in lists)])

    def layout(self, shape: tuple[int, ...], mesh: Mesh, in_order: tuple[int, ...] = ()) -> Layout:
        """Each axis of the mesh divides another dimension; those `in_order` into consecutive parts."""
        dims = enumerate(self.sample(range(len(shape)), len(mesh.sizes)))
        return Layout.of(
            {dim: Split((axis,), self.parts(shape[dim], mesh.sizes[axis], dim in in_order)) for axis, dim in dims}
        )

    def row(self, shape: tuple[int, ...], in_order: tuple[int, ...] = (0,)) -> tuple[tuple[int, ...], Layout]:
        """Sizes of a mesh, and a layout over it."""
        mesh = self.choice([TWO, THREE, GRID])
        return mesh.sizes, self.layout(shape, mesh, in_order)


@contextmanager
def as_on_a_gpu(way: str) -> Iterator[None]:
    """Let the CPU do as a GPU does, by the operations of "torch" or by the interpreter of "triton"; not for "cpu"."""
    kernels = interpreted.kernels()["batch_norm"] if way == "triton" else None
    with pytest.MonkeyPatch.context() as patch:
        if way != "cpu":
            patch.setattr(batch_norm, "at_once", lambda x: True)
            patch.setattr(batch_norm, "batch_norm_kernels", lambda x: kernels)
        yield


def on_this_rank(cases: Sequence[OneCall], way: str) -> list[dict[str, Tensor]]:
    with as_on_a_gpu(way):
        return [rank_results(case) for case in cases]


def run_calls(cases: Sequence[OneCall], way: str = "cpu") -> list[dict[str, Tensor]]:
    """The whole results of every call; asserts that what ranks have alike is alike."""
    results: dict[int, dict[str, Tensor]] = {}
    for world in {math.prod(case.sizes) for case in cases}:
        numbers = [number for number, case in enumerate(cases) if math.prod(case.sizes) == world]
        ranks = run_ranks(on_this_rank, world, [cases[number] for number in numbers], way, timeout=120)
        for place, number in enumerate(numbers):
            results[number] = whole(cases[number], [rank[place] for rank in ranks])
    return [results[number] for number in range(len(cases))]
