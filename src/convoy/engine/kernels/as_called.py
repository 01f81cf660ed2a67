"""Calls that do the same on a part as on the whole."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from convoy.engine.kernels.kernel import Kernel, Site
from convoy.graph.graph import Ref
from convoy.graph.tree import leaves, replace


def build(site: Site) -> Kernel:
    """The function itself, with this rank's tensors in place of the whole ones."""
    kernel = _as_called(site)
    if site.call.op == "opaque" and not any(math.prod(site.local_shape(name)) for name in site.call.outputs):
        return _with_edges(kernel)
    return kernel


def _with_edges(kernel: Kernel) -> Kernel:
    """Of nothing, some functions have no gradient for all of their inputs, for which other ranks wait."""

    def run(*tensors: Tensor) -> Sequence[Tensor]:
        edges = [tensor.sum() * 0 for tensor in tensors if tensor.requires_grad]
        return [sum(edges, y) if y.is_floating_point() else y for y in kernel(*tensors)]

    return run


def _as_called(site: Site) -> Kernel:
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
