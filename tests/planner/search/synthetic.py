"""Costs that are easily stated, and every plan of a network priced by itself."""

import itertools
from dataclasses import dataclass
from functools import partial

from benchmarks.measuring.analytic import Analytic

from convoy.graph.graph import Ref
from convoy.graph.tree import leaves
from convoy.ops import place
from convoy.planner.search.prices import additive_seconds
from convoy.plans.layout import balanced
from convoy.plans.place import Batch, sample_axes

Roofline = partial(Analytic, flops=1e12, bandwidth=1e11, overhead=2e-6, latency=5e-6, rate=1e10)
"""Seconds on a slower device with faster links; what decides is said by each test."""


@dataclass
class Given:
    """A strategy for every layer, as a plan."""

    mesh: object
    layers: dict

    def strategy(self, layer, op):
        return self.layers.get(layer, ("replicate",) * len(self.mesh.sizes))


def output_names(graph):
    return [ref.name for ref in leaves(graph.output, Ref)]


def placed_under(graph, plan, parts=None):
    """A graph under a plan, as `parallelize` places it."""
    axes = sample_axes(((call.layer, call.op) for call in graph.calls), plan)
    samples = graph.shape(graph.inputs[0])[0]
    batch = Batch(plan.mesh, axes, (parts or (lambda count: balanced(samples, count)))(plan.mesh.size(axes)))
    return place(graph, plan, batch, output_names(graph))


def every_placement(graph, mesh, domains, parts=None):
    """Every plan that can be placed, by its strategies."""
    from convoy.errors import ConvoyError

    for strategies in itertools.product(*domains.values()):
        plan = Given(mesh, dict(zip(domains, strategies, strict=True)))
        try:
            yield strategies, placed_under(graph, plan, parts)
        except ConvoyError:
            continue


def brute_force(graph, mesh, costs, domains, parts=None):
    """Seconds of every plan, by its strategies; each placed and priced by itself."""
    placements = every_placement(graph, mesh, domains, parts)
    return {strategies: additive_seconds(placement, costs) for strategies, placement in placements}
