"""The layers of a network among whose strategies a search chooses."""

from collections.abc import Iterable, Mapping, Sequence

from convoy.errors import ConvoyError
from convoy.graph.graph import Call, Graph
from convoy.plans.fixes import Fix, fix_of, parse_fixes
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from convoy.plans.rules import Batch
from convoy.search.legal import allowed
from convoy.search.patterns import compact
from convoy.search.prices import Prices, is_choosing
from convoy.search.space import Strategy, strategies


class Layers:
    """What is to be chosen for.

    Args:
        graph: the network.
        fixes: strategies that are given; the first that matches a layer counts.
        among: strategies that layers may have on an axis, where no fix says otherwise.

    Attributes:
        ops: kind of work of every layer, in the order of the network.

    Raises:
        ConvoyError: a fix is none, or matches no layer.
    """

    def __init__(self, graph: Graph, fixes: Iterable[str | Fix], among: Sequence[str]) -> None:
        self._calls: dict[str, list[Call]] = {}
        for call in graph.calls:
            if is_choosing(call):
                self._calls.setdefault(call.layer, []).append(call)
        self.ops = {
            layer: next((c.op for c in calls if c.op != "random"), "random") for layer, calls in self._calls.items()
        }
        self._fixes = parse_fixes(fixes, self.ops)
        self._among = among

    def allowed(self, mesh: Mesh, batch: Batch, prices: Prices) -> dict[str, Sequence[Strategy]]:
        """What each layer may have on a mesh.

        Raises:
            ConvoyError: some layer can have nothing of what it must have.
        """
        everything = strategies(mesh, batch.axes, self._among)
        known: dict[object, Sequence[Strategy]] = {}
        found: dict[str, Sequence[Strategy]] = {}
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
            if key not in known:
                given = everything if fixed is None else [fixed]
                known[key] = allowed(prices, batch, calls, given, narrow=fixed is None)
            found[layer] = known[key]
        return found

    def plan(self, mesh: Mesh, given: Mapping[str, Strategy]) -> Plan:
        """A strategy for every layer as a plan of few patterns."""
        plan = compact(mesh, {layer: given[layer] for layer in self.ops})
        assert all(plan.strategy(layer, op) == given[layer] for layer, op in self.ops.items())
        return plan
