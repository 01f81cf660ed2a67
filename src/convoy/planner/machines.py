"""Plans and predictions for machines that are not at hand.

Data parallelism is predicted by `convoy.hardware.data_parallel`, with the range that its errors on published tables
have. Other plans are searched for, and predicted by their timelines, with costs from the same model; they are given as
so many times as fast as data parallelism, so that what both predictions have in common cancels. Calls and messages cost
what data sheets say, with factors fitted to published data.
"""

import contextlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from convoy.errors import ConvoyError, TooLargeError
from convoy.graph.graph import Graph
from convoy.hardware.catalog import Device, Machine, machine, read_devices
from convoy.hardware.data_parallel import Change, DataParallel, Site, Step, inside_link, network_link, site_of, units
from convoy.hardware.speed import KIND_OF, OURS, Item, Software, Work, times
from convoy.ops import place
from convoy.planner.cost.costs import Costs, LayerTimes, Times, Update
from convoy.planner.cost.link import Curve, Link, Links, Ranks
from convoy.planner.cost.local_op import VIEWS, BatchNorm, LocalOp, local_op
from convoy.planner.cost.prediction import most, rank_memory
from convoy.planner.planner import Planned, propose, score
from convoy.planner.search.layers import Constraints, Layers
from convoy.planner.workload import PRECISIONS, Workload, check_positive, workload_of
from convoy.plans.mesh import STAGE, Mesh
from convoy.plans.place import COMPUTE, Batch
from convoy.plans.plan import Plan
from convoy.units import size

# Devices up to which plans beside data parallelism are searched for, and up to which given ones take seconds to predict
SEARCHED, SCORED = 64, 512
STAGED = 8  # devices up to which the network is cut into stages to be faster; on more only where nothing else fits
# How many times as fast as data parallelism another plan has to be: less is within the error of a prediction
WORTH = 1.03
# What layers may have on an axis: rows and columns of pictures are not divided, which GPUs gain nothing from
AMONG = ("sample", "replicate", "filter", "channel")
_ROOM = 0.92  # the part of a device's memory that a framework leaves


@dataclass(frozen=True, repr=False)
class Prediction:
    """What a machine is predicted to do."""

    machine: Machine
    precision: str
    batch: int  # images of an update
    images_per_s: float  # of data parallelism, whether it can be and fits into the memory or not
    within: float  # the factor, over or under, that nine in ten published values were within
    alone: float  # images a second of one device with the whole batch, the mean of unequal ones
    held_back_by: str  # the resource that data parallelism waits for most: a link by its name
    planned: Planned | None  # None where no plan was searched for
    # How many times as fast as data parallelism the fastest plan is: at least 1, unless that cannot be, does not fit
    # into the memory or plans were given
    gain: float
    curve: tuple[tuple[int, float], ...]  # devices, and images a second on so many
    changes: tuple[Change, ...]  # of data parallelism, the most helpful first
    notes: tuple[str, ...]  # what was assumed

    def __repr__(self) -> str:
        least, most = self.best / self.within, self.best * self.within
        rate = f"{self.best:,.0f} images/s ({least:,.0f} to {most:,.0f})"
        return f"{self.machine.label}, {self.precision}: {rate}, {self.speedup:.2f} times one device, plan {self.plan}"

    @property
    def best(self) -> float:
        """Images a second of the fastest plan."""
        return self.images_per_s * self.gain

    @property
    def plan(self) -> Plan:
        return self.planned.best.plan if self.planned is not None else Plan.by_samples(len(self.machine.devices))

    @property
    def speedup(self) -> float:
        """The fastest plan's, over one device with the same batch."""
        return self.best / self.alone

    @property
    def efficiency(self) -> float:
        return self.speedup / len(self.machine.devices)

    def days(self, images: float) -> float:
        return images / self.best / 86400

    def price(self, images: float, hour: float) -> float:
        """The price of so many images, where an hour of one device costs so much."""
        return 24 * self.days(images) * len(self.machine.devices) * hour

    def row(self, images: float, hour: float | None) -> dict[str, str]:
        """The cells of a table by their headings, for the images of a training and the price of a device's hour."""
        least, most = self.best / self.within, self.best * self.within
        return {
            "machine": self.machine.label,
            "precision": self.precision,
            "images/s": f"{self.best:,.0f}",
            "90 % range": f"{least:,.0f} to {most:,.0f}",
            "speed-up": f"{self.speedup:.2f}",
            "efficiency": f"{self.efficiency:.0%}",
            "days": f"{self.days(images):.3g}",
            **({"price": f"{self.price(images, hour):,.2f}"} if hour is not None else {}),
        }

    def document(self, images: float, hour: float | None) -> dict[str, Any]:
        """The same for programs; arguments as for `row`."""
        return {
            "machine": self.machine.text,
            "between": self.machine.between,
            "devices": len(self.machine.devices),
            "batch": self.batch,
            "precision": self.precision,
            "images_per_s": round(self.best, 1),
            "range": [round(self.best / self.within, 1), round(self.best * self.within, 1)],
            "data_parallel_images_per_s": round(self.images_per_s, 1),
            "one_device_images_per_s": round(self.alone, 1),
            "speedup": round(self.speedup, 3),
            "efficiency": round(self.efficiency, 3),
            "held_back_by": self.held_back_by,
            "plan": str(self.plan),
            "passes": self.planned.best.passes if self.planned is not None else 1,
            "faster_than_data_parallel": round(self.gain, 3),
            "curve": [[count, round(rate, 1)] for count, rate in self.curve],
            "changes": [{"what": change.text, "gain": round(change.gain, 3)} for change in self.changes],
            "notes": list(self.notes),
            "days": round(self.days(images), 4),
            **({"price": round(self.price(images, hour), 2)} if hour is not None else {}),
        }


