"""From a placement to the tasks of a weight update: what each rank computes and sends, in its order.

Of ranks that do the same, the tasks of one stand for all. A network that is not divided into stages is one stage; else
its `Staging` says through which stages the passes go.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, count

from convoy.graph.graph import Graph
from convoy.ops import work
from convoy.planner.cost.costs import Costs, HostCost, Times
from convoy.planner.cost.link import Message
from convoy.planner.cost.program import (
    GradientMessage,
    Item,
    copied,
    exchange,
    joined,
    parameter_bytes,
    program,
    running_statistics,
    weights_of,
)
from convoy.planner.cost.simulation import rank_classes
from convoy.plans.mesh import Axes, Mesh, ranks_of
from convoy.plans.place import Placement
from convoy.plans.plan import Plan
from convoy.plans.schedule import Schedule, in_flight, in_order
from convoy.plans.stages import Crossing, StagedGraph, Stages
from convoy.plans.timeline import ENGINE, Kind, Stream, Task


@dataclass(frozen=True)
class Staging:
    """A network in stages, and the passes that go through them."""

    mesh: Mesh  # with an axis of stages
    staged: StagedGraph  # with the stage of every call
    samples: tuple[int, ...]  # of every pass of an update
    schedule: Schedule = "1f1b"

    @staticmethod
    def of(plan: Plan, graph: Graph, outputs: Sequence[str], samples: Sequence[int]) -> "Staging | None":
        """The staging of a plan; None where it has no axis `stage`. The graph has the samples of the largest pass. A
        network that cannot be cut so is a ConvoyError."""
        axis = plan.mesh.stage_axis
        if axis is None:
            return None
        number = plan.mesh.sizes[axis]
        stages = Stages.of(graph, number, plan.stages, work(graph))
        stages.owners(graph)
        return Staging(plan.mesh, StagedGraph(graph, tuple(outputs), stages.of_calls(graph), number), tuple(samples))

    @property
    def axis(self) -> int:
        """Position of the stages' axis in the mesh."""
        assert self.mesh.stage_axis is not None
        return self.mesh.stage_axis

    @property
    def number(self) -> int:
        """How many stages there are."""
        return self.staged.number

    def peer(self, rank: int, stage: int) -> int:
        """The rank of another stage with which a rank exchanges what crosses between them."""
        place = list(self.mesh.coordinates(rank))
        place[self.axis] = stage
        return self.mesh.rank(place)

    def in_flight(self, stage: int) -> int:
        """Passes whose activations a stage keeps at once, at most."""
        return in_flight(self.schedule, len(self.samples), stage, self.number)


ADDING = "add to earlier passes"  # the name of adding up the gradients of all layers, which is the work of none
# What costs know of the slowest rank, or of none in particular, and what no CUDA graph replays
_BESIDE = ("input", "optimizer", ENGINE)
_KINDS: dict[Stream, Kind] = {"transfers": "transfer", "gradients": "gradient"}


def step_tasks(placement: Placement, costs: Costs, passes: int = 1, staging: Staging | None = None) -> list[Task]:
    """The tasks of an update of so many passes, for one rank of each class of ranks that do the same. Messages between
    layers hold up what comes after them. Gradients are sent in the last pass only: beside the computation where the
    link allows it, otherwise at the end, as the engine does it through shared memory."""
    return _Builder(placement, costs, staging).tasks(passes)


def samples_of(placement: Placement) -> list[int]:
    """The samples of a pass on each rank."""
    batch, mesh = placement.batch, placement.mesh
    places = (mesh.index(mesh.coordinates(rank), batch.axes) for rank in range(mesh.num_devices))
    return [len(batch.parts[place]) if batch.parts else 0 for place in places]


