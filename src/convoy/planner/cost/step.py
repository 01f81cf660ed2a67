"""From a placement to the tasks of a weight update: what each rank computes and sends, in its order.

Of ranks that do the same, the tasks of one stand for all. A network that is not divided into stages is one stage.
"""

from collections.abc import Hashable, Sequence
from itertools import chain, count

from convoy.planner.cost.costs import Costs, HostCost, Times
from convoy.planner.cost.gradients import Exchange, GradientMessage, exchange
from convoy.planner.cost.link import Collective
from convoy.planner.cost.local_op import LocalOp, graph_facts, local_bytes
from convoy.planner.cost.pipeline import Staging
from convoy.planner.cost.program import (
    Item,
    Message,
    copied,
    joined,
    laid_out,
    parameter_bytes,
    program,
    running_statistics,
)
from convoy.planner.cost.simulation import rank_classes
from convoy.plans.mesh import Axes
from convoy.plans.place import Placement
from convoy.plans.schedule import Action, actions
from convoy.plans.stages import Crossing
from convoy.plans.timeline import Kind, Stream, Task

ADDING = "add to earlier passes"  # the name of adding up the gradients of all layers, which is the work of none


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

    def __init__(self, placement: Placement, costs: Costs, ranks: Sequence[int], order: Sequence[Action]) -> None:
        self.placement, self.ranks, self.order = placement, ranks, order
        self.simulated: list[int] = []
        self.first_without_weights = 0  # the pass whose weight gradients are computed next
        self.items = program(placement, costs.batch_norm, costs.microbatch)
        names = [name for item in reversed(self.items) for name in item.parameters]
        listed = set(names)
        names += [
            value.name
            for value in placement.graph.parameters()
            if value.name not in listed and (value.name in placement.layouts or not placement.is_part)
        ]
        self.exchange = exchange(placement, names, costs.update, costs.message_sizes, costs.on_cpu)

    @property
    def axes(self) -> set[Axes]:
        axes = {m.axes for item in self.items for m in (*item.forward, *item.backward)}
        return axes | {m.axes for m in self.exchange.messages if self.placement.mesh.size(m.axes) > 1}

    def own(self, rank: int) -> Hashable:
        """What a rank does by itself, for comparison with others."""
        messages = self.exchange.messages
        return (
            tuple(id(item.local_ops[rank]) for item in self.items),
            tuple(m.bytes[rank] for item in self.items for m in (*item.forward, *item.backward)),
            tuple((m.bytes[rank], m.copied[rank]) for m in messages),
            self.exchange.updated[rank],
        )


