"""A cost that is easily stated: a roofline for calls, α-β for messages; and networks and plans to try it on."""

import itertools
import math
from dataclasses import dataclass

from convoy.graph.graph import Ref
from convoy.graph.tree import leaves
from convoy.plans.layout import balanced
from convoy.plans.memory import predict_memory
from convoy.plans.place import place, sample_axes
from convoy.plans.rules import Batch
from convoy.plans.traffic import all_reduce_elements
from convoy.search.costs import additive_seconds


@dataclass(frozen=True)
class Roofline:
    """Seconds on rank 0, which has most where shares are unequal."""

    flops: float = 1e12
    bandwidth: float = 1e11
    overhead: float = 2e-6
    latency: float = 5e-6
    rate: float = 1e10

    def context(self, call):
        return None

    def compute(self, placed, placement):
        graph, mesh = placement.graph, placement.mesh
        origin = (0,) * len(mesh.sizes)
        layouts = {**placed.placed.inputs, **placed.placed.outputs}
        shapes = {name: layouts[name].local_shape(graph.shape(name), mesh, origin) for name in layouts}
        moved = 12 * sum(map(math.prod, shapes.values()))
        work = 0
        if placed.call.op in ("conv", "linear"):
            weight = shapes[placed.call.attributes["weight"]]
            output = shapes[placed.call.outputs[0]]
            own = output[2:] if placed.call.op == "conv" else output[1:-1]
            work = 6 * output[0] * math.prod(own) * math.prod(weight)
        return self.overhead + work / self.flops + moved / self.bandwidth

    def transfer(self, step, mesh, shape, itemsize, differentiable):
        origin = (0,) * len(mesh.sizes)
        count = mesh.size(step.axes)
        before = math.prod(step.source.local_shape(shape, mesh, origin))
        after = math.prod(step.target.local_shape(shape, mesh, origin))
        forward = {
            "reduce": all_reduce_elements(before, count),
            "gather": (count - 1) * before,
            "move": after,
            "reduce_scatter": (count - 1) * after,
        }.get(step.kind, 0)
        backward = {
            "copy": all_reduce_elements(before, count),
            "slice": (count - 1) * after,
            "move": after,
            "reduce_scatter": (count - 1) * after,
        }.get(step.kind, 0)
        elements = [forward] + [backward] * differentiable
        slower = 3 if 0 in step.axes and len(mesh.sizes) > 1 else 1
        return sum(self.latency + n * itemsize * slower / self.rate for n in elements if n)

    def gradient(self, parameter, layout, mesh):
        axes = tuple(sorted(layout.copied))
        numel = math.prod(layout.local_shape(parameter.shape, mesh, (0,) * len(mesh.sizes)))
        sent = all_reduce_elements(numel, mesh.size(axes)) * parameter.dtype.itemsize if axes else 0
        return self.latency * bool(axes) + sent / self.rate

    def update(self, parameter, layout, mesh):
        numel = math.prod(layout.local_shape(parameter.shape, mesh, (0,) * len(mesh.sizes)))
        return 20 * numel / self.bandwidth

    def parameter_memory(self, parameter, layout, mesh):
        numel = math.prod(layout.local_shape(parameter.shape, mesh, (0,) * len(mesh.sizes)))
        return 3 * numel * parameter.dtype.itemsize

    def memory(self, placement):
        return max(each.total + each.parameters for each in predict_memory(placement))


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


def brute_force(graph, mesh, costs, domains, parts=None):
    """Seconds of every plan, by its strategies; each placed and priced by itself."""
    from convoy.errors import ConvoyError

    found = {}
    for strategies in itertools.product(*domains.values()):
        plan = Given(mesh, dict(zip(domains, strategies, strict=True)))
        try:
            found[strategies] = additive_seconds(placed_under(graph, plan, parts), costs)
        except ConvoyError:
            continue
    return found
