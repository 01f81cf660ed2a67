"""Layers in groups that a person can look over: single layers of a small network, blocks of a large one."""

from convoy.plans.place import Placement

MOST = 20
"""Groups that still fit into a table."""


def layer_groups(placement: Placement, most: int = MOST) -> dict[str, str]:
    """The group of every layer, in the order of the network.

    Layers are together that are in the same module, of the deepest level at which there are few enough; layers without
    parameters belong to what comes before them. Where even the outermost modules are too many, they are not put
    together any further.

    Args:
        placement: of the network.
        most: groups there may be.
    """
    graph = placement.graph
    has_parameters: dict[str, bool] = {}
    for placed in placement.calls:
        own = any(graph.values[name].origin == "parameter" for name in placed.call.inputs)
        has_parameters[placed.call.layer] = has_parameters.get(placed.call.layer, False) or own
    deepest = max((layer.count(".") + 1 for layer in has_parameters), default=1)
    for depth in range(deepest, 0, -1):
        found = _at(depth, has_parameters)
        if len(set(found.values())) <= most:
            break
    return found if has_parameters else {}


def _at(depth: int, has_parameters: dict[str, bool]) -> dict[str, str]:
    """The groups where names are cut to `depth` parts."""
    heavy = {_cut(layer, depth) for layer, own in has_parameters.items() if own}
    found: dict[str, str] = {}
    last = ""
    for layer in has_parameters:
        group = _cut(layer, depth)
        if group in heavy or not last:
            last = group
        found[layer] = last
    return found


def _cut(layer: str, depth: int) -> str:
    return ".".join(layer.split(".")[:depth])
