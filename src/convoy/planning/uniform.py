"""The placements that are rehearsed: together they show every layer with every strategy at its own sizes."""

from collections.abc import Iterator

from convoy.errors import ConvoyError
from convoy.graph.graph import Call
from convoy.planning.workload import Workload
from convoy.plans.mesh import Mesh
from convoy.plans.place import Placement
from convoy.plans.plan import Plan
from convoy.plans.rules import RULES, Batch, Situation
from convoy.search.patterns import compact
from convoy.search.prices import is_choosing
from convoy.search.space import Strategy

ALONE = ("sample", "filter", "channel", "height", "width")
"""What all layers that can have on a mesh of one axis."""
TOGETHER = (("sample", "filter"), ("sample", "channel"), ("sample", "height"), ("filter", "filter"))
"""Likewise on a mesh of two."""


def placements(workload: Workload, mesh: Mesh) -> Iterator[tuple[str, Placement]]:
    """Placements to rehearse on a mesh, each with a name; a layer that cannot have the strategy is by samples, or
    whole where that cannot be either."""
    wanted: list[Strategy]
    match len(mesh.sizes):
        case 0:
            yield "serial", workload.place(Plan(mesh))
            return
        case 1:
            wanted = [(strategy,) for strategy in ALONE]
        case 2:
            wanted = list(TOGETHER)
        case _:
            wanted = []
    layers: dict[str, list[Call]] = {}
    for call in workload.graph.calls:
        if is_choosing(call):
            layers.setdefault(call.layer, []).append(call)
    seen: set[tuple[Strategy, ...]] = set()
    for strategy in wanted:
        given = {layer: _possible(workload, mesh, calls, strategy) for layer, calls in layers.items()}
        if strategy not in given.values() or tuple(given.values()) in seen:
            continue
        seen.add(tuple(given.values()))
        try:
            yield " · ".join(strategy), workload.place(compact(mesh, given))
        except ConvoyError:
            continue


def _possible(workload: Workload, mesh: Mesh, calls: list[Call], strategy: Strategy) -> Strategy:
    by_samples = tuple("sample" for _ in mesh.sizes)
    for candidate in (strategy, by_samples):
        axes = tuple(axis for axis, each in enumerate(candidate) if each == "sample")
        try:
            batch = Batch(mesh, axes, workload.parts(mesh.size(axes)) if axes else (range(workload.samples),))
            for call in calls:
                RULES[call.op](Situation(workload.graph, mesh, batch, call, candidate, {}))
        except ConvoyError:
            continue
        return candidate
    return tuple("replicate" for _ in mesh.sizes)
