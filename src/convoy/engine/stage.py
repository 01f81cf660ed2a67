"""One stage of a network, which this rank runs: its part of the weights, and the way of a part of a batch through it.

Ranks at the same place on the other axes send each other what they have of the values at a cut.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from convoy.comm.collectives import gather_ints
from convoy.comm.stage_links import Arriving, Sent, StageLinks
from convoy.engine.agreement import PASS, Form, Signature
from convoy.engine.allocation import trim_heap
from convoy.engine.network import Network
from convoy.engine.program import Program
from convoy.errors import ConvoyError
from convoy.graph.graph import Ref
from convoy.graph.tree import leaves
from convoy.graph.tree import replace as replace_leaves
from convoy.ops import work
from convoy.ops.postponed import PostponedGradients
from convoy.plans.layout import Layout, Split
from convoy.plans.place import Placement
from convoy.plans.schedule import Action, Schedule, actions, taken_back
from convoy.plans.stages import Crossing, StagedGraph, Stages

# Parts whose values a stage asks for before it needs them, and whose gradients. gloo sends nothing before the receiver
# has asked, and that message queues behind what goes the same way, which on a slow link takes longer than a part is
# computed (docs/benchmarks/stages.md). More would only hold memory.
_ASKED_FOR = 3


@dataclass
class Flight:
    """A part of the batch on its way through this rank's stage: what its backward pass needs."""

    received: list[tuple[Crossing, Tensor]]  # values from earlier stages
    sent: list[tuple[Crossing, Tensor]]  # values for later stages
    outputs: dict[str, Tensor]  # the network's, by name; empty in all stages but the last
    placement: Placement  # of the network at this part's size
    inputs: tuple[Tensor, ...]  # the network's
    key: Any  # all that decides how values lie in memory
    part: int  # its number, counted over all updates
    arriving: list[Arriving | None] | None = None  # gradients of `sent`, once asked for; None if the loss leaves it out


