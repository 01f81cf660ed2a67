"""Rules and kernels without processes: every rank of a mesh in turn, and the whole call beside them.

    check(op, F.avg_pool2d, (x,), {"kernel_size": 2}, attributes, mesh, {0: given})

slices the inputs as the rule asks for them, runs each rank's kernel, puts the outputs together by their layouts and
compares them with the whole call's, and then the gradients of the inputs. What a layout says is taken at its word:
ranks on axes that a tensor is whole on must agree, partial sums are added, and so are the gradients of what is copied
or held twice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from convoy.comm.groups import Groups
from convoy.graph.graph import Call, Graph, Ref, Value
from convoy.ops import OPERATIONS
from convoy.ops.context import StepContext
from convoy.ops.kernel import Site
from convoy.plans.layout import Layout
from convoy.plans.mesh import Mesh
from convoy.plans.place import Batch, Placed, Situation

TOLERANCE = 1e-10


def call_of(
    op: str,
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    rest: Sequence[Any],
    options: Mapping[str, Any],
    attributes: Mapping[str, Any],
) -> tuple[Graph, list[Tensor]]:
    """A graph of one call on inputs `x`, `x1`, … and the call's whole outputs."""
    names = tuple(f"x{place or ''}" for place in range(len(tensors)))
    result = function(*tensors, *rest, **options)
    results = [result] if isinstance(result, Tensor) else list(result)
    outputs = tuple(f"y{place or ''}" for place in range(len(results)))
    args = (*(Ref(name) for name in names), *rest)
    call = Call("call", "layer", op, function, args, dict(options), names, outputs, None, {"input": "x", **attributes})
    values = {name: Value(name, tuple(x.shape), x.dtype, "input") for name, x in zip(names, tensors, strict=True)}
    values |= {name: Value(name, tuple(y.shape), y.dtype) for name, y in zip(outputs, results, strict=True)}
    return Graph((call,), values, names, None, {}, training=True), results


def place(graph: Graph, mesh: Mesh, given: Mapping[str, Layout], strategy: Sequence[str] = ()) -> Placed:
    """What the call's rule says."""
    call = graph.calls[0]
    batch = Batch(mesh, (), (range(graph.shape(call.inputs[0])[0]),))
    return OPERATIONS[call.op].place(Situation(graph, mesh, batch, call, tuple(strategy), given))


def check(
    op: str,
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    rest: Sequence[Any],
    options: Mapping[str, Any],
    attributes: Mapping[str, Any],
    mesh: Mesh,
    given: Mapping[str, Layout],
) -> Placed:
    """Assert that the ranks together do what the whole call does, forwards and backwards."""
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    graph, whole = call_of(op, function, tensors, rest, options, attributes)
    placed = place(graph, mesh, given)
    shares = [torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(3)) for y in whole]
    expected = torch.autograd.grad(whole, tensors, shares)
    outputs, gradients = run(graph, placed, mesh, tensors, shares)
    for name, y, found in zip(graph.calls[0].outputs, whole, outputs, strict=True):
        close(found, y, f"{name} {placed}")
    for name, gradient, found in zip(graph.calls[0].inputs, expected, gradients, strict=True):
        close(found, gradient, f"gradient of {name} {placed}")
    return placed


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
    outputs = [Collected(graph.shape(name), layouts[name], mesh) for name in call.outputs]
    gradients = [Collected(graph.shape(name), layouts[name], mesh, gradient=True) for name in call.inputs]
    for rank in range(mesh.num_devices):
        here = mesh.coordinates(rank)
        site = Site(graph, mesh, here, Groups(mesh, rank), StepContext(), call, layouts)
        local = [
            _share(x.detach(), layouts[name], mesh, here).requires_grad_()
            for name, x in zip(call.inputs, tensors, strict=True)
        ]
        results = list(OPERATIONS[call.op].build(site)(*local))
        for name, y in zip(call.outputs, results, strict=True):
            assert tuple(y.shape) == site.local_shape(name), (name, y.shape, site.local_shape(name))
            assert y.requires_grad, f"rank {rank} has no gradient edge to {name}"
        own = [_own(share, layouts[name], mesh, here) for name, share in zip(call.outputs, shares, strict=True)]
        found = torch.autograd.grad(results, local, own)
        for collected, y in zip(outputs, results, strict=True):
            collected.add(y.detach(), here)
        for collected, gradient in zip(gradients, found, strict=True):
            collected.add(gradient, here)
    return [collected.value for collected in outputs], [collected.value for collected in gradients]


class Collected:
    """A whole tensor, or its gradient, from those of the ranks."""

    def __init__(self, shape: tuple[int, ...], layout: Layout, mesh: Mesh, gradient: bool = False) -> None:
        self.shape, self.mesh = shape, mesh
        added = layout.copied if gradient else layout.partial
        self.layout = replace(layout, copied=frozenset(), partial=frozenset())
        self.same = [axis for axis in mesh.axes if axis not in added | layout.split_axes]
        self.values: dict[tuple[int, ...], Tensor] = {}

    def add(self, x: Tensor, here: tuple[int, ...]) -> None:
        place = tuple(here[axis] for axis in self.same)
        value = self.values.setdefault(place, torch.zeros(self.shape, dtype=x.dtype))
        parts = [
            torch.tensor(self.layout.parts(dim, self.mesh, here, n), dtype=torch.long)
            for dim, n in enumerate(self.shape)
        ]
        if not parts:
            value += x
        elif all(len(part) for part in parts):
            value.index_put_(torch.meshgrid(*parts, indexing="ij"), x, accumulate=True)

    @property
    def value(self) -> Tensor:
        """The tensor, which all ranks along the axes on which it is whole agree on."""
        first, *others = self.values.values()
        for other in others:
            close(other, first, "ranks differ in what is the same for them")
        return first


def _own(x: Tensor, layout: Layout, mesh: Mesh, here: tuple[int, ...]) -> Tensor:
    for dim, _ in layout.splits:
        part = torch.tensor(layout.parts(dim, mesh, here, x.shape[dim]), dtype=torch.long)
        x = x.index_select(dim, part)
    return x.clone()


def _share(x: Tensor, layout: Layout, mesh: Mesh, here: tuple[int, ...]) -> Tensor:
    """The rank's part of a tensor; of a partial sum some term, so that all terms make the sum."""
    x = _own(x, layout, mesh, here)
    count, place = mesh.size(tuple(sorted(layout.partial))), mesh.index(here, tuple(sorted(layout.partial)))
    terms = [term + 1 for term in range(count)]
    return x * (terms[place] / sum(terms)) if layout.partial else x


def _assert_disjoint(layout: Layout, shape: Sequence[int]) -> None:
    for dim, split in layout.splits:
        assert sorted(index for part in split.parts for index in part) == list(range(shape[dim])), (dim, split)
    axes = [axis for _, split in layout.splits for axis in split.axes] + sorted(layout.partial)
    assert len(axes) == len(set(axes)), layout
