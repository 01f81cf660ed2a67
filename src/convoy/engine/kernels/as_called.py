"""Calls that do the same on a part as on the whole."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from convoy.engine.kernels.kernel import Kernel, Site
from convoy.graph.graph import Ref


def build(site: Site) -> Kernel:
    """The function itself, with this rank's tensors in place of the whole ones."""
    call = site.call
    function, names = call.function, call.inputs

    def kernel(*tensors: Tensor) -> Sequence[Tensor]:
        found = dict(zip(names, tensors, strict=True))
        result = function(*filled(call.args, found), **filled(call.kwargs, found))
        return [result] if isinstance(result, Tensor) else list(result)

    return kernel


def filled(arguments: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The arguments with each `Ref` replaced by its tensor."""
    if isinstance(arguments, Ref):
        return tensors[arguments.name]
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(filled(argument, tensors) for argument in arguments)
    if isinstance(arguments, dict):
        return {key: filled(argument, tensors) for key, argument in arguments.items()}
    return arguments