def plan_on(
    model: nn.Module,
    example: torch.Tensor,
    on: str,
    global_batch: int,
    *,
    between: str | None = None,
    precision: str = "auto",
    fix: Sequence[str] | str = (),
    batch_norm: BatchNorm = "sync",
    microbatches: int | None = None,
    memory_limit: float | None = None,
    images_per_second: float | None = None,
    catalog: Path | None = None,
) -> Prediction:
    """What a machine that is not at hand would do with a network, and the plan that would be fastest there.

    >>> found = convoy.plan_on(model, images, on="2xv100-sxm2", global_batch=512)
    >>> found.best / found.within < found.best
    True

    Args:
        model: any network.
        example: images; only the shape of one matters.
        on: the machine, as `8xv100-sxm2`, `4x(8xa100-sxm4)` or `2xtitan-x+1xgtx-1080`.
        global_batch: images of an update.
        between: network between hosts, by name or rate; 10 Gbit/s where nobody says.
        precision: `fp32` (TF32 on devices that have it), `bf16`, `fp16`, or `auto`: bf16 on devices that have it.
        fix: strategies that layers must have.
        batch_norm, microbatches: as in `convoy.plan`; plans with stages are searched for where they allow them.
        memory_limit: bytes of each device; by default what the catalog says.
        images_per_second: that the input of one device gives.
        catalog: a YAML file with devices beside those that are known.

    Raises:
        TooLargeError: no plan fits into the memory, by how much.
        ConvoyError: there is no such machine, precision or plan.
    """
    if precision not in (*PRECISIONS, "auto"):
        raise ConvoyError(f"{precision!r} is no precision: choose auto, or one of {', '.join(PRECISIONS)}")
    check_positive(memory_limit=memory_limit, images_per_second=images_per_second)
    devices = machine(on, between, read_devices(Path(catalog)) if catalog is not None else None)
    precision = usual_precision(devices) if precision == "auto" else precision
    workload = workload_of(
        model, example, global_batch, batch_norm=batch_norm, microbatches=microbatches, precision=precision
    )
    fixes = [fix] if isinstance(fix, str) else list(fix)
    return predict(
        workload, devices, precision, fixes=fixes, memory_limit=memory_limit, images_per_second=images_per_second
    )


