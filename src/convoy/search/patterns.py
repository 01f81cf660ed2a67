"""From a strategy for every layer to a plan with as few patterns as can be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from convoy.plans.text import axis_names_of
from convoy.search.space import Strategy

Patterns = tuple[tuple[str, Strategy], ...]


@dataclass
class _Node:
    """A part of the modules' names."""

    path: str
    strategy: Strategy | None = None
    children: dict[str, "_Node"] = field(default_factory=dict)


def compact(mesh: Mesh, layers: Mapping[str, Strategy]) -> Plan:
    """The plan that gives every layer its strategy.

    One strategy for all layers is written in one line, with axes that are called by their strategies. Otherwise
    patterns such as `features.*` stand for what most layers below them have, after those of the others.

    Args:
        mesh: the devices.
        layers: strategies by name of the layer, in the network's order.
    """
    distinct = list(dict.fromkeys(layers.values()))
    if len(distinct) <= 1:
        strategy = distinct[0] if distinct else ("replicate",) * len(mesh.sizes)
        names = axis_names_of(strategy)
        if not mesh.sizes:
            return Plan(mesh)
        return Plan(Mesh(names, mesh.sizes), (("*", dict(zip(names, strategy, strict=True))),))
    patterns = _patterns(_tree(layers))
    return Plan(mesh, tuple((pattern, dict(zip(mesh.names, given, strict=True))) for pattern, given in patterns))


def _tree(layers: Mapping[str, Strategy]) -> _Node:
    root = _Node("")
    for name, strategy in layers.items():
        node = root
        for part in name.split(".") if name else []:
            path = f"{node.path}.{part}" if node.path else part
            node = node.children.setdefault(part, _Node(path))
        node.strategy = strategy
    return root


def _patterns(root: _Node) -> list[tuple[str, Strategy]]:
    """Patterns, the first that matches decides: what is particular stands before what is general."""
    nodes: dict[str, _Node] = {}
    below: dict[str, tuple[Strategy, ...]] = {}

    def visit(node: _Node) -> tuple[Strategy, ...]:
        nodes[node.path] = node
        found = [strategy for child in node.children.values() for strategy in visit(child)]
        below[node.path] = tuple(dict.fromkeys(found))
        own = [node.strategy] if node.strategy is not None else []
        return tuple(dict.fromkeys([*own, *found]))

    everything = visit(root)

    @cache
    def children(path: str, inherited: Strategy) -> Patterns:
        found: Patterns = ()
        for child in nodes[path].children.values():
            found += of(child.path, inherited)
        return found

    @cache
    def of(path: str, inherited: Strategy) -> Patterns:
        """The patterns of a node and all below it, where a pattern above gives `inherited`."""
        node = nodes[path]
        own = ((path, node.strategy),) if node.strategy is not None and node.strategy != inherited else ()
        options: list[Patterns] = [children(path, inherited)]
        options += [(*children(path, s), (f"{path}.*", s)) for s in below[path] if s != inherited]
        return (*own, *_shortest(options))

    whole = [root.strategy] if root.strategy is not None else list(everything)
    options: list[Patterns] = [(*children("", s), ("*", s)) for s in whole]
    return list(_shortest(options))


def _shortest(options: Sequence[Patterns]) -> Patterns:
    return min(options, key=lambda patterns: len(patterns))
