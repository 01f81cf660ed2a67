"""The version of a call that a rank runs, and what the kernels of several operations share."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from convoy.comm.collectives import all_gather
from convoy.comm.groups import Groups
from convoy.graph.graph import Call, Graph, Ref
from convoy.graph.tree import leaves, replace
from convoy.ops.context import StepContext, exchanged
from convoy.ops.gpu import Constants
from convoy.ops.postponed import Weighted
from convoy.plans.layout import Indices, Layout
from convoy.plans.mesh import Axes, Coordinates, Mesh
from convoy.plans.place import PlacedCall

# takes the rank's tensors of `call.inputs`, in order, and gives those of `call.outputs`, in order
Kernel = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class NotCompiled:
    """A kernel that does more than compute, as it talks to other ranks or to the step's context."""

    kernel: Kernel

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self.kernel(*tensors)


@dataclass(frozen=True)
class WithStatistics:
    """A kernel of one output in two parts, of which the first only computes and can be compiled."""

    # from the tensors of `call.inputs` to the output and the terms to record
    compute: Callable[..., tuple[Tensor, list[Tensor]]]
    record: Callable[[Sequence[Tensor], list[Tensor]], None]  # takes the inputs at `buffers`, and the terms
    buffers: tuple[int, ...]

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        y, terms = self.compute(*tensors)
        self.record([tensors[place] for place in self.buffers], terms)
        return [y]


