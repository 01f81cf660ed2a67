"""One call of a graph, its parts put together again and beside the same call on the whole.

`run_call` runs it on real processes. `run` has one process, in which every rank of a mesh takes its turn, for rules and
kernels that send nothing. What a layout says is taken at its word: ranks on axes that a tensor is whole on must agree,
partial sums are added, and so are the gradients of what is copied or held twice.
"""

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from convoy.comm.groups import Groups
from convoy.engine.shards import cut
from convoy.graph.graph import Call, Graph, Ref, Value
from convoy.ops import OPERATIONS
from convoy.ops.context import StepContext
from convoy.ops.kernel import Site
from convoy.ops.statistics import RunningStatistics
from convoy.plans.layout import Layout, balanced
from convoy.plans.mesh import Mesh
from convoy.plans.place import Batch, Placed, Situation
from ranks import run_ranks

ALONE: dict[str, Callable[..., Tensor]] = {
    "all_reduce": lambda x, group: x,
    "all_gather": lambda x, group: x.expand(group.size(), *x.shape),
}
"""Collectives that send nothing."""


@dataclass
class OneCall:
    """A call `y = function(x, …)` under a layout.

    Attributes:
        tensors: whole inputs by name; `x` is the activation, all others parameters or buffers.
        sizes: of the mesh's axes.
        given: how `x` lies.
        gradient: of the whole result.
        microbatches: sizes, over all ranks; by default the whole batch.
        sabotage: a module and its collective that does nothing on any rank.
    """

    op: str
    function: Callable[..., Any]
    tensors: dict[str, Tensor]
    attributes: dict[str, Any]
    sizes: tuple[int, ...]
    given: Layout
    gradient: Tensor
    buffers: tuple[str, ...] = ()
    microbatches: tuple[int, ...] = ()
    mode: Any = "sync"
    training: bool = True
    kwargs: dict[str, Any] = field(default_factory=dict)
    passes: int = 1
    sabotage: tuple[str, str] | None = None

    @property
    def mesh(self) -> Mesh:
        return Mesh(tuple("abc"[: len(self.sizes)]), self.sizes)

    def graph(self) -> Graph:
        origins = {name: "buffer" if name in self.buffers else "parameter" for name in self.tensors} | {"x": "input"}
        values = {n: Value(n, tuple(t.shape), t.dtype, origins[n]) for n, t in self.tensors.items()}  # type: ignore[arg-type]
        values["y"] = Value("y", tuple(self.gradient.shape), self.gradient.dtype)
        inputs = tuple(self.tensors)
        args = tuple(map(Ref, inputs))
        call = Call("y", "layer", self.op, self.function, args, self.kwargs, inputs, ("y",), Ref("y"), self.attributes)
        return Graph((call,), values, ("x",), Ref("y"), {}, self.training)

    def placed(self) -> Placed:
        graph, samples = self.graph(), self.given.split(0)
        axes = samples.axes if samples else ()
        parts = samples.parts if samples else balanced(self.gradient.shape[0], 1)
        strategy = tuple("sample" if axis in axes else "replicate" for axis in range(len(self.sizes)))
        given = {"x": self.given} if "x" in self.tensors else {}
        batch = Batch(self.mesh, axes, parts)
        return OPERATIONS[self.op].place(Situation(graph, self.mesh, batch, graph.calls[0], strategy, given))


def rank_results(case: OneCall) -> dict[str, Tensor]:
    """What this rank computes: y, the gradients as `name.grad`, and the buffers."""
    with pytest.MonkeyPatch.context() as patch:
        if case.sabotage:
            patch.setattr(importlib.import_module(case.sabotage[0]), case.sabotage[1], ALONE[case.sabotage[1]])
        return _results(case)


def _results(case: OneCall) -> dict[str, Tensor]:
    mesh, groups, graph, placed = case.mesh, Groups(case.mesh), case.graph(), case.placed()
    context = StepContext(seed=3, batch_norm=case.mode, statistics=RunningStatistics(in_order=True))
    call = graph.calls[0]
    site = Site(graph, mesh, groups.coordinates, call, {**placed.inputs, **placed.outputs}, groups, context)
    kernel = OPERATIONS[case.op].build(site)
    count = case.gradient.shape[0]
    local = {name: cut(t, placed.inputs[name], mesh, groups.coordinates).clone() for name, t in case.tensors.items()}
    learned = [n for n, t in local.items() if n not in case.buffers and t.is_floating_point()]
    for name in learned:
        local[name].requires_grad_()
    for number in range(case.passes):
        context.enter(7, number * count, case.microbatches or (count,), torch.device("cpu"))
        (y,) = kernel(*[local[name] for name in call.inputs])
        if y.requires_grad:
            y.backward(cut(case.gradient, placed.outputs["y"], mesh, groups.coordinates))
    context.statistics.fold(groups)
    found = {"y": y.detach(), **{name: local[name] for name in case.buffers}}
    return found | {f"{n}.grad": local[n].grad for n in learned if local[n].grad is not None}  # type: ignore[misc]