def predict(
    workload: Workload,
    machine: Machine,
    precision: str,
    *,
    fixes: Sequence[str] = (),
    plans: Sequence[Plan] = (),
    memory_limit: float | None = None,
    images_per_second: float | None = None,
    software: Software = OURS,
) -> Prediction:
    """The prediction for a network on a machine.

    The workload has the batch of an update and the types of the precision: `fp32`, `tf32`, `bf16` or `fp16`. The memory
    of a device, in bytes, is by default the catalog's; its input gives `images_per_second`. A TooLargeError says by how
    much no plan fits into the memory.
    """
    count, batch = len(machine.devices), workload.batch
    if batch < count:
        raise ConvoyError(
            f"a batch of {batch} is too small for the {count} devices of {machine.text}: raise --batch, or ask for "
            "fewer"
        )
    limit = SCORED if plans else SEARCHED
    if (plans or fixes) and count > limit:
        what = "given plans are predicted" if plans else "plans with fixed layers are searched for"
        raise ConvoyError(f"{what} on up to {limit} devices, but {machine.text} has {count}: ask for fewer")
    for plan in plans:
        workload.check(plan)
    if precision == "bf16" and (lacking := [device.name for device in machine.devices if not has_bf16(device)]):
        raise ConvoyError(f"{lacking[0]} does not compute in bf16: choose fp32 or fp16")
    parallel = DataParallel(work_of(workload.graph), machine, precision, software)
    shares = parallel.shares(batch)
    done, feed = parallel.step(shares), images_per_second or math.inf
    rate = min(batch / done.seconds, feed * count)
    if rate < batch / done.seconds:
        done = replace(done, feed=batch / count / feed)
    room = memory_limit or _ROOM * min(device.memory_gb for device in machine.devices) * 1e9
    workload = replace(workload, shares=shares) if len(set(shares)) > 1 else workload
    planned, gain = None, 1.0
    notes = [f"plans other than data parallelism are looked for on up to {SEARCHED} devices"]
    if plans or count <= SEARCHED:
        planned, gain = _planned(workload, parallel, done, fixes, plans, room)
        notes = list(planned.notes)
    else:
        workload.parts(count)  # tells of a batch that so many cannot share
        pair = replace(workload.resized(2 * max(shares)), microbatch=0)  # each needs as much as with all others
        memory = rank_memory(pair.place(Plan.by_samples(2)), _costs(workload, parallel, done))
        _check_room(workload, machine, most(memory).total, room)
    alone = statistics.fmean(min(batch / parallel.alone(device, batch).total, feed) for device in machine.devices)
    if count > 1 and alone > rate * gain:
        notes.append(f"one device alone is faster: {alone:,.0f} images/s")
    found = planned, gain, parallel.curve(batch), parallel.changes(shares, done), tuple(notes)
    return Prediction(machine, precision, batch, rate, parallel.within, alone, parallel.holds_back(done), *found)


def usual_precision(machine: Machine) -> str:
    """The precision where nobody asks for one: bf16 on devices that have it."""
    return "bf16" if all(map(has_bf16, machine.devices)) else "fp32"


def has_bf16(device: Device) -> bool:
    """Whether it computes in bfloat16."""
    return device.generation in ("ampere", "ada", "hopper", "blackwell", "tpu")


def _costs(workload: Workload, parallel: DataParallel, done: Step) -> Costs:
    """What a step costs, with the times of the first device and how many times as long the others compute. As much of
    the messages shows as in published tables."""
    machine, first = parallel.machine, parallel.machine.devices[0]
    share = min(0.6, max(0.05, done.exposed / done.exchange)) if done.exchange else 0.1
    images = workload.batch / len(machine.devices)
    seconds_of = {device: parallel.alone(device, images).total for device in set(machine.devices)}
    slowdowns = tuple(seconds_of[device] / seconds_of[first] for device in machine.devices)
    return Costs(
        times_on(first, units(first, parallel.precision), parallel.software),
        links_of(site_of(machine), share),
        Update(per_byte=5 / bandwidth(first), per_tensor=first.launch_us * 1e-6),
        batch_norm=workload.batch_norm,
        microbatch=workload.microbatch,
        on_cpu=False,
        slowdowns=slowdowns if len(set(slowdowns)) > 1 else (),
    )


