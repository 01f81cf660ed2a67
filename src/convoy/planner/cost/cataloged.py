"""What calls and messages cost on a machine that is not at hand: data sheets, with factors fitted to published data."""

import math
from functools import cache

from convoy.graph.graph import Graph
from convoy.hardware.catalog import Device
from convoy.hardware.exchange import Site, fitted, inside_link, network_link
from convoy.hardware.speed import KIND_OF, Item, Software, Work, times
from convoy.ops import place
from convoy.planner.cost.costs import LayerTimes, Times
from convoy.planner.cost.link import Curve, Link, Links, Ranks
from convoy.planner.cost.local_op import VIEWS, LocalOp, local_op
from convoy.plans.mesh import Mesh
from convoy.plans.place import Batch
from convoy.plans.plan import Plan


def times_on(device: Device, precision: str, software: Software) -> LayerTimes:
    """Seconds of operations on a device of the catalog."""

    @cache
    def of_item(item: Item, needs_gradient: bool) -> Times:
        seconds = times(Work.of([item], 0, 0, 0, 0, 1), 1, device, precision, software)
        forward, backward = float(seconds.forward[0]), float(seconds.backward[0])
        return (
            Times(forward, backward, seconds.host, 2 * seconds.host)
            if needs_gradient
            else Times(forward, 0.0, seconds.host)
        )

    def of_op(op: LocalOp, /) -> Times:
        if op.is_empty or op.op in VIEWS:
            return Times()
        if op.op in ("redistribute", "copy"):
            rate, launch = bandwidth(device), device.launch_us * 1e-6
            return Times(*(num_bytes / rate + launch if num_bytes else 0.0 for num_bytes in op.bytes))
        return of_item(_item(op), any(operand.gradient for operand in op.inputs))

    return of_op


def bandwidth(device: Device) -> float:
    """Bytes a second of a device's memory, as programs reach them."""
    return 0.75e9 * device.gbytes_per_s


def work_of(graph: Graph) -> Work:
    """The work of a network on one device."""
    plan, images = Plan(Mesh((), ())), graph.shape(graph.inputs[0])[0]
    placement = place(graph, plan, Batch(plan.mesh, (), (range(images),)), ())
    items = [_item(local_op(placed, placement, 0)) for placed in placement.calls if placed.call.op not in VIEWS]
    elements = [math.prod(value.shape) for value in graph.parameters()]
    kept, image = sum(item.written for item in items) / images, math.prod(graph.shape(graph.inputs[0])) / images
    return Work.of(items, float(sum(elements)), len(elements), kept, image, images)


def _item(op: LocalOp) -> Item:
    weights, read = (
        float(sum(operand.numel for operand in op.inputs if operand.role == role))
        for role in ("parameter", "activation")
    )
    written = float(sum(operand.numel for operand in op.outputs))
    kind = KIND_OF.get(op.op, "pool" if "pool" in op.op else "pointwise")
    if kind not in ("conv", "linear"):
        return Item(kind, 0.0, read, written, weights)
    shape, groups, stride = op.inputs[1].shape, op.option("groups") or 1, op.option("stride")
    assert isinstance(groups, int)
    # filters of a transposed convolution lie the other way round
    outer, inner = (shape[1], shape[0] // groups) if op.option("transposed") else (shape[0] // groups, shape[1])
    strided = isinstance(stride, tuple) and any(isinstance(step, int) and step > 1 for step in stride)
    sizes = math.prod(shape[2:]), inner, outer, groups, strided, not op.inputs[0].gradient
    return Item(kind, op.flops.forward / 2, read, written, weights, *sizes)


def links_of(site: Site, share: float) -> Links:
    """Links between any ranks: a ring inside each host, and one between the hosts, whose network other groups use at
    the same time. `share` is the part of a message's time that it takes from the computation beside it."""

    def link(ranks: Ranks, /) -> Link:
        hosts = len({rank // site.per_host for rank in ranks})
        local = -(-len(ranks) // hosts)
        inside = inside_link(site, site.per_host, fitted)
        latency, whole, hop = 2 * (local - 1) * inside.latency, 2 * (local - 1) / local / inside.rate, inside.rate
        if hosts > 1:
            between = network_link(site, fitted)
            groups = max(1, site.per_host // local)
            latency += 2 * (hosts - 1) * between.latency
            whole += 2 * (hosts - 1) / hosts * groups / between.rate
            hop = min(hop, between.rate / site.per_host)
        exchange = Curve.line((len(ranks) - 1) * inside.latency, 1 / hop)
        return Link(Curve.line(latency, whole), exchange, overlap=True, cpu_share=share)

    return Links(otherwise=link)
