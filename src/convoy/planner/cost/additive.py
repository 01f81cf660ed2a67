"""The costs of a step as a sum over calls, transfers and parameters: what an exact search can make least.

The timeline knows more (what hides behind what, who waits for whom); the sum is what it comes to where nothing
overlaps, with an estimate of how much of the exchange of gradients shows. Every answer is a function of what is given:
the search asks once for all calls, tensors and steps that are alike.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from convoy.graph.graph import Call, Graph, Value
from convoy.planner.cost.costs import Costs, Times
from convoy.planner.cost.local_op import LocalOp, dtype_name, graph_facts, local_op
from convoy.planner.cost.program import copied, internal_messages, joined, moved, parameter_bytes
from convoy.plans.layout import Layout, common
from convoy.plans.mesh import Coordinates, Mesh
from convoy.plans.place import PlacedCall, Placement
from convoy.plans.traffic import Traffic, redistributions, step_elements
from convoy.plans.transfer import Step

# Of an exchange of gradients beside the computation, the part by which it makes an update longer, beyond the cycles
# that it takes from the computation
_SHOWN = 0.3


@dataclass(frozen=True)
class OfParameter:
    """What belongs to a parameter."""

    seconds: float  # once in an update: the exchange of its gradient, as far as that delays it, and the optimizer
    adding: float  # seconds of adding its gradient in one more pass to that of earlier ones
    held: float  # bytes on rank 0, with its gradient and the optimizer's state


class Additive:
    """The seconds of one update of a network, in all its passes, each of the rank that has most to do."""

    def __init__(self, costs: Costs, graph: Graph, passes: int = 1) -> None:
        self.costs, self.graph, self.passes = costs, graph, passes
        self._sizes = costs.message_sizes

    def context(self, call: Call) -> Hashable:
        """What the seconds of a call depend on that is not in it: how its inputs are used elsewhere."""
        facts = graph_facts(self.graph)
        return tuple((name in facts.adding[call.name], name in facts.spare) for name in call.inputs)

    def compute(self, placed: PlacedCall, placement: Placement) -> float:
        """Seconds of a call, forward and backward. Its `transfers` name the inputs that come from another layout, with
        or without the steps. Of the placement only graph, mesh and batch are read."""
        slowdowns = self.costs.slowdowns
        if slowdowns:  # the busiest rank may be any
            return self.passes * max(s * self._call(placed, placement, rank) for rank, s in enumerate(slowdowns))
        return self.passes * max(self._call(placed, placement, rank) for rank in busy_ranks(placed, placement.mesh))

    def postponing(self, placed: PlacedCall, placement: Placement, part: float) -> float:
        """Seconds of an update less where the gradients of a call's weight are computed for all passes at once, and not
        added up; they take `part` of the call's backward pass."""
        op = local_op(placed, placement, 0)
        at_once = joined(op, self.passes)
        if at_once is None:
            return 0.0
        shorter = part * (self.passes * self._times(op).backward - self._times(at_once).backward)
        return max(0.0, shorter) + (self.passes - 1) * self._times(copied(parameter_bytes(op), 2)).forward

    def transfer(self, step: Step, mesh: Mesh, value: Value) -> float:
        """Seconds of one step of a redistribution, forward and, where a gradient comes back, backward."""
        first, shape, itemsize = mesh.coordinates(0), value.shape, value.dtype.itemsize
        differentiable = value.name in self.graph.differentiable
        times = self._times(moved(step, shape, dtype_name(value.dtype), differentiable, mesh, first))
        seconds = max(times.total, times.host)
        axes = tuple(axis for axis in step.axes if mesh.sizes[axis] > 1)
        if axes:
            link = self.costs.link(mesh, axes)
            before = step.source.numel(shape, mesh, first)
            collective, traffic = link.all_reduce, [Traffic(before, 0) if step.kind == "reduce" else Traffic(0, before)]
            if step.kind not in ("reduce", "copy"):
                collective = link.exchange
                traffic = [sent_elements(step, mesh, place, shape) for place in some_places(step, mesh)]
            forward, backward = max(sent.forward for sent in traffic), max(sent.backward for sent in traffic)
            ways = (forward, backward if differentiable else 0)
            seconds += sum(collective(count * itemsize) for count in ways if count)
        return self.passes * seconds

    def parameter(self, parameter: Value, layout: Layout, mesh: Mesh) -> OfParameter:
        held = layout.numel(parameter.shape, mesh, mesh.coordinates(0)) * parameter.dtype.itemsize
        if not parameter.trains:
            return OfParameter(0.0, 0.0, held)
        update = self.costs.update
        seconds = self._gradient(held, layout, mesh) + (update.per_tensor + update.per_byte * held)
        adding = self._times(copied(held, 2)).forward if held else 0.0
        return OfParameter(seconds, adding, 2 * held + update.state * held)

    def _gradient(self, size: int, layout: Layout, mesh: Mesh) -> float:
        """Seconds that the exchange of a parameter's gradient over its `copied` axes delays the update."""
        axes = tuple(sorted(axis for axis in layout.copied if mesh.sizes[axis] > 1))
        if not axes:
            return 0.0
        link = self.costs.link(mesh, axes)
        if size < self._sizes.alone:  # it travels with others, of whose message it pays its part
            seconds = link.all_reduce(self._sizes.bucket) * size / self._sizes.bucket
            # On a GPU twice, though it is copied once: what the sum does not know of small messages is about as much.
            # Counted once, plans of AlexNet on 4 devices and of SqueezeNet on 2 × 2 took 8 % longer by the timeline.
            copies = (1 if self.costs.on_cpu else 2) * self._times(copied(size)).forward
        else:
            seconds, copies = link.all_reduce(size), 0.0
        if link.overlap:
            seconds *= link.cpu_share + (1 - link.cpu_share) * _SHOWN
        return seconds + copies + self.costs.per_parameter

    def _times(self, op: LocalOp) -> Times:
        times = self.costs.time(op)
        return Times(times.forward, times.backward) if self.costs.recorded else times

    def _call(self, placed: PlacedCall, placement: Placement, rank: int) -> float:
        costs, graph, mesh = self.costs, placement.graph, placement.mesh
        op = local_op(placed, placement, rank, batch_norm=costs.batch_norm, microbatch=costs.microbatch)
        times = self._times(op)
        # A call takes as long as the slower of device and host: that adds up where one of them is it throughout.
        forward = max(times.forward, times.host_forward)
        seconds = max(times.total, times.host) if graph.training else forward
        if graph.training and placed.call.recomputed:
            seconds += forward
        within = internal_messages(placed, graph, mesh, op, costs.batch_norm)
        if within.axes:
            link = self.costs.link(mesh, within.axes)
            messages = (*within.forward, *within.backward) if graph.training else within.forward
            seconds += sum(link.seconds(kind, num_bytes) for kind, num_bytes in messages)
        return seconds


