"""From a placement to a prediction: the tasks of a weight update, their timeline, and the memory of a rank.

Of ranks that do the same, one is simulated for all.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from convoy.planner.cost.costs import Costs, HostCost
from convoy.planner.cost.gradients import Exchange, GradientMessage, exchange, reduced_axes
from convoy.planner.cost.link import Collective
from convoy.planner.cost.local_op import LocalOp
from convoy.planner.cost.memory import RankMemory, most, rank_memory
from convoy.planner.cost.program import Item, Message, copied, program, running_statistics
from convoy.planner.cost.simulation import simulate
from convoy.planner.cost.times import Times
from convoy.plans.mesh import Axes, Mesh
from convoy.plans.place import Placement
from convoy.plans.plan import Plan
from convoy.plans.timeline import Kind, Stream, Task, Timeline, split_engine_time


def rank_classes(mesh: Mesh, own: Sequence[Hashable], axes: Iterable[Axes]) -> list[int]:
    """For every rank the first one that does the same, and meets ranks that do the same as those it meets.

    Colors are refined until they are stable (Weisfeiler and Leman, 1968): ranks of one color then have equal
    timelines, because they begin alike and everything they wait for is alike.

    Args:
        mesh: the devices.
        own: what each rank does by itself.
        axes: over which ranks meet.
    """
    groups = [list(mesh.groups(each)) for each in sorted(set(axes))]
    colors = _numbered(own)
    while True:
        met: list[list[tuple[int, ...]]] = [[] for _ in own]
        for kind in groups:
            for group in kind:
                together = tuple(sorted(colors[rank] for rank in group))
                for rank in group:
                    met[rank].append(together)
        finer = _numbered([(color, *others) for color, others in zip(colors, met, strict=True)])
        if len(set(finer)) == len(set(colors)):
            first: dict[int, int] = {}
            return [first.setdefault(color, rank) for rank, color in enumerate(finer)]
        colors = finer


def _numbered(values: Sequence[Hashable]) -> list[int]:
    known: dict[Hashable, int] = {}
    return [known.setdefault(value, len(known)) for value in values]


def step_tasks(placement: Placement, costs: Costs, passes: int = 1, every_rank: bool = False) -> list[Task]:
    """The tasks of an update, for one rank of each sort that does the same.

    Messages between layers hold up what comes after them. Gradients are sent in the last pass only: beside the
    computation where the link allows it, otherwise at the end, as the engine does it through shared memory.

    Args:
        placement: the network on its mesh, at the batch of one pass.
        costs: the costs of the device and its links.
        passes: forward and backward passes before an update.
        every_rank: list the tasks of all ranks, alike or not.
    """
    return _Builder(placement, costs, every_rank).tasks(passes)


def predict(placement: Placement, costs: Costs, passes: int = 1, every_rank: bool = False) -> Timeline:
    """The timeline of an update; arguments as for `step_tasks`.

    What others get ready beside the computation is waited for at the beginning, if an update is too short for it.
    """
    ahead = costs.input
    if not ahead.beside:
        return simulate(step_tasks(placement, costs, passes, every_rank))
    without = predict(placement, replace(costs, input=HostCost()), passes, every_rank)
    late = passes * max(ahead.seconds(samples) for samples in samples_of(placement)) - without.total
    if late <= 0:
        return without
    return predict(placement, replace(costs, input=HostCost(per_pass=late / passes)), passes, every_rank)


@dataclass(frozen=True)
class Scored:
    """A plan and what is predicted of it.

    Attributes:
        placement: the workload's graph under the plan.
        timeline: one update.
        memory: bytes on the rank that needs most.
    """

    plan: Plan
    placement: Placement
    timeline: Timeline
    memory: RankMemory

    @property
    def seconds(self) -> float:
        """Of an update."""
        return self.timeline.total


def scored(plan: Plan, placement: Placement, costs: Costs, passes: int = 1) -> Scored:
    """The prediction for a plan that is placed; the engine's own time has a span beside the optimizer's."""
    timeline = split_engine_time(predict(placement, costs, passes), costs.update.fixed)
    return Scored(plan, placement, timeline, most(rank_memory(placement, costs)))


def samples_of(placement: Placement) -> list[int]:
    """How many samples of a pass each rank is given."""
    batch, mesh = placement.batch, placement.mesh
    places = (mesh.index(mesh.coordinates(rank), batch.axes) for rank in range(mesh.num_devices))
    return [len(batch.parts[place]) if batch.parts else 0 for place in places]


class _Builder:
    def __init__(self, placement: Placement, costs: Costs, every_rank: bool) -> None:
        self.placement, self.mesh, self.costs = placement, placement.mesh, costs
        self.items = program(placement, costs.batch_norm, costs.microbatch)
        order = [name for item in reversed(self.items) for name in item.parameters]
        known = set(order)
        order += [value.name for value in placement.graph.parameters() if value.name not in known]
        self.exchange = exchange(placement, order, costs.update, costs.message_sizes, costs.on_cpu)
        self.samples = samples_of(placement)
        self.first = list(range(self.mesh.num_devices)) if every_rank else self._rank_classes()
        self.ranks = sorted(set(self.first))
        self.found: list[Task] = []
        self.chain: dict[int, tuple[int, ...]] = dict.fromkeys(self.ranks, ())
        self.meetings = count()
        self._known: dict[LocalOp, Times] = {}

    def tasks(self, passes: int) -> list[Task]:
        for number in range(passes):
            self._around("input", self.costs.input)
            self._forward()
            if self.placement.graph.training:
                self._around("loss", self.costs.loss)
                self._backward(last=number == passes - 1)
                if number > 0:
                    self._add_to_earlier_passes()
        if self.placement.graph.training:
            for message in running_statistics(self.placement, self.costs.batch_norm):
                self._collective(
                    message.axes, message.kind, message.bytes, "transfers", "transfer", "", "running statistics"
                )
            self._update()
        return self.found

    def _rank_classes(self) -> list[int]:
        items, messages = self.items, self.exchange.messages
        axes: set[Axes] = {m.axes for item in items for m in (*item.forward, *item.backward)}
        own = [
            (
                self.samples[rank],
                tuple(id(item.local_ops[rank]) for item in items),
                tuple(m.bytes[rank] for item in items for m in (*item.forward, *item.backward)),
                tuple((m.bytes[rank], m.copied[rank]) for m in messages),
                self.exchange.updated[rank],
                self._slowdown(rank),
            )
            for rank in range(self.mesh.num_devices)
        ]
        return rank_classes(self.mesh, own, axes | reduced_axes(messages, self.mesh))

    def _times(self, local_op: LocalOp) -> Times:
        if local_op not in self._known:
            self._known[local_op] = self.costs.times(local_op)
        return self._known[local_op]

    def _of_item(self, item: Item, rank: int) -> Times:
        times = self._times(item.local_ops[rank])
        return times + self.costs.per_transfer if item.is_transfer else times

    def _add(
        self,
        rank: int,
        stream: Stream,
        kind: Kind,
        layer: str,
        name: str,
        seconds: float,
        *,
        host: float = 0.0,
        message: tuple[int, int, float] = (-1, 0, 0.0),
        blocks: bool = True,
    ) -> int:
        """A task after all that has held up the rank so far; `message` is its meeting, bytes and share of the core."""
        meeting, num_bytes, share = message
        after = self.chain[rank]
        self.found.append(Task(rank, stream, kind, layer, name, seconds, after, meeting, share, num_bytes, host))
        if blocks:
            self.chain[rank] = (len(self.found) - 1,)
        return len(self.found) - 1

    def _compute(self, rank: int, kind: Kind, layer: str, name: str, seconds: float, host: float = 0.0) -> None:
        if kind != "update" and name != "input":  # which are those of the slowest rank
            seconds *= self._slowdown(rank)
        if seconds > 0 or host > 0:
            self._add(rank, "compute", kind, layer, name, seconds, host=host)

    def _slowdown(self, rank: int) -> float:
        return self.costs.slowdowns[rank] if self.costs.slowdowns else 1.0

    def _around(self, name: str, cost: HostCost) -> None:
        for rank in self.ranks:
            self._compute(rank, "around", "", name, cost.seconds(self.samples[rank]), cost.host)

    def _forward(self) -> None:
        for item in self.items:
            for rank in self.ranks:
                kind: Kind = "copy" if item.is_transfer else "forward"
                times = self._of_item(item, rank)
                self._compute(rank, kind, item.layer, item.name, times.forward, times.host_forward)
            for message in item.forward:
                self._transfer(item, message)

    def _backward(self, last: bool) -> None:
        sending = _Sending(self, self.exchange) if last else None
        for item in reversed(self.items):
            for message in item.backward:
                self._transfer(item, message)
            for again in item.again:
                for rank in self.ranks:
                    times = self._of_item(again, rank)
                    self._compute(rank, "backward", again.layer, again.name, times.forward, times.host_forward)
            for rank in self.ranks if item.differentiable else ():
                kind: Kind = "copy" if item.is_transfer else "backward"
                times = self._of_item(item, rank)
                self._compute(rank, kind, item.layer, item.name, times.backward, times.host_backward)
            if sending is not None:
                sending.ready(item.parameters)
        if sending is not None:
            sending.finish()

    def _transfer(self, item: Item, message: Message) -> None:
        self._collective(message.axes, message.kind, message.bytes, "transfers", "transfer", item.layer, item.name)

    def _collective(
        self,
        axes: Axes,
        link_kind: Collective,
        num_bytes: Sequence[int],
        stream: Stream,
        kind: Kind,
        layer: str,
        name: str,
        blocks: bool = True,
    ) -> dict[int, int]:
        """A message of every group over some axes; the task's place in the list for each rank that takes part."""
        link = self.costs.links.of(self.mesh, axes)
        meetings: dict[tuple[int, ...], int] = {}
        placed = {}
        for rank in self.ranks:
            group = [self.mesh.rank(place) for place in self.mesh.group(self.mesh.coordinates(rank), axes)]
            most = max(num_bytes[member] for member in group)
            if len(group) == 1 or most == 0:
                continue
            sorts = tuple(sorted({self.first[member] for member in group}))
            meeting = meetings.setdefault(sorts, -1)
            if meeting < 0:
                meeting = meetings[sorts] = next(self.meetings)
            share = 0.0 if blocks else link.cpu_share
            about = (meeting, num_bytes[rank], share)
            seconds = link.seconds(link_kind, most)
            placed[rank] = self._add(
                rank, stream, kind, layer, name, seconds, host=link.host, message=about, blocks=blocks
            )
        return placed

    def _add_to_earlier_passes(self) -> None:
        """Gradients of a pass after the first are added to those that are there."""
        for rank in self.ranks:
            times = self._times(copied(self.exchange.held[rank], 2))
            self._compute(rank, "backward", "", "add to earlier passes", times.forward, times.host_forward)

    def _update(self) -> None:
        for rank in self.ranks:
            seconds = self.costs.update.seconds(self.exchange.updated[rank], self.exchange.tensors)
            self._compute(rank, "update", "", "optimizer", seconds, self.costs.update.issuing(self.exchange.tensors))
        for message in self.exchange.messages:
            if message.gathered:
                self._collective(
                    message.axes, "gather", message.gathered, "gradients", "gradient", message.layer, message.name
                )