@dataclass(frozen=True)
class Part:
    """A rank's part of a call."""

    graph: Graph
    mesh: Mesh
    coordinates: Coordinates
    call: Call
    layouts: Mapping[str, Layout]  # of every input and output of the call, as its rule asked for them

    @classmethod
    def of(cls, placed: PlacedCall, graph: Graph, mesh: Mesh, coordinates: Coordinates, **rest: Any) -> Self:
        """That of a rank, as the call is placed."""
        layouts = {**placed.placed.inputs, **placed.placed.outputs}
        return cls(graph, mesh, coordinates, placed.call, layouts, **rest)

    @property
    def output(self) -> str:
        """The name of the (first) result."""
        return self.call.outputs[0]

    def parts(self, name: str, dim: int) -> Indices:
        """The global indices of a dimension that this rank holds of a value."""
        return self.layouts[name].parts(dim, self.mesh, self.coordinates, self.graph.shape(name)[dim])

    def rows(self, dim: int) -> range:
        """Those of a dimension of the result along which windows slide."""
        rows = self.parts(self.output, dim)
        assert isinstance(rows, range)
        return rows

    def local_shape(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's part of a value."""
        return self.layouts[name].local_shape(self.graph.shape(name), self.mesh, self.coordinates)

    def is_first(self, axes: Iterable[int]) -> bool:
        """Whether this rank is the first of its group over `axes`."""
        return all(self.coordinates[axis] == 0 for axis in axes)


@dataclass(frozen=True)
class Site(Part):
    """A call where a rank runs it."""

    groups: Groups
    context: StepContext
    relu: bool = False  # whether its result is that of the ReLU that follows, which alone reads it
    addend: str | None = None  # is added to its result before that; the kernel takes it after `call.inputs`


@dataclass(frozen=True)
class Holders:
    """The ranks that hold parts of the same numbers. How many every rank has is known from the plan, so that a GPU's
    host never waits."""

    group: ProcessGroup
    counts: tuple[int, ...]  # by rank, of those numbers that have a mean together, such as a channel's

    @classmethod
    def of(cls, site: Site, axes: Axes, dims: Iterable[int], factor: int = 1) -> "Holders | None":
        """Those along some axes of a call's input, of numbers along `dims`; None where a rank has all."""
        group, name = site.groups.of(axes), site.call.attributes["input"]
        if group is None:
            return None
        shape, dims = site.graph.shape(name), tuple(dims)
        places = site.mesh.group(site.coordinates, axes)
        parts = ((site.layouts[name].parts(dim, site.mesh, place, shape[dim]) for dim in dims) for place in places)
        return cls(group, tuple(factor * math.prod(map(len, parts_of_rank)) for parts_of_rank in parts))

    @property
    def total(self) -> int:
        return sum(self.counts)

    @cached_property
    def shares(self) -> Constants:
        """Each rank's share of the total: [ranks]."""
        return Constants([count / self.total for count in self.counts])

    def times(self, samples: int) -> "Holders":
        """The same where `counts` are those of one sample."""
        return Holders(self.group, tuple(samples * count for count in self.counts))

    def combined(self, local_moments: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and mean square deviation of what all have from those of this rank's part: [2, ...]."""
        gathered = exchanged(all_gather, local_moments, self.group)
        shares = self.shares.like(gathered).view(-1, *[1] * local_moments.dim())
        mean, var = (gathered * shares).sum(0).unbind(0)
        return mean, var + ((gathered[:, 0] - mean).square_() * shares[:, 0]).sum(0)


def as_called(site: Site) -> Kernel:
    """The function itself, with this rank's tensors in place of the whole ones."""
    call = site.call
    nested = [a for a in (*call.args, *call.kwargs.values()) if not isinstance(a, Ref)]
    if leaves(nested, Ref):
        return _nested(site)
    places = {name: place for place, name in enumerate(call.inputs)}
    function, arguments = call.function, list(call.args)
    positional = [(i, places[arg.name]) for i, arg in enumerate(call.args) if isinstance(arg, Ref)]
    by_keyword = [(key, places[arg.name]) for key, arg in call.kwargs.items() if isinstance(arg, Ref)]
    options = dict(call.kwargs)

    def kernel(*tensors: Tensor) -> Sequence[Tensor]:
        args = arguments.copy()
        for i, place in positional:
            args[i] = tensors[place]
        if by_keyword:
            return _listed(function(*args, **options | {key: tensors[place] for key, place in by_keyword}))
        return _listed(function(*args, **options))

    return kernel


def _nested(site: Site) -> Kernel:
    call = site.call
    function, names = call.function, call.inputs

    def kernel(*tensors: Tensor) -> Sequence[Tensor]:
        by_name = dict(zip(names, tensors, strict=True))
        args, kwargs = replace((call.args, call.kwargs), Ref, lambda ref: by_name[ref.name])
        return _listed(function(*args, **kwargs))

    return kernel


def _listed(result: Any) -> Sequence[Tensor]:
    return [result] if isinstance(result, Tensor) else leaves(result, Tensor)


def by_role(call: Call, *roles: str) -> Callable[[Sequence[Tensor]], list[Any]]:
    """Picks from the tensors of `call.inputs` those that attributes of the call name; None for a role that it lacks."""
    names = [call.attributes.get(role) for role in roles]
    places = [None if name is None else call.inputs.index(name) for name in names]
    return lambda tensors: [None if place is None else tensors[place] for place in places]


def guarded(site: Site, kernel: Kernel) -> Kernel:
    """A kernel of one input that gives an empty result by itself, as torch's functions refuse tensors without samples,
    channels or rows; with a gradient edge, since a rank without work takes part in the backward pass."""
    shape = site.local_shape(site.output)
    return kernel if math.prod(shape) else lambda x: [x.flatten()[:0].reshape(shape)]


def flat_padding(pairs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """The padding of each dimension in the order of `torch.nn.functional.pad`: the last dimension first."""
    return tuple(size for pair in reversed(list(pairs)) for size in pair)


def taking(dim: int, places: Indices, size: int) -> Callable[[Tensor], Tensor]:
    """Gives the entries at these places of a dimension of `size`, as a view where they are evenly spaced."""
    if isinstance(places, range):
        if places == range(size):
            return lambda x: x
        return lambda x: x.narrow(dim, places.start, len(places))
    steps = {b - a for a, b in pairwise(places)}
    if len(steps) == 1 and min(steps) > 0:
        key = (*(slice(None),) * dim, slice(places[0], places[-1] + 1, steps.pop()))
        return lambda x: x[key]
    constants = Constants(torch.tensor(places))
    return lambda x: x.index_select(dim, constants.like(x, torch.int64))


def postponing(site: Site, layer: Weighted) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """The function of a layer, which leaves its weight gradient for later where the step's context asks for that."""
    context, name = site.context, site.call.name

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # a weight that is computed has a backward pass of its own, which is not to run twice
        are_leaves = all(
            parameter.is_leaf and parameter.requires_grad for parameter in (weight, bias) if parameter is not None
        )
        if context.postponed is None or not are_leaves or not torch.is_grad_enabled():
            return layer.compute(x, weight, bias)
        return context.postponed.forward(name, layer, x, weight, bias)

    return run


def with_bias(site: Site, compute: Callable[[Tensor, Tensor, Tensor | None], Tensor], dim: int) -> Kernel:
    """The kernel of a function of (input, weight, bias or None), with its channels at `dim` of the output. Where the
    output is a partial sum, one rank adds the bias, and the others zeros that depend on it: the gradient of a partial
    sum is whole, so that every rank gets the bias's whole gradient, and nothing has to be sent for it."""
    partial = site.layouts[site.output].partial
    first, pick = site.is_first(partial), by_role(site.call, "input", "weight", "bias")

    def kernel(*tensors: Tensor) -> list[Tensor]:
        x, weight, bias = pick(tensors)
        if not partial or bias is None:
            return [compute(x, weight, bias)]
        y, term = compute(x, weight, None), bias if first else bias - bias.detach()
        return [y + term.view(-1, *[1] * (y.dim() - dim - 1)).to(y.dtype)]

    return kernel