def sums_of_calls(placement: Placement, costs: Additive) -> Iterator[tuple[float, dict[str, OfParameter]]]:
    """For every call of a placement the seconds of all passes, with what brings its inputs, and the parameters that it
    is the first to take. What brings the network's outputs belongs to the last one."""
    graph, mesh = placement.graph, placement.mesh
    seconds = [costs.compute(placed, placement) for placed in placement.calls]
    for number, name, steps in redistributions(placement):
        for step in steps:
            seconds[min(number, len(seconds) - 1)] += costs.transfer(step, mesh, graph.values[name])
    seen: set[str] = set()
    for placed, of_call in zip(placement.calls, seconds, strict=True):
        new = [name for name in placed.call.inputs if graph.values[name].origin == "parameter" and name not in seen]
        seen.update(new)
        yield of_call, {name: costs.parameter(graph.values[name], placement.layouts[name], mesh) for name in new}


def sent_elements(step: Step, mesh: Mesh, place: Coordinates, shape: tuple[int, ...]) -> Traffic:
    """As `convoy.plans.traffic.step_elements`, without looking at every other rank. In an exchange a rank counts for
    what it gets, which is what others send: what it wants, but for what it holds. On the way back it sends the
    gradients of just that."""
    if step.kind not in ("move", "reduce_scatter"):
        return step_elements(step, mesh, place, shape)
    after = step.target.numel(shape, mesh, place)
    if step.kind == "reduce_scatter":
        return Traffic(step.source.numel(shape, mesh, place) - after, (mesh.size(step.axes) - 1) * after)
    held = after
    for dim, split in step.source.splits if after else ():
        part = step.target.parts(dim, mesh, place, shape[dim])
        held = held // len(part) * len(common(part, split.parts[mesh.index(place, split.axes)]))
    return Traffic(after - held, after - held)


def some_places(step: Step, mesh: Mesh) -> set[Coordinates]:
    """Places among which is one that sends most. The first has the largest parts. One in the middle of all axes has two
    borders, and the last holds least of what it will want: they are looked at where parts may overlap, or need not be
    held already."""
    parts = {"move": 3, "slice": 2}.get(step.kind, 1)
    return {tuple(size * part // 2 - (part == 2) for size in mesh.sizes) for part in range(parts)}


def busy_ranks(placed: PlacedCall, mesh: Mesh) -> set[int]:
    """Ranks among which is one that has most to do: the first parts are the largest, but a rank in the middle of rows
    or columns has two borders."""
    layouts = (*placed.placed.inputs.values(), *placed.placed.outputs.values())
    inner = {axis for layout in layouts for dim, split in layout.splits if dim > 1 for axis in split.axes}
    middle = mesh.rank(tuple(size // 2 if axis in inner else 0 for axis, size in enumerate(mesh.sizes)))
    return {0, middle}
