"""Layers that get one strategy together, where choosing for each by itself is out of reach.

In a region where very many features meet, as in the blocks of DenseNet, the number of combinations grows with every
layer. There, layers of one role (the same kind of work, kernel, stride and groups, below one module) are given the same
strategy, and the search is exact among the plans of that form. The result says so.
"""

from collections.abc import Iterable, Mapping, Sequence

from convoy.errors import ConvoyError
from convoy.graph.graph import Call, Graph
from convoy.search.prices import is_choosing
from convoy.search.space import Strategy

Role = tuple[object, ...]
Groups = tuple[tuple[str, ...], ...]
"""Layers in groups; each layer is in one."""


def alone(graph: Graph) -> Groups:
    """Every layer by itself, in the order of the graph."""
    return tuple((layer,) for layer in dict.fromkeys(call.layer for call in graph.calls if is_choosing(call)))


def tied(groups: Groups, met: Iterable[str], graph: Graph) -> Groups:
    """Fewer groups, after too many layers met.

    Args:
        groups: as they are.
        met: layers that met in a table that would be too large.
    """
    met = list(met)
    roles = {call.layer: _role(call, graph) for call in reversed(graph.calls) if is_choosing(call)}
    container = met[-1].rpartition(".")[0] if met else ""
    while container:
        inside = [layer for layer in roles if layer.startswith(f"{container}.")]
        found = _by_role(groups, inside, roles)
        if len(found) < len(groups) and 2 * len(set(met).intersection(inside)) >= len(set(met)):
            return found
        container = container.rpartition(".")[0]
    for layers in (met, list(roles)):
        found = _by_role(groups, layers, roles)
        if len(found) < len(groups):
            return found
    return _merged(groups, [set(met) if len(set(met)) > 1 else set(roles)])


def tied_where_wide(groups: Groups, graph: Graph, most: int) -> Groups:
    """Fewer groups, where concatenations join more features than a search can choose for.

    Args:
        most: so many features may meet.
    """
    deciding: dict[str, tuple[str, ...]] = {}
    for call in graph.calls:
        if is_choosing(call):
            found: tuple[str, ...] = (call.layer,)
        else:
            found = tuple(dict.fromkeys(layer for name in call.inputs for layer in deciding.get(name, ())))
        deciding |= dict.fromkeys(call.outputs, found[-1:] if call.op == "cat" else found)
        if call.op == "cat" and len(call.inputs) > most:
            group_of = {layer: group for group in groups for layer in group}
            if len({group_of[layer] for layer in found}) > most:
                groups = tied(groups, found, graph)
    return groups


def common(group: Sequence[str], allowed: Mapping[str, Sequence[Strategy]]) -> tuple[Strategy, ...]:
    """What all layers of a group may have.

    Raises:
        ConvoyError: nothing.
    """
    first, *others = (allowed[layer] for layer in group)
    found = tuple(strategy for strategy in first if all(strategy in other for other in others))
    if not found:
        raise ConvoyError(f"layers {', '.join(group[:3])} … would be given one strategy, but have none in common")
    return found


def _by_role(groups: Groups, layers: Sequence[str], roles: dict[str, Role]) -> Groups:
    found: dict[Role, set[str]] = {}
    for layer in layers:
        found.setdefault(roles[layer], set()).add(layer)
    return _merged(groups, found.values())


def _merged(groups: Groups, together: Iterable[set[str]]) -> Groups:
    """Groups that share a set become one, where the first of them is."""
    for members in together:
        joined = [group for group in groups if members & set(group)]
        if len(joined) > 1:
            layers = tuple(layer for group in joined for layer in group)
            groups = tuple(layers if g is joined[0] else g for g in groups if g is joined[0] or g not in joined)
    return groups


def _role(call: Call, graph: Graph) -> Role:
    if call.op != "conv":
        return (call.op,)
    attributes = call.attributes
    kernel = graph.shape(attributes["weight"])[2:]
    # depthwise convolutions of different widths play one role
    return (call.op, kernel, attributes["stride"], attributes["groups"] > 1, attributes["transposed"])