class _Sending:
    """Sends gradients in their order as they become ready, and what is left at the end of the backward pass."""

    def __init__(self, builder: _Builder, exchange: Exchange) -> None:
        self._builder = builder
        self._messages = exchange.messages
        self._waiting = [set(message.parameters) for message in self._messages]
        self._next = 0
        self._sent: list[dict[int, int]] = []

    def ready(self, parameters: Sequence[str]) -> None:
        for waiting in self._waiting:
            waiting.difference_update(parameters)
        while self._next < len(self._messages) and not self._waiting[self._next]:
            self._start()

    def finish(self) -> None:
        """All messages are there, those that could not run beside the computation too."""
        while self._next < len(self._messages):
            self._start()
        builder = self._builder
        for message, sent in zip(self._messages, self._sent, strict=True):
            if self._overlaps(message):
                for rank, number in sent.items():
                    builder.chain[rank] = (*builder.chain[rank], number)
            else:
                self._send(message, blocks=True)
        for message in self._messages:
            for rank in builder.ranks:
                number, costs = len(message.parameters), builder.costs
                engine = costs.per_parameter * number, costs.host_per_parameter * number
                builder._compute(rank, "copy", message.layer, message.name, *engine)
                self._copy(rank, message)

    def _start(self) -> None:
        message = self._messages[self._next]
        self._next += 1
        builder = self._builder
        for rank in builder.ranks:
            self._copy(rank, message)
        self._sent.append(self._send(message, blocks=False) if self._overlaps(message) else {})

    def _copy(self, rank: int, message: GradientMessage) -> None:
        if message.copied[rank]:
            times = self._builder._times(copied(message.copied[rank]))
            self._builder._compute(rank, "copy", message.layer, message.name, times.forward, times.host_forward)

    def _send(self, message: GradientMessage, blocks: bool) -> dict[int, int]:
        return self._builder._collective(
            message.axes,
            message.kind,
            message.bytes,
            "gradients",
            "gradient",
            message.layer,
            message.name,
            blocks,
        )

    def _overlaps(self, message: GradientMessage) -> bool:
        return self._builder.costs.links.of(self._builder.mesh, message.axes).overlap
