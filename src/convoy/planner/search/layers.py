"""The layers among whose strategies a search chooses: what each may have, which must agree, and how they become a plan.

Where very many features meet, as in the blocks of DenseNet, choosing for each layer by itself is out of reach: the
number of combinations grows with every layer. There, layers of one role (the same kind of work, kernel, stride and
groups, and nothing or the same fixed, below one module) are given the same strategy, and the search is exact among the
plans of that form. The result says so.
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from convoy.errors import ConvoyError
from convoy.graph.graph import Call, Graph
from convoy.ops import OPERATIONS
from convoy.planner.search.prices import AXIS_STRATEGIES, NOWHERE, Prices, Strategy, is_choosing, strategies
from convoy.plans.fit import Fix, fix_of, parse_fixes
from convoy.plans.mesh import STAGE, Mesh
from convoy.plans.place import Batch, Situation
from convoy.plans.plan import Plan, axis_names_of


@dataclass(frozen=True)
class Constraints:
    """What a plan has to keep."""

    fixes: tuple[str | Fix, ...] = ()  # strategies of layers; of a layer the first that matches counts
    memory_limit: float | None = None  # bytes of a rank
    meshes: Sequence[Mesh] | None = None  # those to search, by default all with one and two axes
    strategies: Sequence[str] = AXIS_STRATEGIES  # on an axis, of layers that are not fixed


ANY = Constraints()

Patterns = tuple[tuple[str, Strategy], ...]


def compact(mesh: Mesh, layers: Mapping[str, Strategy]) -> Plan:
    """The plan that gives every layer its strategy; the layers are in the network's order. One strategy for all layers
    is written in one line, with axes that are called by their strategies. Otherwise patterns such as `features.*` stand
    for what most layers below them have, after those of the others."""
    axis = mesh.stage_axis
    if axis is not None:  # on which layers have no strategy
        inner = compact(
            Mesh(mesh.beside_stages(mesh.names), mesh.beside_stages(mesh.sizes)),
            {name: mesh.beside_stages(strategy) for name, strategy in layers.items()},
        )
        names = (*inner.mesh.names[:axis], STAGE, *inner.mesh.names[axis:])
        return Plan(Mesh(names, mesh.sizes), inner.layers)
    if not mesh.sizes:
        return Plan(mesh)
    distinct = list(dict.fromkeys(layers.values())) or [("replicate",) * len(mesh.sizes)]
    patterns: Patterns = (("*", distinct[0]),)
    if len(distinct) == 1:
        mesh = Mesh(axis_names_of(distinct[0]), mesh.sizes)
    else:
        patterns = _patterns(layers)
    return Plan(mesh, tuple((pattern, dict(zip(mesh.names, strategy, strict=True))) for pattern, strategy in patterns))


def _patterns(layers: Mapping[str, Strategy]) -> Patterns:
    """The fewest patterns, of which the first that matches decides: the particular stands before the general."""
    children = defaultdict[str, dict[str, None]](dict)  # by path, in the order of the network
    for name in layers:
        paths = ["", *itertools.accumulate(name.split(".") if name else (), "{}.{}".format)]
        for parent, child in itertools.pairwise(paths):
            children[parent][child] = None

    @cache
    def below(path: str) -> tuple[Strategy, ...]:
        """The strategies of the layers below a path."""
        strategies_below = (strategy for child in children[path] for strategy in (*at(child), *below(child)))
        return tuple(dict.fromkeys(strategies_below))

    def at(path: str) -> list[Strategy]:
        return [layers[path]] if path in layers else []

    @cache
    def inside(path: str, inherited: Strategy) -> Patterns:
        return tuple(pattern for child in children[path] for pattern in of(child, inherited))

    @cache
    def of(path: str, inherited: Strategy) -> Patterns:
        """The patterns of a layer and all below it, where a pattern above gives `inherited`."""
        itself = tuple((path, strategy) for strategy in at(path) if strategy != inherited)
        options = [inside(path, inherited)]
        options += [(*inside(path, s), (f"{path}.*", s)) for s in below(path) if s != inherited]
        return (*itself, *min(options, key=len))

    return min(((*inside("", s), ("*", s)) for s in at("") or below("")), key=len)


def allowed(
    prices: Prices, batch: Batch, calls: Sequence[Call], proposed: Sequence[Strategy], narrow: bool = True
) -> list[Strategy]:
    """The strategies among those `proposed` that a layer with these calls can have; else the rule's own ConvoyError.

    Left out, with the proof that nothing is lost: what the rules refuse; and, where `narrow`, what is no more than
    another one: of convolutions, what asks for the same layouts and gives the same; and `height` and `width` of linear
    layers on a vector for each sample, whose rule then does what `sample` or `replicate` does, whichever the input is
    in already.
    """
    distinct: dict[tuple[object, ...], Strategy] = {}
    ops, shape = {call.op for call in calls}, prices.graph.shape
    vectors = ops == {"linear"} and all(shape(c.attributes["input"])[:-1] == (batch.num_samples,) for c in calls)
    refused: tuple[Call, Strategy] | None = None
    for strategy in proposed:
        if ops == {"random"}:  # by samples or not at all
            strategy = tuple("sample" if choice == "sample" else "replicate" for choice in strategy)
        if narrow and len(calls) == 1 and vectors and {"height", "width"} & set(strategy):
            row = [("sample", "replicate") if axis in batch.axes else ("replicate",) for axis in range(len(strategy))]
            pairs = zip(strategy, row, strict=True)
            instead = itertools.product(*(row if choice in ("height", "width") else (choice,) for choice, row in pairs))
            if set(proposed).issuperset(instead):
                continue
        answers = []
        for call in calls:
            answer = prices.answer(call, batch, strategy, [NOWHERE] * len(call.inputs))
            if isinstance(answer, ConvoyError):
                refused = call, strategy
                break
            answers.append((answer.wants, answer.gives))
        else:  # linear layers follow more of their input than `answer` is told here
            distinct.setdefault(tuple(answers) if narrow and ops <= {"conv", "random"} else strategy, strategy)
    if not distinct and refused is not None:
        call, strategy = refused  # its rule names this layer, not one that is like it
        OPERATIONS[call.op].place(Situation(prices.graph, prices.mesh, batch, call, strategy, {}))
    return list(distinct.values())


Role = tuple[object, ...]  # the fix of a layer, or None, and then what kind of work it does
Groups = tuple[tuple[str, ...], ...]  # layers in groups; each layer is in one


def alone(graph: Graph) -> Groups:
    """Every layer by itself, in the order of the graph."""
    return tuple((layer,) for layer in dict.fromkeys(call.layer for call in graph.calls if is_choosing(call)))


def tied(groups: Groups, met: Sequence[str], roles: Mapping[str, Role]) -> Groups:
    """Fewer groups, after the layers `met` met in a table that would be too large."""
    wider: list[list[str]] = []
    container = met[-1] if met else ""
    while container := container.rpartition(".")[0]:
        inside = [layer for layer in roles if layer.startswith(f"{container}.")]
        if 2 * len(set(met).intersection(inside)) >= len(set(met)):
            wider.append(inside)
    everything, fixes = list(roles), {layer: role[:1] for layer, role in roles.items()}
    ways = [(layers, roles) for layers in (*wider, met, everything)]
    for layers, alike in (*ways, (met, fixes), (everything, fixes), (everything, dict.fromkeys(everything, ()))):
        merged = _by_role(groups, layers, alike)
        if len(merged) < len(groups):
            break
    return merged


def tied_where_wide(groups: Groups, graph: Graph, roles: Mapping[str, Role], most: int) -> Groups:
    """Fewer groups, where concatenations join more than `most` features, which a search cannot choose for: those that
    are fixed do not count."""
    # bounds on whole plans kept GoogLeNet exact on two axes, by 350 lines for a plan whose sum is 1.5 % smaller
    deciding: dict[str, tuple[str, ...]] = {}
    for call in graph.calls:
        if is_choosing(call):
            layers: tuple[str, ...] = (call.layer,)
        else:
            layers = tuple(dict.fromkeys(layer for name in call.inputs for layer in deciding.get(name, ())))
        deciding |= dict.fromkeys(call.outputs, layers[-1:] if call.op == "cat" else layers)
        if call.op == "cat" and len(call.inputs) > most:
            group_of = {layer: group for group in groups for layer in group}
            if len({group_of[layer] for layer in layers if roles[layer][0] is None}) > most:
                groups = tied(groups, layers, roles)
    return groups


def in_common(group: Sequence[str], allowed: Mapping[str, Sequence[Strategy]]) -> tuple[Strategy, ...]:
    """The strategies that all layers of a group may have; a ConvoyError where there are none."""
    first, *rest = (allowed[layer] for layer in group)
    common = tuple(strategy for strategy in first if all(strategy in other for other in rest))
    if not common:
        raise ConvoyError(f"layers {', '.join(group[:3])} … would be given one strategy, but have none in common")
    return common


def _by_role(groups: Groups, layers: Sequence[str], roles: Mapping[str, Role]) -> Groups:
    """Groups with some of the layers that have one role become one, where the first of them is."""
    by_role: dict[Role, set[str]] = {}
    for layer in layers:
        by_role.setdefault(roles[layer], set()).add(layer)
    for members in by_role.values():
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
    """The layers that are chosen for; a ConvoyError where a fix is none, or matches no layer."""

    def __init__(self, graph: Graph, constraints: Constraints) -> None:
        self._calls = defaultdict[str, list[Call]](list)
        for call in graph.calls:
            if is_choosing(call):
                self._calls[call.layer].append(call)
        # kind of work of every layer, in the order of the network
        self.ops = {
            layer: next((c.op for c in calls if c.op != "random"), "random") for layer, calls in self._calls.items()
        }
        fixes = parse_fixes(constraints.fixes, self.ops)
        self._fixes = {layer: fix_of(layer, fixes) for layer in self.ops}
        self.roles = {layer: (self._fixes[layer], *_role(calls[0], graph)) for layer, calls in self._calls.items()}
        self._among = constraints.strategies

    def fixes_hold(self, plan: Plan) -> bool:
        """Whether a plan keeps all fixes."""
        fixes = ((fix.on(plan.mesh, self.ops[layer]), layer) for layer, fix in self._fixes.items() if fix is not None)
        return all(fixed == plan.strategy(layer, self.ops[layer]) for fixed, layer in fixes)

    def allowed(self, mesh: Mesh, batch: Batch, prices: Prices) -> dict[str, Sequence[Strategy]]:
        """The strategies of each layer on a mesh; a ConvoyError where a layer can have none that it must have."""
        everything = strategies(mesh, batch.axes, self._among)
        by_kind: dict[object, Sequence[Strategy]] = {}
        by_layer: dict[str, Sequence[Strategy]] = {}
        for layer, calls in self._calls.items():
            fix = self._fixes[layer]
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