class _Stage:
    """What the ranks of a stage do; a network in one piece is one stage."""

    def __init__(self, placement: Placement, costs: Costs, staging: Staging | None, number: int) -> None:
        mesh, self.number = placement.mesh, number
        # all of them where a plan with stages runs in one piece, as it is profiled
        self.ranks: Sequence[int] = range(mesh.num_devices) if staging is None else ranks_of(mesh, number)
        self.received = staging.staged.received(number) if staging is not None else ()
        self.sent = staging.staged.sent(number) if staging is not None else ()
        self.placement = placement if staging is None else staging.staged.part(placement, number)
        self.first_without_weights = 0  # the pass whose weight gradients are computed next
        self.items = program(self.placement, costs.batch_norm, costs.microbatch)
        backward = self.items[::-1]
        names = dict.fromkeys(name for item in backward for name in item.parameters)
        order = list(names | dict.fromkeys(weights_of(self.placement)))  # those that nothing uses come last
        self.exchange = exchange(self.placement, order, costs.message_sizes)
        # in the order in which the gradients of their parameters are complete
        postpones = staging is not None and staging.schedule == "zero-bubble"
        self.ready = sorted(backward, key=lambda item: item.postponed > 0) if postpones else backward
        # By place in there, the messages that are sent then: in their order, each with all that is in it. Those of
        # parameters that nothing uses come at the end.
        ready_at = {name: place for place, item in enumerate(self.ready) for name in item.parameters}
        never = len(self.ready)
        ends = (max((ready_at.get(p, never) for p in m.parameters), default=0) for m in self.exchange.messages)
        self.starts: dict[int, list[GradientMessage]] = {}
        for place, message in zip(accumulate(ends, max), self.exchange.messages, strict=True):
            self.starts.setdefault(place, []).append(message)
        # the tasks of each message that has begun on each rank; None where it waits for the end
        self.begun: list[tuple[GradientMessage, dict[int, int] | None]] = []

    @property
    def axes(self) -> set[Axes]:
        axes = {m.axes for item in self.items for m in (*item.forward, *item.backward)}
        return axes | {m.axes for m in self.exchange.messages if self.placement.mesh.size(m.axes) > 1}

    def work_of(self, rank: int) -> Hashable:
        """What a rank does by itself, for comparison with others."""
        return (
            self.number,
            tuple(id(item.local_ops[rank]) for item in self.items),
            tuple(m.bytes[rank] for item in self.items for m in (*item.forward, *item.backward)),
            tuple((m.bytes[rank], m.copied[rank]) for m in self.exchange.messages),
            self.exchange.held[rank],
        )