def _planned(
    workload: Workload, parallel: DataParallel, done: Step, fixes: Sequence[str], plans: Sequence[Plan], room: float
) -> tuple[Planned, float]:
    """The plans that are predicted to be fastest, and how much faster than data parallelism the first is."""
    machine, count, costs = parallel.machine, len(parallel.machine.devices), _costs(workload, parallel, done)
    serial = score(workload, Plan(Mesh((), ())), replace(costs, slowdowns=()))
    if plans:
        as_run = replace(workload, schedules=(workload.default_schedule,))
        predictions = [score(as_run, plan, costs, memory_limit=room) for plan in plans]
    elif count == 1:
        Layers(workload.graph, Constraints(tuple(fixes)))  # tells of a fix that cannot be
        predictions = [serial]
    else:
        on = [Mesh(("gpu",), (count,))]  # all devices as one axis, and also as hosts of devices where there are several
        if machine.hosts > 1 and machine.per_host > 1:
            on.append(Mesh(("node", "gpu"), (machine.hosts, machine.per_host)))
        constraints = Constraints(tuple(fixes), room, on, AMONG)
        # on more devices cuts take long to search; one pass goes through stages one after the other, which saves memory
        cut = count <= STAGED and len(workload.counts) > 1
        fast = workload if cut else replace(workload, counts=())
        proposed = propose(fast, count, costs, replace(constraints, memory_limit=None), [])
        predictions = [score(workload, plan, costs, passes, room) for plan, passes in proposed]
        if all(scored.memory.total > room for scored in predictions):
            with contextlib.suppress(TooLargeError):
                proposed = propose(workload, count, costs, constraints, [])
                predictions += [score(workload, plan, costs, passes, room) for plan, passes in proposed]
    _check_room(workload, machine, min(scored.memory.total for scored in predictions), room)
    fitting = [scored for scored in predictions if scored.memory.total <= room]
    best = sorted(fitting, key=lambda scored: scored.seconds)
    plain = next((scored for scored in predictions if scored.plan == Plan.by_samples(count)), None)
    if plain in best and not plans and plain.seconds < WORTH * best[0].seconds:
        best = best[best.index(plain) :]  # what is hardly faster is no gain
    notes = []
    if plain is None:
        try:
            plain = score(workload, Plan.by_samples(count), costs)
        except ConvoyError as error:  # the microbatches are too few
            plain = score(replace(workload, microbatch=0), Plan.by_samples(count), replace(costs, microbatch=0))
            notes.append(f"{error}; the plan is compared with data parallelism without microbatches")
    if (needs := plain.memory.total) > room:
        notes.append(f"data parallelism does not fit: it needs {size(needs)} on each device, of {size(int(room))}")
    if (enough := count // _repeated(workload, best[0].plan)) < count:
        notes.append(f"{enough} of the {count} devices would be as fast: the others repeat what these do")
    planned = Planned(workload, count, tuple(best), serial, None, costs, tuple(notes))
    return planned, plain.seconds / best[0].seconds


def _check_room(workload: Workload, machine: Machine, needs: int, room: float) -> None:
    if needs > room:
        device = min(machine.devices, key=lambda device: device.memory_gb)
        why = f"needs {size(needs)} on each {device.name}, {size(int(needs - room))} more than the {size(int(room))}"
        why += " that there are: lower --batch, or ask for more devices"
        raise TooLargeError(f"a batch of {workload.batch} {why}", needs)


def _repeated(workload: Workload, plan: Plan) -> int:
    """How many devices do the same under a plan, throughout the network."""
    layers = [(call.layer, call.op) for call in workload.graph.calls if call.op in COMPUTE]
    over = zip(*(plan.strategy(*layer) for layer in layers), strict=True)
    same = [set(strategies) == {"replicate"} for strategies in over]
    axes = zip(plan.mesh.names, plan.mesh.sizes, same, strict=False)
    return math.prod(size for name, size, repeats in axes if repeats and name != STAGE)


def times_on(device: Device, precision: str, software: Software) -> LayerTimes:
    """Seconds of operations on a device of the catalog."""

    @cache
    def of_item(item: Item) -> Times:
        seconds = times(Work.of([item], 0, 0, 1), 1, device, precision, software)
        forward, backward = float(seconds.forward[0]), float(seconds.backward[0])
        return Times(forward, backward, seconds.host, 2 * seconds.host * item.back)

    def of_op(op: LocalOp, /) -> Times:
        if op.is_empty or op.op in VIEWS:
            return Times()
        if op.op in ("redistribute", "copy"):
            rate, launch = bandwidth(device), device.launch_us * 1e-6
            return Times(*(num_bytes / rate + launch if num_bytes else 0.0 for num_bytes in op.bytes))
        return of_item(_item(op))

    return of_op


def bandwidth(device: Device) -> float:
    """Bytes a second of a device's memory, as programs reach them."""
    return 0.75e9 * device.gbytes_per_s


def work_of(graph: Graph) -> Work:
    """The work of a network on one device."""
    plan, images = Plan(Mesh((), ())), graph.shape(graph.inputs[0])[0]
    placement = place(graph, plan, Batch(plan.mesh, (), (range(images),)), ())
    items = [_item(local_op(placed, placement, 0)) for placed in placement.calls if placed.call.op not in VIEWS]
    elements = [math.prod(value.shape) for value in graph.parameters() if value.trains]
    return Work.of(items, float(sum(elements)), len(elements), images)


def _item(op: LocalOp) -> Item:
    weights, read = (
        float(sum(operand.numel for operand in op.inputs if operand.role == role))
        for role in ("parameter", "activation")
    )
    written = float(sum(operand.numel for operand in op.outputs))
    kind = KIND_OF.get(op.op, "pool" if "pool" in op.op else "pointwise")
    back = any(operand.gradient for operand in op.inputs)
    if kind not in ("conv", "linear"):
        return Item(kind, 0.0, read, written, weights, back=back)
    shape, groups, stride = op.inputs[1].shape, op.option("groups") or 1, op.option("stride")
    assert isinstance(groups, int)
    # filters of a transposed convolution lie the other way round
    outer, inner = (shape[1], shape[0] // groups) if op.option("transposed") else (shape[0] // groups, shape[1])
    strided = isinstance(stride, tuple) and any(isinstance(step, int) and step > 1 for step in stride)
    sizes = math.prod(shape[2:]), inner, outer, groups, strided, not op.inputs[0].gradient
    return Item(kind, op.flops.forward / 2, read, written, weights, *sizes, back)


def links_of(site: Site, share: float) -> Links:
    """Links between any ranks: a ring inside each host, and one between the hosts, whose network other groups use at
    the same time. `share` is the part of a message's time that it takes from the computation beside it."""

    def link(ranks: Ranks, /) -> Link:
        hosts = len({rank // site.per_host for rank in ranks})
        local = -(-len(ranks) // hosts)
        inside = inside_link(site, site.per_host)
        latency, whole, hop = 2 * (local - 1) * inside.latency, 2 * (local - 1) / local / inside.rate, inside.rate
        if hosts > 1:
            between = network_link(site)
            groups = max(1, site.per_host // local)
            latency += 2 * (hosts - 1) * between.latency
            whole += 2 * (hosts - 1) / hosts * groups / between.rate
            hop = min(hop, between.rate / site.per_host)
        exchange = Curve.line((len(ranks) - 1) * inside.latency, 1 / hop)
        return Link(Curve.line(latency, whole), exchange, overlap=True, cpu_share=share)

    return Links(otherwise=link)
