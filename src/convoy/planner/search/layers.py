"""The layers among whose strategies a search chooses: what each may have, which must agree, and how they become a plan.

Where very many features meet, as in the blocks of DenseNet, choosing for each layer by itself is out of reach: the
number of combinations grows with every layer. There, layers of one role (the same kind of work, kernel, stride and
groups, below one module) are given the same strategy, and the search is exact among the plans of that form. The result
says so.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from convoy.errors import ConvoyError
from convoy.graph.graph import Call, Graph
from convoy.ops import OPERATIONS
from convoy.planner.search.prices import NOWHERE, Prices, Strategy, is_choosing, strategies
from convoy.plans.fit import Fix, fix_of, parse_fixes
from convoy.plans.mesh import STAGE, Mesh
from convoy.plans.place import Batch, Situation
from convoy.plans.plan import Plan, axis_names_of

Patterns = tuple[tuple[str, Strategy], ...]


@dataclass
class _Node:
    path: str
    strategy: Strategy | None = None
    children: dict[str, "_Node"] = field(default_factory=dict)


def compact(mesh: Mesh, layers: Mapping[str, Strategy]) -> Plan:
    """The plan that gives every layer its strategy; the layers are in the network's order. One strategy for all layers
    is written in one line, with axes that are called by their strategies. Otherwise patterns such as `features.*` stand
    for what most layers below them have, after those of the others."""
    axis = mesh.stage_axis
    if axis is not None:  # on which layers have no strategy
        inner = compact(
            Mesh(mesh.names[:axis] + mesh.names[axis + 1 :], mesh.sizes[:axis] + mesh.sizes[axis + 1 :]),
            {name: strategy[:axis] + strategy[axis + 1 :] for name, strategy in layers.items()},
        )
        names, sizes = (
            (*inside[:axis], stage, *inside[axis:])
            for inside, stage in ((inner.mesh.names, STAGE), (inner.mesh.sizes, mesh.sizes[axis]))
        )
        return Plan(Mesh(names, sizes), inner.layers)
    distinct = list(dict.fromkeys(layers.values()))
    if len(distinct) <= 1:
        strategy = distinct[0] if distinct else ("replicate",) * len(mesh.sizes)
        names = axis_names_of(strategy)
        if not mesh.sizes:
            return Plan(mesh)
        return Plan(Mesh(names, mesh.sizes), (("*", dict(zip(names, strategy, strict=True))),))
    patterns = _patterns(_tree(layers))
    return Plan(mesh, tuple((pattern, dict(zip(mesh.names, strategy, strict=True))) for pattern, strategy in patterns))


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
        below_node = [strategy for child in node.children.values() for strategy in visit(child)]
        below[node.path] = tuple(dict.fromkeys(below_node))
        here_only = [node.strategy] if node.strategy is not None else []
        return tuple(dict.fromkeys([*here_only, *below_node]))

    everything = visit(root)

    @cache
    def children(path: str, inherited: Strategy) -> Patterns:
        patterns: Patterns = ()
        for child in nodes[path].children.values():
            patterns += of(child.path, inherited)
        return patterns

    @cache
    def of(path: str, inherited: Strategy) -> Patterns:
        """The patterns of a node and all below it, where a pattern above gives `inherited`."""
        node = nodes[path]
        first = ((path, node.strategy),) if node.strategy is not None and node.strategy != inherited else ()
        options: list[Patterns] = [children(path, inherited)]
        options += [(*children(path, s), (f"{path}.*", s)) for s in below[path] if s != inherited]
        return (*first, *_shortest(options))

    whole = [root.strategy] if root.strategy is not None else list(everything)
    options: list[Patterns] = [(*children("", s), ("*", s)) for s in whole]
    return list(_shortest(options))


def _shortest(options: Sequence[Patterns]) -> Patterns:
    return min(options, key=lambda patterns: len(patterns))


def allowed(
    prices: Prices, batch: Batch, calls: Iterable[Call], proposed: Iterable[Strategy], narrow: bool = True
) -> list[Strategy]:
    """The strategies among `given` that a layer with these calls can have; else the rule's own ConvoyError.

    Left out, with the proof that nothing is lost: what the rules refuse; and, where `narrow`, what is no more than
    another one: of convolutions, what asks for the same layouts and gives the same; and `height` and `width` of linear
    layers on a vector for each sample, whose rule then does what `sample` or `replicate` does, whichever the input is
    in already.
    """
    distinct: dict[tuple[object, ...], Strategy] = {}
    calls, proposed = list(calls), list(proposed)
    candidates = set(proposed)
    vectors = len(calls) == 1 and is_on_vectors(calls[0], prices.graph, batch)
    drawing = all(call.op == "random" for call in calls)
    by_layouts = all(call.op in ("conv", "random") for call in calls)  # linear layers follow more of their input
    refused: tuple[Call, Strategy] | None = None
    for strategy in proposed:
        if drawing:  # by samples or not at all
            strategy = tuple("sample" if choice == "sample" else "replicate" for choice in strategy)
        rows = {"height", "width"} & set(strategy)
        if narrow and vectors and rows and _instead(strategy, batch) <= candidates:
            continue
        answers = []
        for call in calls:
            answer = prices.answer(call, batch, strategy, [NOWHERE] * len(call.inputs))
            if isinstance(answer, ConvoyError):
                refused = call, strategy
                break
            answers.append((answer.wants, answer.gives))
        else:
            distinct.setdefault(tuple(answers) if narrow and by_layouts else strategy, strategy)
    if not distinct and refused is not None:
        call, strategy = refused  # its rule names this layer, not one that is like it
        OPERATIONS[call.op].place(Situation(prices.graph, prices.mesh, batch, call, strategy, {}))
    return list(distinct.values())


def _instead(strategy: Strategy, batch: Batch) -> set[Strategy]:
    """The strategies of which a linear layer on vectors does one, as its input lies, where it would divide rows or
    columns."""
    choices: list[tuple[str, ...]] = []
    for axis, choice in enumerate(strategy):
        if choice in ("height", "width"):
            choices.append(("sample", "replicate") if axis in batch.axes else ("replicate",))
        else:
            choices.append((choice,))
    return set(itertools.product(*choices))


def is_on_vectors(call: Call, graph: Graph, batch: Batch) -> bool:
    """Whether a call is a linear layer on one vector for each sample."""
    return call.op == "linear" and graph.shape(call.attributes["input"])[:-1] == (batch.num_samples,)


Role = tuple[object, ...]
Groups = tuple[tuple[str, ...], ...]  # layers in groups; each layer is in one


def alone(graph: Graph) -> Groups:
    """Every layer by itself, in the order of the graph."""
    return tuple((layer,) for layer in dict.fromkeys(call.layer for call in graph.calls if is_choosing(call)))


def tied(groups: Groups, met: Iterable[str], graph: Graph) -> Groups:
    """Fewer groups, after the layers `met` met in a table that would be too large."""
    met = list(met)
    roles = {call.layer: _role(call, graph) for call in reversed(graph.calls) if is_choosing(call)}
    container = met[-1].rpartition(".")[0] if met else ""
    while container:
        inside = [layer for layer in roles if layer.startswith(f"{container}.")]
        merged = _by_role(groups, inside, roles)
        if len(merged) < len(groups) and 2 * len(set(met).intersection(inside)) >= len(set(met)):
            return merged
        container = container.rpartition(".")[0]
    for layers in (met, list(roles)):
        merged = _by_role(groups, layers, roles)
        if len(merged) < len(groups):
            return merged
    return _merged(groups, [set(met) if len(set(met)) > 1 else set(roles)])


def tied_where_wide(groups: Groups, graph: Graph, most: int) -> Groups:
    """Fewer groups, where concatenations join more than `most` features, which a search cannot choose for."""
    deciding: dict[str, tuple[str, ...]] = {}
    for call in graph.calls:
        if is_choosing(call):
            layers: tuple[str, ...] = (call.layer,)
        else:
            layers = tuple(dict.fromkeys(layer for name in call.inputs for layer in deciding.get(name, ())))
        deciding |= dict.fromkeys(call.outputs, layers[-1:] if call.op == "cat" else layers)
        if call.op == "cat" and len(call.inputs) > most:
            group_of = {layer: group for group in groups for layer in group}
            if len({group_of[layer] for layer in layers}) > most:
                groups = tied(groups, layers, graph)
    return groups


def in_common(group: Sequence[str], allowed: Mapping[str, Sequence[Strategy]]) -> tuple[Strategy, ...]:
    """The strategies that all layers of a group may have; a ConvoyError where there are none."""
    first, *rest = (allowed[layer] for layer in group)
    common = tuple(strategy for strategy in first if all(strategy in other for other in rest))
    if not common:
        raise ConvoyError(f"layers {', '.join(group[:3])} … would be given one strategy, but have none in common")
    return common


def _by_role(groups: Groups, layers: Sequence[str], roles: dict[str, Role]) -> Groups:
    by_role: dict[Role, set[str]] = {}
    for layer in layers:
        by_role.setdefault(roles[layer], set()).add(layer)
    return _merged(groups, by_role.values())


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


class Layers:
    """The layers that are chosen for; a ConvoyError where a fix is none, or matches no layer. The first fix that
    matches a layer counts; `among` are the strategies on an axis where none does."""

    def __init__(self, graph: Graph, fixes: Iterable[str | Fix], among: Sequence[str]) -> None:
        self._calls: dict[str, list[Call]] = {}
        for call in graph.calls:
            if is_choosing(call):
                self._calls.setdefault(call.layer, []).append(call)
        # kind of work of every layer, in the order of the network
        self.ops = {
            layer: next((c.op for c in calls if c.op != "random"), "random") for layer, calls in self._calls.items()
        }
        self._fixes = parse_fixes(fixes, self.ops)
        self._among = among

    def allowed(self, mesh: Mesh, batch: Batch, prices: Prices) -> dict[str, Sequence[Strategy]]:
        """The strategies of each layer on a mesh; a ConvoyError where a layer can have none that it must have."""
        everything = strategies(mesh, batch.axes, self._among)
        by_kind: dict[object, Sequence[Strategy]] = {}
        by_layer: dict[str, Sequence[Strategy]] = {}
        for layer, calls in self._calls.items():
            fix = fix_of(layer, self._fixes)
            fixed = fix.on(mesh, self.ops[layer]) if fix else None
            if fix and fixed is None:
                raise ConvoyError(
                    f"the fix {fix} has {len(fix.strategies)} strategies, and no mesh that was searched has as many "
                    f"axes: write one strategy, or one for each axis"
                )
            if fixed is not None and any(s == "sample" and a not in batch.axes for a, s in enumerate(fixed)):
                raise ConvoyError(f"the fix {fix} needs a batch that can be divided over {mesh}: choose a larger batch")
            key = (tuple(map(prices.kind, calls)), fixed)
            if key not in by_kind:
                proposed = everything if fixed is None else [fixed]
                by_kind[key] = allowed(prices, batch, calls, proposed, narrow=fixed is None)
            by_layer[layer] = by_kind[key]
        return by_layer

    def plan(self, mesh: Mesh, layers: Mapping[str, Strategy]) -> Plan:
        plan = compact(mesh, {layer: layers[layer] for layer in self.ops})
        assert all(plan.strategy(layer, op) == layers[layer] for layer, op in self.ops.items())
        return plan