class _Builder:
    def __init__(self, placement: Placement, costs: Costs, staging: Staging | None) -> None:
        self.placement, self.mesh, self.costs, self.staging = placement, placement.mesh, costs, staging
        self.is_training = placement.graph.training
        self.postpones = staging is not None and staging.schedule == "zero-bubble"
        self.replays = costs.recorded and staging is None
        self.samples = samples_of(placement)
        self.listed: list[Task] = []
        self.part = 1.0  # of the samples of a whole pass
        self.meetings = count()
        self.sent: dict[tuple[Crossing, bool, int, int], int] = {}
        self.stages = [_Stage(placement, costs, staging, n) for n in range(staging.number if staging else 1)]
        work = {rank: stage.work_of(rank) for stage in self.stages for rank in stage.ranks}
        axes = set(chain.from_iterable(stage.axes for stage in self.stages))
        axes |= {(staging.axis,)} if staging is not None else set()
        everyone = range(self.mesh.num_devices)
        kinds = [(work[rank], self.samples[rank], self._slowdown(rank)) for rank in everyone]
        self.first = rank_classes(self.mesh, kinds, axes)
        # the tasks that a simulated rank has to have done before it goes on
        self.chain: dict[int, tuple[int, ...]] = dict.fromkeys(sorted(set(self.first)), ())
        self._enter(self.stages[0])

    def _enter(self, stage: _Stage) -> None:
        self.stage = stage
        self.ranks = [rank for rank in stage.ranks if rank in self.chain]  # those that are simulated

    def tasks(self, passes: int) -> list[Task]:
        end = ("weights" if self.postpones else "backward", passes - 1)
        schedule = self.staging.schedule if self.staging is not None else "1f1b"
        for number, (kind, index) in in_order(schedule, passes, len(self.stages)):
            self._enter(self.stages[number])
            self.part = self._share(index)
            if kind == "forward":
                self._forward(index)
            elif self.is_training and kind == "backward":
                self._backward(index, index == passes - 1)
            elif self.is_training:
                self._weights(index, index == passes - 1)
            if (kind, index) == end and self.is_training:
                self._update()
        return self.listed

    def _share(self, number: int) -> float:
        return self.staging.samples[number] / max(self.staging.samples) if self.staging is not None else 1.0

    def _slowdown(self, rank: int) -> float:
        return self.costs.slowdowns[rank] if self.costs.slowdowns else 1.0

    def _peer(self, rank: int, stage: int) -> int:
        """The simulated rank that stands for a rank's peer in another stage."""
        assert self.staging is not None
        return self.first[self.staging.peer(rank, stage)]

    def _with_gradients(self, crossings: Iterable[Crossing]) -> list[Crossing]:
        return [crossing for crossing in crossings if crossing.value in self.placement.graph.differentiable]

    def _receive(self, crossings: Iterable[Crossing], forward: bool, number: int) -> None:
        """Wait for what other stages send for a pass."""
        for crossing in crossings:
            sender = crossing.source if forward else crossing.target
            for rank in self.ranks:
                arrival = self.sent[crossing, forward, number, self._peer(rank, sender)]
                self.chain[rank] = (*self.chain[rank], arrival)

    def _send(self, crossings: Iterable[Crossing], forward: bool, number: int) -> None:
        """Send other stages what they need of a pass, or the gradients of what they have sent."""
        # The sender's task: it takes up the sender's way out, and cycles at both ends. A receiver has none, it waits,
        # which is what the bubble counts, and what a watched update has marks of.
        for crossing in crossings:
            staging, graph, value = self.staging, self.placement.graph, crossing.value
            assert staging is not None
            receiver = crossing.target if forward else crossing.source
            link = self.costs.links.between(self.mesh, staging.axis, self.stage.number, receiver)
            share = (link.cpu_share if link.overlap else 1.0) / 2  # one way of the two that a collective goes
            layer = graph.calls[staging.staged.calls(crossing.target)[0]].layer
            for rank in self.ranks:
                num_bytes = round(self.part * self.placement.local_bytes(value, rank))
                seconds = link.exchange(num_bytes)
                after, peer = self.chain[rank], self._peer(rank, receiver)
                task = Task(
                    rank, "stages", "transfer", layer, value, seconds, after, -1, share, num_bytes, link.host, peer
                )
                self.sent[crossing, forward, number, rank] = self._add(task, blocks=False)

    def _add(self, task: Task, blocks: bool = True) -> int:
        """A task, which holds up all that its rank does after it if it `blocks`."""
        self.listed.append(task)
        if blocks:
            self.chain[task.rank] = (len(self.listed) - 1,)
        return len(self.listed) - 1

    def _compute(self, kind: Kind, layer: str, name: str, costs: Iterable[tuple[float, float]]) -> None:
        """Work of all simulated ranks, by its seconds on each and those of the host that issues it."""
        for rank, (seconds, host) in zip(self.ranks, costs, strict=True):
            if name not in _BESIDE:
                seconds *= self._slowdown(rank)
                host = 0.0 if self.replays else host
            if seconds > 0 or host > 0:
                self._add(Task(rank, "compute", kind, layer, name, seconds, self.chain[rank], host=host))

    def _times(self, item: Item) -> list[Times]:
        return [self.costs.time(item.local_ops[rank]) for rank in self.ranks]

    def _around(self, name: str, cost: HostCost) -> None:
        seconds = [cost.seconds(self.part * self.samples[rank]) for rank in self.ranks]
        self._compute("around", "", name, [(of_rank, cost.host) for of_rank in seconds])

    def _forward(self, number: int) -> None:
        self._receive(self.stage.received, True, number)
        self._around("input", self.costs.input)
        for item in self.stage.items:
            costs = [(self.part * of_op.forward, of_op.host_forward) for of_op in self._times(item)]
            self._compute("copy" if item.is_transfer else "forward", item.layer, item.name, costs)
            for message in item.forward:
                self._collective(message, "transfers", item.layer, item.name)
        self._send(self.stage.sent, True, number)

    def _backward(self, number: int, is_last: bool) -> None:
        self._receive(self._with_gradients(self.stage.sent), False, number)
        if self.stage is self.stages[-1]:
            self._around("loss", self.costs.loss)
        for place, item in enumerate(reversed(self.stage.items)):
            for message in item.backward:
                self._collective(message, "transfers", item.layer, item.name)
            for again in item.again:
                costs = [(of_op.forward, of_op.host_forward) for of_op in self._times(again)]
                self._compute("backward", again.layer, again.name, costs)
            if item.differentiable:
                part = self.part * (1 - item.postponed if self.postpones else 1.0)
                costs = [(part * of_op.backward, of_op.host_backward) for of_op in self._times(item)]
                self._compute("copy" if item.is_transfer else "backward", item.layer, item.name, costs)
            if is_last and not self.postpones:
                self._start(place)
        if is_last and not self.postpones:
            self._finish()
        if number > 0 and not self.postpones:
            self._add_to_earlier_passes()
        self._send(self._with_gradients(self.stage.received), False, number)

    def _weights(self, number: int, is_last: bool) -> None:
        """The weight gradients that backward passes up to this one have postponed; with those of the last pass, all
        gradients are exchanged."""
        first = self.stage.first_without_weights
        self.stage.first_without_weights = number + 1
        self.part = sum(map(self._share, range(first, number + 1)))
        for place, item in enumerate(self.stage.ready):
            if item.postponed:
                seconds = [self._postponed(item, rank) for rank in self.ranks]
                self._compute("backward", item.layer, item.name, [(of_rank, 0.0) for of_rank in seconds])
            if is_last:
                self._start(place)
        if first > 0:
            self._add_to_earlier_passes()
        if is_last:
            self._finish()

    def _postponed(self, item: Item, rank: int) -> float:
        """Seconds of a weight's gradient for several passes."""
        op, times = item.local_ops[rank], self.costs.time
        seconds, at_once = item.postponed * self.part * times(op).backward, joined(op, self.part)
        if at_once is not None:
            return min(seconds, item.postponed * times(at_once).backward)
        return seconds + max(0.0, self.part - 1) * times(copied(parameter_bytes(op), 2)).forward

    def _collective(
        self, message: Message, stream: Stream, layer: str, name: str, blocks: bool = True
    ) -> dict[int, int]:
        """A message of every group over some axes; the task's place in the list for each rank that takes part."""
        link = self.costs.link(self.mesh, message.axes)
        meetings: dict[tuple[int, ...], int] = {}
        tasks = {}
        for rank in self.ranks:
            group = [self.mesh.rank(place) for place in self.mesh.group(self.mesh.coordinates(rank), message.axes)]
            most = max(message.bytes[member] for member in group)
            if len(group) == 1 or most == 0:
                continue
            sorts = tuple(sorted({self.first[member] for member in group}))
            if sorts not in meetings:
                meetings[sorts] = next(self.meetings)
            what = rank, stream, _KINDS[stream], layer, name, link.seconds(message.kind, most)
            share, host = 0.0 if blocks else link.cpu_share, 0.0 if self.replays else link.host
            task = Task(*what, self.chain[rank], meetings[sorts], share, message.bytes[rank], host)
            tasks[rank] = self._add(task, blocks)
        return tasks

    def _start(self, place: int) -> None:
        """Send the gradients that are ready after an item, those that travel beside the computation."""
        for message in self.stage.starts.get(place, ()):
            # gradients are copied into their message, and stay in its memory
            sizes = [message.copied[rank] for rank in self.ranks]
            copies = [self.costs.time(copied(size)) if size else Times() for size in sizes]
            seconds = [(of_rank.forward, of_rank.host_forward) for of_rank in copies]
            self._compute("copy", message.layer, message.name, seconds)
            beside = self.costs.link(self.mesh, message.axes).overlap
            name = message.layer, message.name
            tasks = self._collective(message, "gradients", *name, blocks=False) if beside else None
            self.stage.begun.append((message, tasks))

    def _finish(self) -> None:
        """Wait for all messages; those that could not run beside the computation are sent now."""
        self._start(len(self.stage.ready))
        for message, tasks in self.stage.begun:
            if tasks is None:
                self._collective(message, "gradients", message.layer, message.name)
            for rank, number in (tasks or {}).items():
                self.chain[rank] = (*self.chain[rank], number)
        for message, _ in self.stage.begun:
            count = len(message.parameters)
            engine = self.costs.per_parameter * count, self.costs.host_per_parameter * count
            self._compute("copy", message.layer, message.name, [engine] * len(self.ranks))

    def _add_to_earlier_passes(self) -> None:
        times = [self.costs.time(copied(self.stage.exchange.held[rank], 2)) for rank in self.ranks]
        self._compute("backward", "", ADDING, [(of_rank.forward, of_rank.host_forward) for of_rank in times])

    def _update(self) -> None:
        """The end of a stage's update, in which the engine's own time has a task beside the optimizer's."""
        exchange, update = self.stage.exchange, self.costs.update
        for message in running_statistics(self.stage.placement, self.costs.batch_norm):
            self._collective(message, "transfers", "", "running statistics")
        seconds = [update.seconds(exchange.held[rank], exchange.tensors) for rank in self.ranks]
        self._compute("update", "", "optimizer", [(of_rank, update.issuing(exchange.tensors)) for of_rank in seconds])
        self._compute("around", "", ENGINE, [(update.fixed, 0.0)] * len(self.ranks))