@dataclass
class Stage(Network):
    """Runs this rank's stage of a network, one part of a batch at a time.

    An update is `begin_update`, then the actions that it returns, then `finish_update`. `watch_wait` is a context for a
    value's name, entered while this rank waits for the value or sends it.

    With `returns_memory`, on a CPU, freed memory goes back to the system after each part of a batch. It lies between
    what is kept of other parts, so that a process would have up to a quarter more than is counted of its tensors; an
    update takes longer, as memory that comes from the system is fetched page by page.
    """

    watch_wait: Callable[[str], AbstractContextManager[Any]] = nullcontext
    returns_memory: bool = False
    stages: Stages = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        axis = self.plan.mesh.stage_axis
        assert axis is not None
        self._axis = axis
        self.links = StageLinks(self.groups)
        self.stage = self.links.stage
        self._whole_layouts: dict[str, Layout] = {}  # within a stage
        self._owners_of: dict[str, int] = {}
        self._expected: deque[list[Arriving | None]] = deque()  # values of the next parts of a pass
        self._order: tuple[Schedule, int] = ("gpipe", 1)  # of the update, and its parts
        self._begun = self._first = 0  # parts in all updates, and in those before this one
        self._running = self._asked = 0  # parts that have not gone back yet, and of how many gradients are asked for
        self._used: list[bool] | None = None  # which parameters had a gradient in any stage

    def place_parameters(self) -> None:
        """Decide which stage keeps every parameter and buffer, and how it lies over the stage's ranks."""
        graphs = self._graphs
        super().place_parameters()
        number = self.plan.mesh.sizes[self._axis]
        first = max(graphs, key=lambda graph: len(graph.calls))  # heads that only training has count
        self.stages = Stages.of(first, number, getattr(self.plan, "stages", ()), work(first))
        for graph in graphs:
            for name, stage in self.stages.owners(graph).items():
                if self._owners_of.setdefault(name, stage) != stage:
                    raise ConvoyError(f"{name} is used in two stages, by one in training and by another in evaluation")
            outputs = dict.fromkeys(ref.name for ref in leaves(graph.output, Ref))
            StagedGraph(graph, tuple(outputs), self.stages.of_calls(graph), number)  # refuses what cannot be sent
        self._whole_layouts = self.layouts
        self.layouts = {
            name: self._of_one_stage(layout, self.shapes[name][0], self._owners_of.get(name))
            for name, layout in self.layouts.items()
        }

    def open_pass(
        self, inputs: Sequence[Tensor], form: Form | None, call: str = PASS
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        # What was asked for cannot be taken back, and would get the next values; for another size gloo ends a process.
        # The other ranks send none yet, as they wait for this one.
        if self._expected or self._asked:
            raise ConvoyError(
                "a pass broke off between the stages, where some values had been asked for: build the network anew, as "
                "those of the next pass would be taken for them"
            )
        return super().open_pass(inputs, form, call)

    def train_others(self) -> None:
        super().train_others()
        self._used = None

    def owns(self, name: str) -> bool:
        return self._owners_of.get(name, self.stage) == self.stage

    def _kept(self, name: str) -> Layout | None:
        return (self._whole_layouts or self.layouts).get(name)

    def _of_one_stage(self, layout: Layout, shape: Sequence[int], owner: int | None) -> Layout:
        """The layout of a tensor of which the ranks of one stage have what they have, and all others nothing."""
        if owner is None:
            return layout
        mesh = self.plan.mesh
        dim, split = layout.splits[0] if layout.splits else (0, None)
        axes = tuple(sorted({self._axis, *(split.axes if split is not None else ())}))
        whole = range(shape[dim] if shape else 1)
        parts = tuple(
            range(0)
            if place[self._axis] != owner
            else whole
            if split is None
            else split.parts[mesh.index(place, split.axes)]
            for place in mesh.group((0,) * len(mesh.sizes), axes)
        )
        return Layout.of({**dict(layout.splits), dim: Split(axes, parts)}, layout.partial, layout.copied)

    def forward_pass(
        self,
        inputs: Sequence[Tensor],
        samples: tuple[int, ...],
        form: Form | None = None,
        then: Sequence[tuple[int, ...]] = (),
    ) -> Flight:
        """Run this stage on a part of the batch, and send its results on. The caller has announced it. `samples` are
        those of the part on each sample rank, and `then` those of each part after it, which may arrive meanwhile."""
        signature = self._signature(samples, inputs, form)
        placement, program = self._program(signature)
        key = self._key(signature, inputs)
        if self.context.postponed is not None:
            self.context.postponed.begin_part()
        is_expected = bool(self._expected)
        arriving = self._expected.popleft() if is_expected else self._begin_receiving(key, placement, program, inputs)
        self._expect(then, inputs, form)
        part, self._begun = self._begun, self._begun + 1
        arrivals = [
            (crossing, self._wait(crossing, value).requires_grad_(value.kind.needs_gradient))
            for crossing, value in zip(program.received, arriving, strict=True)
            if value is not None
        ]
        self._release_gradients({crossing.source for crossing, x in arrivals if x.numel()})
        values = self._run(placement, program, inputs, {crossing.value: x for crossing, x in arrivals})
        departures = [(crossing, values[crossing.value]) for crossing in program.sent]
        outputs = values if self.is_last else {}
        flight = Flight(arrivals, departures, outputs, placement, tuple(inputs), key, part)
        if torch.is_grad_enabled():
            if self._receives_early and self._asked == self._running:
                self._ask_for_gradients([flight])  # before it sends values, behind which that would queue
            self._running += 1
        self._send(key, departures, part)
        if not torch.is_grad_enabled():
            flight.received, flight.sent = [], []
        return flight

    @property
    def _receives_early(self) -> bool:
        """Whether to ask for what several later parts need, as a question may queue behind what this stage sends. On
        GPUs a receive would block what comes after it (NCCL). The memory that it writes to is held until then."""
        return self.device.type == "cpu" and not self.returns_memory

    def _expect(self, then: Sequence[tuple[int, ...]], inputs: Sequence[Tensor], form: Form | None) -> None:
        """Let the values of later parts arrive meanwhile, in their order, as far as it is known how they lie."""
        for samples in then[len(self._expected) : _ASKED_FOR if self._receives_early else 1]:
            signature = self._signature(samples, inputs, form)
            key = self._key(signature, inputs)
            if not self.links.knows(key):
                return
            self._expected.append(self._begin_receiving(key, *self._program(signature), inputs))

    def output_of(self, flight: Flight) -> Any:
        """What the network returns for a part of the batch; in the last stage alone."""
        return replace_leaves(flight.placement.graph.output, Ref, lambda ref: flight.outputs[ref.name])

    def backward_pass(
        self, flight: Flight, gradients: Mapping[str, Tensor | None] | None = None, then: Sequence[Flight] = ()
    ) -> None:
        """Run the backward pass of a part of the batch in this stage, and send gradients on. `gradients` are of the
        network's outputs, in the last stage; those of the parts in `then`, which have run forward, may arrive
        meanwhile."""
        roots: list[Tensor] = []
        root_gradients: list[Tensor] = []
        for name, output in flight.outputs.items():
            gradient = (gradients or {}).get(name)
            if output.requires_grad and gradient is not None:
                roots.append(output)
                root_gradients.append(gradient)
        if flight.arriving is None:
            flight.arriving = self._begin_receiving_gradients(flight)
        else:
            self._asked -= 1
        self._running -= 1
        self._ask_for_gradients(then)
        departures = [(crossing, x) for crossing, x in flight.sent if x.requires_grad]
        answering = set()  # stages that had received all of this part before they sent a gradient of it
        for (crossing, x), arriving in zip(departures, flight.arriving, strict=True):
            if arriving is not None:
                roots.append(x)
                root_gradients.append(self._wait(crossing, arriving))
                answering.add(crossing.target)
        self.links.release(lambda send: not send.back and send.part == flight.part and send.to in answering)
        if roots:
            torch.autograd.backward(roots, root_gradients)
        self.send_gradients(flight)

    def _ask_for_gradients(self, flights: Iterable[Flight]) -> None:
        """Let the gradients of parts that go back next arrive meanwhile, in their order."""
        for flight in flights:
            if self._asked == (_ASKED_FOR if self._receives_early else 1):
                return
            if flight.arriving is None:
                if not self.links.knows(flight.key, back=True):
                    return
                flight.arriving = self._begin_receiving_gradients(flight)
                self._asked += 1

    def begin_update(self, schedule: Schedule, parts: int) -> list[Action]:
        """Say in which order the next parts are run; what this stage is to do."""
        self.context.postponed = PostponedGradients() if schedule == "zero-bubble" else None
        self._order, self._first = (schedule, parts), self._begun
        self._running = self._asked = 0
        return actions(schedule, parts, self.stage, self.stages.number)

    def compute_weight_gradients(self, part: int, last: bool) -> None:
        """Compute the missing weight gradients of all parts up to one; those of the `last` are added over the ranks."""
        assert self.context.postponed is not None
        with nullcontext() if last or self.reducer is None else self.reducer.paused():
            parameters = self.context.postponed.compute(part)
        if last and self.reducer is not None and not self.reducer.adds_any(parameters):
            self.reducer.reduce()  # those of other parameters: nobody has told it that a backward pass is done

    def send_gradients(self, flight: Flight) -> None:
        """Send the stages before this one the gradients of what they sent; the backward pass has run."""
        gradients = [(crossing, x.grad) for crossing, x in flight.received if x.requires_grad]
        self._send(flight.key, gradients, flight.part, back=True)
        flight.received, flight.sent, flight.outputs, flight.arriving = [], [], {}, None
        if self.returns_memory and self.device.type == "cpu":
            trim_heap()

    def _release_gradients(self, sources: Container[int]) -> None:
        """Let go of the gradients that earlier stages had received before they ran the part forward that has come.
        gloo says that a send is done only to who waits for it, so that all parts' values would stay until the end of
        the update; to wait for what has arrived takes no time."""
        (schedule, parts), part = self._order, self._begun - self._first - 1

        def is_received(sent: Sent) -> bool:
            if not sent.back or sent.to not in sources:
                return False
            return sent.part - self._first < taken_back(schedule, parts, sent.to, self.stages.number, part)

        self.links.release(is_received)

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages.number - 1

    def complete_gradients(self) -> None:
        """Give the parameters of other stages a gradient, which is empty as they are, where they have one there: an
        optimizer then keeps as much of each, under the same names, on all ranks."""
        parameters = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        if self._used is None or self.samples is None:  # the trainer's loss has the same terms in every update
            has_gradient = [int(self.owns(name) and p.grad is not None) for name, p in parameters]
            self._used = [any(column) for column in zip(*gather_ints(has_gradient, self.links.group), strict=True)]
        for (name, parameter), is_used in zip(parameters, self._used, strict=True):
            if is_used and parameter.grad is None and not self.owns(name):
                parameter.grad = torch.zeros_like(parameter)

    def _send(self, key: Any, values: Sequence[tuple[Crossing, Tensor | None]], part: int, back: bool = False) -> None:
        with self.watch_wait(values[0][0].value) if values else nullcontext():
            self.links.send(key, values, part, back)

    def _wait(self, crossing: Crossing, arriving: Arriving) -> Tensor:
        with self.watch_wait(crossing.value):
            return arriving.wait()

    def _begin_receiving(
        self, key: Any, placement: Placement, program: Program, inputs: Sequence[Tensor]
    ) -> list[Arriving | None]:
        requests = [
            (crossing, self._local_shape(placement, placement.layouts[crossing.value], crossing.value))
            for crossing in program.received
        ]
        return self.links.receive(key, requests, inputs[0].device)

    def _begin_receiving_gradients(self, flight: Flight) -> list[Arriving | None]:
        requests = [(crossing, x.shape) for crossing, x in flight.sent if x.requires_grad]
        return self.links.receive(flight.key, requests, flight.inputs[0].device, back=True)

    def _local_shape(self, placement: Placement, layout: Layout, name: str) -> tuple[int, ...]:
        return layout.local_shape(placement.graph.shape(name), self.groups.mesh, self.groups.coordinates)

    def _key(self, signature: Signature, inputs: Sequence[Tensor]) -> Any:
        kind = self.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        weights = list(self.model.parameters())
        key = signature, autocast, frozenset(x.dtype for x in weights)
        if not torch.is_grad_enabled():
            return key
        return *key, tuple(x.requires_grad for x in (*inputs, *weights))

    def staged(self, placement: Placement) -> StagedGraph:
        graph = placement.graph
        return StagedGraph(graph, tuple(placement.outputs), self.stages.of_calls(graph), self.stages.number)

    def _made(self, placement: Placement, compile: bool) -> Program:
        staged = self.staged(placement)
        for name, stage in self.stages.owners(placement.graph).items() if placement.graph.training else ():
            if self._owners_of.get(name) != stage:
                raise ConvoyError(
                    f"{name} is used in another stage now than when the network was cut, or was not used then: call "
                    "convoy.parallelize of a network that uses in training what it will use, or of one without stages"
                )
        return Program(
            staged.part(placement, self.stage),
            self.groups,
            self.context,
            self.channels_last,
            received=staged.received(self.stage),
            sent=None if self.is_last else staged.sent(self.stage),
        )

    def finish_update(self) -> None:
        """After the last backward pass: all is sent, and every parameter has a gradient."""
        with self.watch_wait("what was sent"):
            self.links.finish(same_loss=self.samples is not None)
        self.context.postponed = None
        self.complete_gradients()
        if self.guard is not None:
            self.guard.mark_gradients()
