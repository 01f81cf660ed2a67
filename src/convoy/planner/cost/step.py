"""From a placement to the tasks of a weight update: what each rank computes and sends, in its order.

Of ranks that do the same, the tasks of one stand for all. A network that is not divided into stages is one stage.
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate, chain, count

from convoy.planner.cost.costs import Costs, HostCost, Times
from convoy.planner.cost.gradients import GradientMessage, exchange
from convoy.planner.cost.link import Message
from convoy.planner.cost.local_op import LocalOp, graph_facts, local_bytes
from convoy.planner.cost.pipeline import Staging, in_order
from convoy.planner.cost.program import Item, copied, joined, parameter_bytes, program, running_statistics
from convoy.planner.cost.simulation import rank_classes
from convoy.plans.mesh import Axes
from convoy.plans.place import Placement
from convoy.plans.stages import Crossing
from convoy.plans.timeline import ENGINE, Kind, Stream, Task

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

    def __init__(self, placement: Placement, costs: Costs, ranks: Sequence[int], postpones: bool) -> None:
        self.placement, self.ranks = placement, ranks
        self.simulated: list[int] = []
        self.first_without_weights = 0  # the pass whose weight gradients are computed next
        self.items = program(placement, costs.batch_norm, costs.microbatch)
        backward = self.items[::-1]
        names = dict.fromkeys(name for item in backward for name in item.parameters)
        unused = (v.name for v in placement.graph.parameters() if v.name in placement.layouts or not placement.is_part)
        order = [*names, *(name for name in unused if name not in names)]
        self.exchange = exchange(placement, order, costs.message_sizes)
        # in the order in which the gradients of their parameters are complete
        self.ready = sorted(backward, key=lambda item: item.postponed > 0) if postpones else backward
        # By place in there, the messages that are sent then: in their order, each with all that is in it. Those of
        # parameters that nothing uses come at the end.
        ready_at = {name: place for place, item in enumerate(self.ready) for name in item.parameters}
        never = len(self.ready)
        ends = (max((ready_at.get(p, never) for p in m.parameters), default=0) for m in self.exchange.messages)
        self.starts: dict[int, list[GradientMessage]] = {}
        for place, message in zip(accumulate(ends, max), self.exchange.messages, strict=True):
            self.starts.setdefault(place, []).append(message)
        self.sent: list[dict[int, int]] = []  # for each message that travels, its task on each rank

    @property
    def axes(self) -> set[Axes]:
        axes = {m.axes for item in self.items for m in (*item.forward, *item.backward)}
        return axes | {m.axes for m in self.exchange.messages if self.placement.mesh.size(m.axes) > 1}

    def work_of(self, rank: int) -> Hashable:
        """What a rank does by itself, for comparison with others."""
        messages = self.exchange.messages
        return (
            tuple(id(item.local_ops[rank]) for item in self.items),
            tuple(m.bytes[rank] for item in self.items for m in (*item.forward, *item.backward)),
            tuple((m.bytes[rank], m.copied[rank]) for m in messages),
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
        self._known: dict[LocalOp, Times] = {}

    def tasks(self, passes: int) -> list[Task]:
        mesh, staging, everyone = self.mesh, self.staging, range(self.mesh.num_devices)
        if staging is None:
            stages = [_Stage(self.placement, self.costs, everyone, self.postpones)]
        else:
            stages = [
                _Stage(
                    staging.staged.part(self.placement, number),
                    self.costs,
                    [rank for rank in everyone if mesh.stage_of(rank) == number],
                    self.postpones,
                )
                for number in range(staging.number)
            ]
        work: list[Hashable] = [None] * mesh.num_devices
        for number, stage in enumerate(stages):
            for rank in stage.ranks:
                work[rank] = (number, self.samples[rank], stage.work_of(rank), self._slowdown(rank))
        axes = set(chain.from_iterable(stage.axes for stage in stages))
        self.first = rank_classes(mesh, work, axes | ({(staging.axis,)} if staging is not None else set()))
        self.chain: dict[int, tuple[int, ...]] = dict.fromkeys(sorted(set(self.first)), ())
        for stage in stages:
            stage.simulated = [rank for rank in stage.ranks if rank in self.chain]
        end = ("weights" if self.postpones else "backward", passes - 1)
        schedule = staging.schedule if staging is not None else "1f1b"
        for self.place, (kind, number) in in_order(schedule, passes, len(stages)):
            self.stage = stages[self.place]
            self.part = self._share(number)
            if kind == "forward":
                self._forward(number)
            elif self.is_training and kind == "backward":
                self._backward(number, number == passes - 1, self.place == len(stages) - 1)
            elif self.is_training:
                self._weights(number, number == passes - 1)
            if (kind, number) == end and self.is_training:
                self._update()
        return self.listed

    @property
    def ranks(self) -> Sequence[int]:
        """The simulated ranks of this stage."""
        return self.stage.simulated

    def _share(self, number: int) -> float:
        return self.staging.samples[number] / max(self.staging.samples) if self.staging is not None else 1.0

    def _crossings(self, forward: bool, sends: bool) -> Iterator[tuple[Crossing, int]]:
        """The values, or those whose gradients, this stage sends or is sent, each with the other stage."""
        if self.staging is None:
            return
        staged, differentiable = self.staging.staged, graph_facts(self.placement.graph).differentiable
        is_later = forward == sends  # the other stage
        for crossing in staged.sent(self.place) if is_later else staged.received(self.place):
            if forward or crossing.value in differentiable:
                yield crossing, crossing.target if is_later else crossing.source

    def _receive(self, forward: bool, number: int) -> None:
        """Wait for what other stages send for a pass."""
        for crossing, other in self._crossings(forward, sends=False):
            assert self.staging is not None
            for rank in self.ranks:
                peer = self.first[self.staging.peer(rank, other)]
                self.chain[rank] = (*self.chain[rank], self.sent[crossing, forward, number, peer])

    def _send(self, forward: bool, number: int) -> None:
        """Send other stages what they need of a pass, or the gradients of what they have sent."""
        for crossing, other in self._crossings(forward, sends=True):
            staging, graph = self.staging, self.placement.graph
            assert staging is not None
            link = self.costs.links.between(self.mesh, staging.axis, self.place, other)
            share = (link.cpu_share if link.overlap else 1.0) / 2  # one way of the two that a collective goes
            layer = graph.calls[staging.staged.calls(crossing.target)[0]].layer
            for rank in self.ranks:
                num_bytes = round(self.part * local_bytes(self.placement, crossing.value, rank))
                task = Task(
                    rank,
                    "stages",
                    "transfer",
                    layer,
                    crossing.value,
                    link.exchange(num_bytes),
                    self.chain[rank],
                    cpu_share=share,
                    num_bytes=num_bytes,
                    host=link.host,
                    peer=self.first[staging.peer(rank, other)],
                )
                self.sent[crossing, forward, number, rank] = self._add(task, blocks=False)

    def _times(self, local_op: LocalOp) -> Times:
        if local_op not in self._known:
            self._known[local_op] = self.costs.times(local_op)
        return self._known[local_op]

    def _of_item(self, item: Item, rank: int) -> Times:
        times = self._times(item.local_ops[rank])
        return times + self.costs.per_transfer if item.is_transfer else times

    def _add(self, task: Task, blocks: bool = True) -> int:
        """A task, which holds up all that its rank does after it if it `blocks`."""
        self.listed.append(task)
        if blocks:
            self.chain[task.rank] = (len(self.listed) - 1,)
        return len(self.listed) - 1

    def _compute(self, rank: int, kind: Kind, layer: str, name: str, seconds: float, host: float = 0.0) -> None:
        if name not in _BESIDE:
            seconds *= self._slowdown(rank)
            host = 0.0 if self.replays else host
        if seconds > 0 or host > 0:
            self._add(Task(rank, "compute", kind, layer, name, seconds, self.chain[rank], host=host))

    def _slowdown(self, rank: int) -> float:
        return self.costs.slowdowns[rank] if self.costs.slowdowns else 1.0

    def _around(self, name: str, cost: HostCost) -> None:
        for rank in self.ranks:
            self._compute(rank, "around", "", name, cost.seconds(self.part * self.samples[rank]), cost.host)

    def _forward(self, number: int) -> None:
        self._receive(True, number)
        self._around("input", self.costs.input)
        for item in self.stage.items:
            for rank in self.ranks:
                kind: Kind = "copy" if item.is_transfer else "forward"
                times = self._of_item(item, rank)
                self._compute(rank, kind, item.layer, item.name, self.part * times.forward, times.host_forward)
            for message in item.forward:
                self._collective(message, "transfers", item.layer, item.name)
        self._send(True, number)

    def _backward(self, number: int, is_last: bool, has_loss: bool) -> None:
        self._receive(False, number)
        if has_loss:
            self._around("loss", self.costs.loss)
        for place, item in enumerate(reversed(self.stage.items)):
            for message in item.backward:
                self._collective(message, "transfers", item.layer, item.name)
            for again in item.again:
                for rank in self.ranks:
                    times = self._of_item(again, rank)
                    self._compute(rank, "backward", again.layer, again.name, times.forward, times.host_forward)
            for rank in self.ranks if item.differentiable else ():
                kind: Kind = "copy" if item.is_transfer else "backward"
                times = self._of_item(item, rank)
                seconds = self.part * times.backward * (1 - item.postponed if self.postpones else 1.0)
                self._compute(rank, kind, item.layer, item.name, seconds, times.host_backward)
            if is_last and not self.postpones:
                self._start(place)
        if is_last and not self.postpones:
            self._finish()
        if number > 0 and not self.postpones:
            self._add_to_earlier_passes()
        self._send(False, number)

    def _weights(self, number: int, is_last: bool) -> None:
        """The weight gradients that backward passes up to this one have postponed; with those of the last pass, all
        gradients are exchanged."""
        first = self.stage.first_without_weights
        self.stage.first_without_weights = number + 1
        self.part = sum(map(self._share, range(first, number + 1)))
        for place, item in enumerate(self.stage.ready):
            for rank in self.ranks if item.postponed else ():
                one = item.local_ops[rank]
                seconds = item.postponed * self.part * self._times(one).backward
                at_once = joined(one, self.part)
                if at_once is not None:
                    seconds = min(seconds, item.postponed * self._times(at_once).backward)
                elif self.part > 1:
                    seconds += (self.part - 1) * self._times(copied(parameter_bytes(one), 2)).forward
                self._compute(rank, "backward", item.layer, item.name, seconds)
            if is_last:
                self._start(place)
        if first > 0:
            self._add_to_earlier_passes()
        if is_last:
            self._finish()

    def _collective(
        self, message: Message, stream: Stream, layer: str, name: str, blocks: bool = True
    ) -> dict[int, int]:
        """A message of every group over some axes; the task's place in the list for each rank that takes part."""
        link = self.costs.links.of(self.mesh, message.axes)
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
            task = Task(
                rank,
                stream,
                _KINDS[stream],
                layer,
                name,
                link.seconds(message.kind, most),
                self.chain[rank],
                meetings[sorts],
                0.0 if blocks else link.cpu_share,
                message.bytes[rank],
                0.0 if self.replays else link.host,
            )
            tasks[rank] = self._add(task, blocks)
        return tasks

    def _start(self, place: int) -> None:
        """Send the gradients that are ready after an item, those that travel beside the computation."""
        for message in self.stage.starts.get(place, ()):
            for rank in self.ranks:
                self._copy(rank, message)
            beside = self._overlaps(message)
            self.stage.sent.append(self._gradients(message, blocks=False) if beside else {})

    def _finish(self) -> None:
        """Wait for all messages; those that could not run beside the computation are sent now."""
        self._start(len(self.stage.ready))
        messages = self.stage.exchange.messages
        for message, sent in zip(messages, self.stage.sent, strict=True):
            if self._overlaps(message):
                for rank, number in sent.items():
                    self.chain[rank] = (*self.chain[rank], number)
            else:
                self._gradients(message)
        for message in messages:
            number, costs = len(message.parameters), self.costs
            engine = costs.per_parameter * number, costs.host_per_parameter * number
            for rank in self.ranks:
                self._compute(rank, "copy", message.layer, message.name, *engine)
                self._copy(rank, message)

    def _copy(self, rank: int, message: GradientMessage) -> None:
        if message.copied[rank]:
            times = self._times(copied(message.copied[rank]))
            self._compute(rank, "copy", message.layer, message.name, times.forward, times.host_forward)

    def _gradients(self, message: GradientMessage, blocks: bool = True) -> dict[int, int]:
        return self._collective(message, "gradients", message.layer, message.name, blocks)

    def _overlaps(self, message: GradientMessage) -> bool:
        return self.costs.links.of(self.mesh, message.axes).overlap

    def _add_to_earlier_passes(self) -> None:
        for rank in self.ranks:
            times = self._times(copied(self.stage.exchange.held[rank], 2))
            self._compute(rank, "backward", "", ADDING, times.forward, times.host_forward)

    def _update(self) -> None:
        """The end of a stage's update, in which the engine's own time has a task beside the optimizer's."""
        exchange, update = self.stage.exchange, self.costs.update
        for message in running_statistics(self.stage.placement, self.costs.batch_norm):
            self._collective(message, "transfers", "", "running statistics")
        for rank in self.ranks:
            seconds = update.seconds(exchange.held[rank], exchange.tensors)
            self._compute(rank, "update", "", "optimizer", seconds, update.issuing(exchange.tensors))
            self._compute(rank, "around", "", ENGINE, update.fixed)