def run_call(
    case: OneCall, timeout: float = 60.0, results: Callable[[OneCall], dict[str, Tensor]] = rank_results
) -> dict[str, Tensor]:
    """The call's whole results; asserts that what ranks have alike is alike."""
    return whole(case, run_ranks(results, math.prod(case.sizes), case, timeout=timeout))


def whole(case: OneCall, ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The whole of what each rank has of a call's results; asserts that what ranks have alike is alike."""
    placed = case.placed()
    layouts = {"y": placed.outputs["y"], **{name: placed.inputs[name] for name in case.buffers}}
    layouts |= {f"{name}.grad": layout for name, layout in placed.inputs.items()}
    shapes = {"y": case.gradient.shape, **{name: t.shape for name, t in case.tensors.items()}}
    results = {}
    for name in ranks[0]:
        parts, shape = [rank[name] for rank in ranks], shapes[name.removesuffix(".grad")]
        results[name] = joined(parts, layouts[name], case.mesh, shape, layouts[name].copied)
    return results


def joined(parts: list[Tensor], layout: Layout, mesh: Mesh, shape: Sequence[int], added: frozenset[int]) -> Tensor:
    """A whole tensor from every rank's part; over the axes `added` and where parts overlap they are added."""
    whole = torch.zeros(shape, dtype=parts[0].dtype)
    alike = [axis for axis in mesh.axes if axis not in layout.split_axes | added]
    for rank, part in enumerate(parts):
        place = mesh.coordinates(rank)
        assert tuple(part.shape) == layout.local_shape(shape, mesh, place)
        first = mesh.rank([0 if axis in alike else at for axis, at in enumerate(place)])
        if first != rank:
            assert torch.equal(part, parts[first]), f"ranks {first} and {rank} differ"
            continue
        where = [torch.tensor(layout.parts(dim, mesh, place, size)) for dim, size in enumerate(shape)]
        if part.numel() and part.dim():
            grid = torch.meshgrid(*[index.long() for index in where], indexing="ij")
            whole.index_put_(grid, part, accumulate=True)
        elif part.numel():
            whole += part
    return whole


def worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[str, float]:
    """The largest relative difference."""
    assert got.keys() == want.keys(), f"{sorted(got)} against {sorted(want)}"
    largest = max((t.abs().max().item() for name, t in want.items() if name.endswith(".grad")), default=0.0)
    errors = dict.fromkeys(want, 0.0)
    for name, t in want.items():
        if t.numel():
            errors[name] = ((got[name] - t).abs().max() / max(t.abs().max().item(), 1e-9 * largest, 1e-300)).item()
    name = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return name, errors[name]


def close(a: Tensor, b: Tensor, what: str) -> None:
    assert a.shape == b.shape, what
    if b.numel():
        largest = (a - b).abs().max() / max(1.0, b[b.isfinite()].abs().max().item() if b.isfinite().any() else 1.0)
        assert largest <= 1e-10, f"{what}: {largest}"


def run(
    graph: Graph, placed: Placed, mesh: Mesh, tensors: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and input gradients, put together from those of all ranks."""
    call, layouts = graph.calls[0], {**placed.inputs, **placed.outputs}
    for name in call.outputs:
        assert not layouts[name].copied
        _assert_disjoint(layouts[name], graph.shape(name))
    ranks: list[list[Tensor]] = []
    for rank in range(mesh.num_devices):
        place = mesh.coordinates(rank)
        site = Site(graph, mesh, place, call, layouts, Groups(mesh, rank), StepContext())
        pairs = zip(call.inputs, tensors, strict=True)
        local = [_share(x.detach(), layouts[name], mesh, place).requires_grad_() for name, x in pairs]
        outputs = list(OPERATIONS[call.op].build(site)(*local))
        for name, y in zip(call.outputs, outputs, strict=True):
            assert tuple(y.shape) == site.local_shape(name), (name, y.shape, site.local_shape(name))
            assert y.requires_grad, f"rank {rank} has no gradient edge to {name}"
        parts = [cut(x, layouts[name], mesh, place) for name, x in zip(call.outputs, gradients, strict=True)]
        ranks.append([x.detach() for x in (*outputs, *torch.autograd.grad(outputs, local, parts))])
    added = [layouts[name].partial for name in call.outputs] + [layouts[name].copied for name in call.inputs]
    results = [
        joined(list(parts), layouts[name], mesh, graph.shape(name), axes)
        for name, parts, axes in zip((*call.outputs, *call.inputs), zip(*ranks, strict=True), added, strict=True)
    ]
    return results[: len(call.outputs)], results[len(call.outputs) :]


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
