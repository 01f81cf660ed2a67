"""Which calls are alike but for their names, so that blocks that repeat are placed and priced once."""

from collections.abc import Mapping
from typing import Any

from convoy.graph.graph import Call, Graph, Ref

Structure = tuple[Any, ...]


def structure(call: Call, graph: Graph, differentiable: frozenset[str]) -> Structure:
    """What two calls must have in common to be placed alike and to cost the same.

    Names of tensors stand in it as places among the call's inputs and outputs.

    Args:
        differentiable: names of the values that have a gradient.
    """
    places = {name: f"${number}" for number, name in enumerate((*call.inputs, *call.outputs))}
    tensors = tuple(
        (
            (value := graph.values[name]).shape,
            str(value.dtype),
            value.origin,
            name in differentiable,
        )
        for name in places
    )
    return (
        call.op,
        getattr(call.function, "__name__", repr(call.function)),
        len(call.inputs),
        tensors,
        _normal(call.attributes, places, graph),
        _normal(call.args, places, graph),
        _normal(call.kwargs, places, graph),
    )


def _normal(value: Any, places: Mapping[str, str], graph: Graph) -> Any:
    if isinstance(value, Ref):
        return places.get(value.name, "$")
    if isinstance(value, str):
        known = graph.values.get(value)
        return places.get(value, value if known is None else f"${known.origin}")
    if isinstance(value, Mapping):
        return tuple((str(key), _normal(item, places, graph)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_normal(item, places, graph) for item in value)
    if value is None or isinstance(value, bool | int | float):
        return value
    return repr(value)
