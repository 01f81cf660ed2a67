"""Rules and kernels without processes: every rank of a mesh in turn, and the whole call beside them.

`run` slices the inputs as the rule asks for them, runs each rank's kernel, and puts the outputs and the gradients of
the inputs together by their layouts. What a layout says is taken at its word: ranks on axes that a tensor is whole on
must agree, partial sums are added, and so are the gradients of what is copied or held twice.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from convoy.comm.groups import Groups
from convoy.engine.shards import cut
from convoy.graph.graph import Graph
from convoy.ops import OPERATIONS
from convoy.ops.context import StepContext
from convoy.ops.kernel import Site
from convoy.plans.layout import Layout
from convoy.plans.mesh import Mesh
from convoy.plans.place import Placed
from one_call import joined

TOLERANCE = 1e-10


def close(a: Tensor, b: Tensor, what: str) -> None:
    assert a.shape == b.shape, what
    if b.numel():
        worst = (a - b).abs().max() / max(1.0, b[b.isfinite()].abs().max().item() if b.isfinite().any() else 1.0)
        assert worst < TOLERANCE, f"{what}: {worst}"


def run(
    graph: Graph, placed: Placed, mesh: Mesh, tensors: Sequence[Tensor], shares: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and input gradients, put together from those of all ranks."""
    call = graph.calls[0]
    layouts = {**placed.inputs, **placed.outputs}
    for name in call.outputs:
        assert not layouts[name].copied
        _assert_disjoint(layouts[name], graph.shape(name))
    made: list[list[Tensor]] = [[] for _ in call.outputs]
    found: list[list[Tensor]] = [[] for _ in call.inputs]
    for rank in range(mesh.num_devices):
        here = mesh.coordinates(rank)
        site = Site(graph, mesh, here, call, layouts, Groups(mesh, rank), StepContext())
        local = [
            _share(x.detach(), layouts[name], mesh, here).requires_grad_()
            for name, x in zip(call.inputs, tensors, strict=True)
        ]
        results = list(OPERATIONS[call.op].build(site)(*local))
        for name, y in zip(call.outputs, results, strict=True):
            assert tuple(y.shape) == site.local_shape(name), (name, y.shape, site.local_shape(name))
            assert y.requires_grad, f"rank {rank} has no gradient edge to {name}"
        own = [cut(share, layouts[name], mesh, here) for name, share in zip(call.outputs, shares, strict=True)]
        for parts, part in zip([*made, *found], [*results, *torch.autograd.grad(results, local, own)], strict=True):
            parts.append(part.detach())

    names, shape = zip(call.outputs, made, strict=True), graph.shape
    outputs = [joined(parts, layouts[name], mesh, shape(name), layouts[name].partial) for name, parts in names]
    names = zip(call.inputs, found, strict=True)
    return outputs, [joined(parts, layouts[name], mesh, shape(name), layouts[name].copied) for name, parts in names]


def _share(x: Tensor, layout: Layout, mesh: Mesh, here: tuple[int, ...]) -> Tensor:
    """The rank's part of a tensor; of a partial sum some term, so that all terms make the sum."""
    x = cut(x, layout, mesh, here).clone()
    count, place = mesh.size(tuple(sorted(layout.partial))), mesh.index(here, tuple(sorted(layout.partial)))
    terms = [term + 1 for term in range(count)]
    return x * (terms[place] / sum(terms)) if layout.partial else x


def _assert_disjoint(layout: Layout, shape: Sequence[int]) -> None:
    for dim, split in layout.splits:
        assert sorted(index for part in split.parts for index in part) == list(range(shape[dim])), (dim, split)
    axes = [axis for _, split in layout.splits for axis in split.axes] + sorted(layout.partial)
    assert len(axes) == len(set(axes)), layout
