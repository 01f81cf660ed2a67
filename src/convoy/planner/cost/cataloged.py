"""Costs of devices and links that are not at hand: those of `convoy.hardware`, for the search and the timeline."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from convoy.hardware.catalog import Device, Machine
from convoy.hardware.exchange import Site, fitted, inside_link, network_link, site_of
from convoy.hardware.speed import OURS, Software, times
from convoy.hardware.work import KIND_OF, Item, Work
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.gradients import Update
from convoy.planner.cost.link import Curve, Link, Links, Ranks
from convoy.planner.cost.local_op import VIEWS, LocalOp
from convoy.planner.cost.times import Times

_SIZES = (0, *(1 << power for power in range(10, 31, 2)))


@dataclass(frozen=True)
class CatalogedTimes:
    """Seconds of operations on a device of the catalog: a `LayerTimes`."""

    device: Device
    precision: str
    software: Software = OURS
    _known: dict[Item, Times] = field(default_factory=dict, compare=False, repr=False)

    def __call__(self, local_op: LocalOp, /) -> Times:
        if local_op.is_empty or local_op.op in VIEWS:
            return Times()
        if local_op.op in ("redistribute", "copy"):
            moved, rate = local_op.bytes, 0.75e9 * self.device.gbytes_per_s
            launch = self.device.launch_us * 1e-6
            return Times(*(size / rate + launch if size else 0.0 for size in moved))
        item = _item(local_op)
        if item not in self._known:
            predicted = times(Work.of([item], 0, 0, 0, 0, 1), 1, self.device, self.precision, self.software)
            needs = any(operand.gradient for operand in local_op.inputs)
            numbers = float(predicted.forward[0]), float(predicted.backward[0]), predicted.host, 2 * predicted.host
            self._known[item] = Times(*numbers) if needs else Times(numbers[0], 0.0, predicted.host)
        return self._known[item]


def _item(one: LocalOp) -> Item:
    weights = sum(operand.numel for operand in one.inputs if operand.role == "parameter")
    read = sum(operand.numel for operand in one.inputs if operand.role == "activation")
    written = sum(operand.numel for operand in one.outputs)
    kind = KIND_OF.get(one.op, "pool" if "pool" in one.op else "pointwise")
    if kind not in ("conv", "linear"):
        return Item(kind, 0.0, read, written, weights)
    shape, groups = one.inputs[1].shape, one.option("groups") or 1
    assert isinstance(groups, int)
    window = 1.0
    for size in shape[2:]:
        window *= size
    stride = one.option("stride")
    strided = isinstance(stride, tuple) and any(isinstance(step, int) and step > 1 for step in stride)
    first = not one.inputs[0].gradient
    return Item(
        kind, one.flops.forward / 2, read, written, weights, window, shape[1], shape[0] / groups, groups, strided, first
    )


@dataclass(frozen=True)
class CatalogedLinks:
    """Links of a machine, for any of its ranks."""

    site: Site
    share: float = 0.1  # of a message's time, what it takes from the computation beside it

    def __call__(self, ranks: Ranks, /) -> Link:
        """A ring inside each host, and one between the hosts, whose network other groups use at the same time."""
        site = self.site
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
        start = (len(ranks) - 1) * inside.latency
        return Link(
            Curve(tuple((size, latency + whole * size) for size in _SIZES)),
            Curve(tuple((size, start + size / hop) for size in _SIZES)),
            overlap=True,
            cpu_share=self.share,
        )


def costs_of(
    machine: Machine, precision: str, software: Software, share: float, slowdowns: Sequence[float] = ()
) -> Costs:
    """What a step costs on a machine of the catalog, with the times of its first device. `share` is the part of the
    time of messages that they take from the computation beside them; `slowdowns` are how many times as long as the
    first each device computes."""
    device = machine.devices[0]
    rate = 0.75e9 * device.gbytes_per_s
    return Costs(
        CatalogedTimes(device, precision, software),
        Links(otherwise=CatalogedLinks(site_of(machine), share)),
        Update(per_byte=5 / rate, per_tensor=device.launch_us * 1e-6),
        on_cpu=False,
        slowdowns=tuple(slowdowns) if len(set(slowdowns)) > 1 else (),
    )
