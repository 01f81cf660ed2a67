"""The version of a call that a rank runs, and what the kernels of several operations share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from convoy.comm.groups import Groups
from convoy.graph.graph import Call, Graph, Ref
from convoy.graph.tree import leaves, replace
from convoy.ops.constants import Constants
from convoy.ops.context import StepContext
from convoy.ops.postponed import Weighted
from convoy.plans.layout import Indices, Layout
from convoy.plans.mesh import Coordinates, Mesh

Kernel = Callable[..., Sequence[Tensor]]
"""Takes the rank's tensors of `call.inputs`, in order, and gives those of `call.outputs`, in order."""


@dataclass(frozen=True)
class Alone:
    """A kernel that does more than compute: it talks to other ranks, or to the step's context. It is not compiled."""

    kernel: Kernel

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self.kernel(*tensors)


@dataclass(frozen=True)
class Recorded:
    """A kernel of one output in two parts, of which the first only computes and can be compiled.

    Attributes:
        compute: takes the tensors of `call.inputs`; gives that of the output, and what is to be recorded.
        record: takes the tensors of some inputs and what is to be recorded.
        buffers: which inputs those are.
    """

    compute: Callable[..., tuple[Tensor, list[Tensor]]]
    record: Callable[[Sequence[Tensor], list[Tensor]], None]
    buffers: tuple[int, ...]

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        y, terms = self.compute(*tensors)
        self.record([tensors[place] for place in self.buffers], terms)
        return [y]


@dataclass(frozen=True)
class Exchanging:
    """A kernel of one output that exchanges one tensor within, and can be taken apart there to be compiled.

    Attributes:
        kernel: all of it.
        before: takes the tensors of `call.inputs`; gives what is to be exchanged.
        exchange: takes the tensors of some inputs and this; gives what was found, with a gradient of its own.
        after: takes the tensors of `call.inputs` and what was found; gives the output.
        buffers: which inputs the exchange takes.
    """

    kernel: Kernel
    before: Kernel
    exchange: Kernel
    after: Kernel
    buffers: tuple[int, ...]

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self.kernel(*tensors)


@dataclass(frozen=True)
class Site:
    """A call on one rank.

    Attributes:
        layouts: of every input and output of the call, as its rule asked for them.
        relu: whether its result is that of the ReLU that follows, which alone reads it.
        addend: what is added to its result before that; the kernel takes it after `call.inputs`.
        twin: that of the call whose result is added instead; the kernel takes the tensors of this call's inputs.
    """

    graph: Graph
    mesh: Mesh
    coordinates: Coordinates
    groups: Groups
    context: StepContext
    call: Call
    layouts: Mapping[str, Layout]
    relu: bool = False
    addend: str | None = None
    twin: "Site | None" = None

    def parts(self, name: str, dim: int) -> Indices:
        """The global indices of a dimension that this rank holds of a value."""
        return self.layouts[name].parts(dim, self.mesh, self.coordinates, self.graph.shape(name)[dim])

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Shape of what this rank holds of a value."""
        return self.layouts[name].local_shape(self.graph.shape(name), self.mesh, self.coordinates)

    def is_first(self, axes: Iterable[int]) -> bool:
        """Whether this rank is the first of its group over `axes`."""
        return all(self.coordinates[axis] == 0 for axis in axes)


def as_called(site: Site) -> Kernel:
    """The function itself, with this rank's tensors in place of the whole ones."""
    call = site.call
    nested = [a for a in (*call.args, *call.kwargs.values()) if not isinstance(a, Ref)]
    if leaves(nested, Ref):
        return _nested(site)
    places = {name: place for place, name in enumerate(call.inputs)}
    function, plain = call.function, list(call.args)
    filled = [(i, places[arg.name]) for i, arg in enumerate(call.args) if isinstance(arg, Ref)]
    named = [(key, places[arg.name]) for key, arg in call.kwargs.items() if isinstance(arg, Ref)]
    options = dict(call.kwargs)

    def kernel(*tensors: Tensor) -> Sequence[Tensor]:
        args = plain.copy()
        for i, place in filled:
            args[i] = tensors[place]
        if named:
            return _listed(function(*args, **options | {key: tensors[place] for key, place in named}))
        return _listed(function(*args, **options))

    return kernel