class _Builder:
    def __init__(self, placement: Placement, costs: Costs, staging: Staging | None) -> None:
        self.placement, self.mesh, self.costs, self.staging = placement, placement.mesh, costs, staging
        self.samples = samples_of(placement)
        self.found: list[Task] = []
        self.part = 1.0  # of the samples of a whole pass
        self.meetings = count()
        self.sent: dict[tuple[Crossing, bool, int, int], int] = {}
        self._known: dict[LocalOp, Times] = {}

    def tasks(self, passes: int) -> list[Task]:
        mesh, staging = self.mesh, self.staging
        everyone = range(mesh.num_devices)
        if staging is None:
            orders = [actions("1f1b", passes, 0, 1)]
            stages = [_Stage(self.placement, self.costs, everyone, orders[0])]
        else:
            stages = [
                _Stage(
                    staging.part(self.placement, stage),
                    self.costs,
                    [rank for rank in everyone if staging.stage_of(rank) == stage],
                    actions(staging.schedule, passes, stage, staging.number),
                )
                for stage in range(staging.number)
            ]
        self.last = passes - 1
        self.first = self._rank_classes(stages)
        self.chain: dict[int, tuple[int, ...]] = dict.fromkeys(sorted(set(self.first)), ())
        for stage in stages:
            stage.simulated = [rank for rank in stage.ranks if rank in self.chain]
        waiting = [iter(stage.order) for stage in stages]
        following = [next(order, None) for order in waiting]
        while any(following):  # each stage as far as what it waits for has been listed
            for place, stage in enumerate(stages):
                self.stage, self.place = stage, place
                while (action := following[place]) is not None:
                    kind, number = action
                    if kind != "weights" and not self._receive(kind == "forward", number):
                        break
                    self._act(kind, number)
                    following[place] = next(waiting[place], None)
                    if following[place] is None:
                        self._end()
        return self.found

    def _rank_classes(self, stages: Sequence[_Stage]) -> list[int]:
        work: list[Hashable] = [None] * self.mesh.num_devices
        for place, stage in enumerate(stages):
            for rank in stage.ranks:
                work[rank] = (place, self.samples[rank], stage.own(rank), self._slowdown(rank))
        axes = set(chain.from_iterable(stage.axes for stage in stages))
        return rank_classes(self.mesh, work, axes | ({(self.staging.axis,)} if self.staging is not None else set()))

    @property
    def ranks(self) -> Sequence[int]:
        """The simulated ranks of this stage."""
        return self.stage.simulated

    def _act(self, kind: str, number: int) -> None:
        """One pass of this stage, forward or back, or the weight gradients of all passes up to it."""
        training, is_end = self.placement.graph.training, self.staging is None or self.place == self.staging.number - 1
        self.part = 1.0 if self.staging is None else self._share(number)
        if kind == "weights":
            first = self.stage.first_without_weights
            self.part, self.stage.first_without_weights = sum(map(self._share, range(first, number + 1))), number + 1
            self._weights(last=number == self.last, again=first > 0)
            return
        if kind == "forward":
            self._around("input", self.costs.input)
            self._forward(later=number > 0)
        elif training:
            if is_end:
                self._around("loss", self.costs.loss)
            self._backward(last=number == self.last, later=number > 0)
            if number > 0 and not self._postpones:
                self._add_to_earlier_passes()
        self._send(kind == "forward", number)

    def _share(self, number: int) -> float:
        assert self.staging is not None
        return self.staging.samples[number] / max(self.staging.samples)

    @property
    def _postpones(self) -> bool:
        return self.staging is not None and self.staging.schedule == "zero-bubble"

    def _end(self) -> None:
        if not self.placement.graph.training:
            return
        for message in running_statistics(self.stage.placement, self.costs.batch_norm):
            self._collective(
                message.axes, message.kind, message.bytes, "transfers", "transfer", "", "running statistics"
            )
        self._update()

    def _receive(self, forward: bool, number: int) -> bool:
        """Wait for what other stages send for a pass; False where they are not known to yet."""
        if self.staging is None or not (forward or self.placement.graph.training):
            return True
        staged = self.staging.staged
        messages: dict[int, list[int]] = {}
        for crossing in staged.received(self.place) if forward else staged.sent(self.place):
            other = crossing.source if forward else crossing.target
            if not forward and not self._returns(crossing):
                continue
            for rank in self.ranks:
                key = (crossing, forward, number, self.first[self.staging.peer(rank, other)])
                if key not in self.sent:
                    return False
                messages.setdefault(rank, []).append(self.sent[key])
        for rank, numbers in messages.items():
            self.chain[rank] = (*self.chain[rank], *numbers)
        return True

    def _returns(self, crossing: Crossing) -> bool:
        return crossing.value in graph_facts(self.placement.graph).differentiable

    def _send(self, forward: bool, number: int) -> None:
        """Send other stages what they need of a pass, or the gradients of what they have sent."""
        if self.staging is None or not (forward or self.placement.graph.training):
            return
        graph, mesh, staging = self.placement.graph, self.mesh, self.staging
        for crossing in staging.staged.sent(self.place) if forward else staging.staged.received(self.place):
            other = crossing.target if forward else crossing.source
            if not forward and not self._returns(crossing):
                continue
            link = self.costs.links.between(mesh, staging.axis, self.place, other)
            share = (link.cpu_share if link.overlap else 1.0) / 2  # one way of the two that a collective goes
            layer = graph.calls[staging.staged.calls(crossing.target)[0]].layer
            for rank in self.ranks:
                num_bytes = round(self.part * local_bytes(self.placement, crossing.value, rank))
                self.sent[crossing, forward, number, rank] = self._add(
                    rank,
                    "stages",
                    "transfer",
                    layer,
                    crossing.value,
                    link.exchange(num_bytes),
                    host=link.host,
                    message=(-1, num_bytes, share),
                    blocks=False,
                    peer=self.first[staging.peer(rank, other)],
                )

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
        peer: int = -1,
    ) -> int:
        """A task after all that has held up the rank so far; `message` is its meeting, bytes and share of the core."""
        meeting, num_bytes, share = message
        if self.costs.recorded and self.staging is None and kind != "update" and name != "input":
            host = 0.0
        after = self.chain[rank]
        self.found.append(Task(rank, stream, kind, layer, name, seconds, after, meeting, share, num_bytes, host, peer))
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
            self._compute(rank, "around", "", name, cost.seconds(self.part * self.samples[rank]), cost.host)

    def _forward(self, later: bool) -> None:
        for item in self.stage.items:
            for rank in self.ranks:
                kind: Kind = "copy" if item.is_transfer else "forward"
                times = self._of_item(item, rank)
                seconds = self.part * times.forward
                seconds -= min(self._laid_out(item, rank), seconds / 2) if later else 0.0
                self._compute(rank, kind, item.layer, item.name, seconds, times.host_forward)
            for message in item.forward:
                self._transfer(item, message)

    def _laid_out(self, item: Item, rank: int) -> float:
        """Seconds for laying out a weight, which zero-bubble saves in passes after the first."""
        if not (self._postpones and self.costs.lays_out and item.postponed):
            return 0.0
        layout_op = laid_out(item.local_ops[rank])
        return self._times(layout_op).forward if layout_op is not None else 0.0

    def _weights(self, last: bool, again: bool) -> None:
        """The weight gradients that backward passes have postponed; with those of the last pass, all gradients are
        exchanged."""
        if not self.placement.graph.training:
            return
        sending = _Sending(self, self.stage.exchange) if last else None
        if sending is not None:
            sending.ready([name for item in self.stage.items if not item.postponed for name in item.parameters])
        for item in reversed(self.stage.items):
            for rank in self.ranks if item.postponed else ():
                one = item.local_ops[rank]
                seconds = item.postponed * self.part * self._times(one).backward
                at_once = joined(one, self.part)
                if at_once is not None:
                    seconds = min(seconds, item.postponed * self._times(at_once).backward)
                elif self.part > 1:
                    seconds += (self.part - 1) * self._times(copied(parameter_bytes(one), 2)).forward
                self._compute(rank, "backward", item.layer, item.name, seconds)
            if sending is not None and item.postponed:
                sending.ready(item.parameters)
        if again:
            self._add_to_earlier_passes()
        if sending is not None:
            sending.finish()

    def _backward(self, last: bool, later: bool) -> None:
        sending = _Sending(self, self.stage.exchange) if last and not self._postpones else None
        for item in reversed(self.stage.items):
            for message in item.backward:
                self._transfer(item, message)
            for again in item.again:
                for rank in self.ranks:
                    times = self._of_item(again, rank)
                    self._compute(rank, "backward", again.layer, again.name, times.forward, times.host_forward)
            for rank in self.ranks if item.differentiable else ():
                kind: Kind = "copy" if item.is_transfer else "backward"
                times = self._of_item(item, rank)
                seconds = self.part * times.backward * (1 - item.postponed if self._postpones else 1.0)
                seconds -= min(self._laid_out(item, rank), seconds / 2) if later else 0.0
                self._compute(rank, kind, item.layer, item.name, seconds, times.host_backward)
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
        for rank in self.ranks:
            times = self._times(copied(self.stage.exchange.held[rank], 2))
            self._compute(rank, "backward", "", ADDING, times.forward, times.host_forward)

    def _update(self) -> None:
        exchange = self.stage.exchange
        for rank in self.ranks:
            seconds = self.costs.update.seconds(exchange.updated[rank], exchange.tensors)
            self._compute(rank, "update", "", "optimizer", seconds, self.costs.update.issuing(exchange.tensors))
        for message in exchange.messages:
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
        """Wait for all messages; those that could not run beside the computation are sent now."""
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
            message.axes, message.kind, message.bytes, "gradients", "gradient", message.layer, message.name, blocks
        )

    def _overlaps(self, message: GradientMessage) -> bool:
        return self._builder.costs.links.of(self._builder.mesh, message.axes).overlap