def _nested(site: Site) -> Kernel:
    call = site.call
    function, names = call.function, call.inputs

    def kernel(*tensors: Tensor) -> Sequence[Tensor]:
        found = dict(zip(names, tensors, strict=True))
        args, kwargs = replace((call.args, call.kwargs), Ref, lambda ref: found[ref.name])
        return _listed(function(*args, **kwargs))

    return kernel


def _listed(result: Any) -> Sequence[Tensor]:
    return [result] if isinstance(result, Tensor) else leaves(result, Tensor)


def by_role(call: Call, *roles: str) -> Callable[[Sequence[Tensor]], list[Any]]:
    """Picks from the tensors of `call.inputs` those that attributes of the call name; None where it has no such."""
    named = [call.attributes.get(role) for role in roles]
    places = [None if name is None else call.inputs.index(name) for name in named]
    return lambda tensors: [None if place is None else tensors[place] for place in places]


def nothing(x: Tensor, shape: Sequence[int]) -> Tensor:
    """An empty tensor of a shape, with a gradient edge to `x`: a rank without work takes part in the backward pass."""
    return x.flatten()[:0].reshape(tuple(shape))


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
    return picking(dim, torch.tensor(places))


def picking(dim: int, places: Tensor) -> Callable[[Tensor], Tensor]:
    """Gives the entries at these places of a dimension, in any order and number."""
    constants = Constants(places)
    return lambda x: x.index_select(dim, constants.like(x, torch.int64))


class AddBiasOnce(torch.autograd.Function):
    """Adds the bias where `first`; its gradient is computed everywhere, for the gradient of a partial sum is whole.

    Every rank of the group so gets the bias's whole gradient, and nothing has to be sent for it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, dim: int, first: bool) -> Tensor:
        """`x` [..., channels at `dim`, ...], `bias` [channels]; `x` may be of a lower precision, which stays."""
        ctx.dim, ctx.dtype = dim, bias.dtype
        shape = [1] * x.dim()
        shape[dim] = -1
        return x + bias.view(shape).to(x.dtype) if first else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """The bias's gradient is the sum over all other dimensions."""
        others = [dim for dim in range(gradient.dim()) if dim != ctx.dim]
        return gradient, gradient.sum(others, dtype=ctx.dtype), None, None


def postponing(site: Site, layer: Weighted) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """The function of a layer, which leaves its weight gradient for later where the step's context asks for that."""
    context, name = site.context, site.call.name

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # a weight that is computed has a backward pass of its own, which is not to run twice
        own = all(each.is_leaf and each.requires_grad for each in (weight, bias) if each is not None)
        if context.postponed is None or not own or not torch.is_grad_enabled():
            return layer.compute(x, weight, bias)
        return context.postponed.forward(name, layer, x, weight, bias)

    return run


def with_bias(site: Site, compute: Callable[[Tensor, Tensor, Tensor | None], Tensor], dim: int) -> Kernel:
    """A function of (input, weight, bias or None); where its output is a partial sum, one rank adds the bias.

    Args:
        site: of the call.
        compute: the function.
        dim: of the output's channels.
    """
    partial = site.layouts[site.call.outputs[0]].partial
    first, pick = site.is_first(partial), by_role(site.call, "input", "weight", "bias")

    def kernel(*tensors: Tensor) -> list[Tensor]:
        x, weight, bias = pick(tensors)
        if not partial or bias is None:
            return [compute(x, weight, bias)]
        return [AddBiasOnce.apply(compute(x, weight, None), bias, dim, first)]

    return kernel
