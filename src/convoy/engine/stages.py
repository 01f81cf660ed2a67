"""A network of which every rank runs one stage: parts of the batch go through the stages one after the other.

Weights are those of the update in all stages and gradients are added in the order of the parts, so that the result is
that of one device, in whatever order a stage does its work (`plans/schedule.py`).

Ranks at the same place on the other axes send each other what they have of the values at a cut.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from convoy.comm.collectives import Pending, all_reduce, broadcast, gather_ints
from convoy.comm.stage_links import Arriving, StageLinks
from convoy.engine.agreement import Form, Signature, arguments
from convoy.engine.coupling import coupling
from convoy.engine.network import Network
from convoy.engine.output import writable
from convoy.engine.program import Program
from convoy.errors import ConvoyError
from convoy.graph.graph import Graph, Ref
from convoy.graph.tree import leaves
from convoy.graph.tree import replace as replace_leaves
from convoy.ops import work
from convoy.ops.postponed import PostponedGradients
from convoy.plans.layout import Layout, Split, balanced
from convoy.plans.mesh import Axes
from convoy.plans.place import Placement
from convoy.plans.schedule import PARTS_PER_STAGE, Schedule, actions
from convoy.plans.stages import Crossing, StagedGraph, Stages


@dataclass
class Flight:
    """A part of the batch on its way through this rank's stage: what its backward pass needs.

    Attributes:
        received: what earlier stages sent.
        sent: what was sent on.
        outputs: of the network, by name; in the last stage alone.
        placement: of the network at this part's size.
        inputs: the network's.
        key: what decides how values lie.
        arriving: the gradients of what was sent, if they are expected already; None for what the loss leaves out.
        sending: what may still be on its way.
    """

    received: list[tuple[Crossing, Tensor]]
    sent: list[tuple[Crossing, Tensor]]
    outputs: dict[str, Tensor]
    placement: Placement
    inputs: tuple[Tensor, ...]
    key: Any
    arriving: list[Arriving | None] | None = None
    sending: list[tuple[Crossing, Pending]] = field(default_factory=list)


@dataclass
class StagedNetwork(Network):
    """Runs this rank's stage of a network.

    Attributes:
        microbatches: parts of every rank's samples in a pass that nobody announces; None for as many as serve.
        stages: where the network is cut.
        stage: this rank's.
        watch_wait: is entered with a value's name while this rank waits for it to come from another stage, or sends.
    """

    microbatches: int | None = None
    watch_wait: Callable[[str], AbstractContextManager[Any]] = nullcontext
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
        self._expected: list[Arriving | None] | None = None
        self._used: list[bool] | None = None  # which parameters had a gradient in any stage
        self._reasons: dict[Any, str] = {}  # why passes are not cut into parts, by mode
        self._anchor = torch.zeros((), requires_grad=True)

    def place_parameters(self, axes: Axes | None = None) -> None:
        """Decide which stage keeps every parameter and buffer, and how it lies over the stage's ranks."""
        graphs = self._graphs
        super().place_parameters(axes)
        if self.model.training:  # layers may be put into evaluation later, and are then asked again
            for graph in graphs:
                self._check_parts(_reason(graph, self.context.batch_norm) if graph.training else "")
        number = self.plan.mesh.sizes[self._axis]
        first = max(graphs, key=lambda graph: len(graph.calls))  # heads that only training has count
        self.stages = Stages.of(first, number, getattr(self.plan, "stages", ()), work(first))
        for graph in graphs:
            for name, stage in self.stages.owners(graph).items():
                if self._owners_of.setdefault(name, stage) != stage:
                    raise ConvoyError(f"{name} is used in two stages, by one in training and by another in evaluation")
        self._whole_layouts = self.layouts
        self.layouts = {
            name: self._of_one_stage(layout, self.shapes[name][0], self._owners_of.get(name))
            for name, layout in self.layouts.items()
        }

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

    # One part of a batch.

    def forward_pass(
        self,
        inputs: Sequence[Tensor],
        samples: tuple[int, ...],
        form: Form | None = None,
        then: tuple[int, ...] | None = None,
    ) -> Flight:
        """Run this stage on a part of the batch, and send its results on. The caller has announced it.

        Args:
            inputs: of the network, this rank's samples.
            samples: of every sample rank.
            form: the other arguments.
            then: samples of the part that comes next, which may arrive meanwhile.
        """
        signature = self._signature(samples, inputs, form)
        placement, program = self._program(signature)
        staged, key = program.staged, self._key(signature, inputs)
        if self.context.postponed is not None:
            self.context.postponed.begin_part()
        assert staged is not None
        arriving, self._expected = self._expected or self._begin_receiving(signature, inputs), None
        soon = None if then is None else self._signature(then, inputs, form)
        if soon is not None and self.links.knows(self._key(soon, inputs)):  # else the sender says first how values lie
            self._expected = self._begin_receiving(soon, inputs)
        received = [
            (crossing, self._wait(crossing, each).requires_grad_(each.kind.needs_gradient))
            for crossing, each in zip(staged.received(self.stage), arriving, strict=True)
            if each is not None
        ]
        found = self._run(placement, program, inputs, {crossing.value: x for crossing, x in received})
        sent = [(crossing, found[crossing.value]) for crossing in staged.sent(self.stage)]
        sending = self._send(key, sent)
        if not torch.is_grad_enabled():
            received, sent, sending = [], [], []
        outputs = found if self.is_last else {}
        return Flight(received, sent, outputs, placement, tuple(inputs), key, sending=sending)

    def output_of(self, flight: Flight) -> Any:
        """What the network returns for a part of the batch; in the last stage alone."""
        return replace_leaves(flight.placement.graph.output, Ref, lambda ref: flight.outputs[ref.name])

    def backward_pass(
        self,
        flight: Flight,
        gradients: Mapping[str, Tensor | None] | None = None,
        then: Flight | None = None,
    ) -> None:
        """Run the backward pass of a part of the batch in this stage, and send gradients on.

        Args:
            flight: its forward pass.
            gradients: of the network's outputs, in the last stage.
            then: that of the part which comes next, whose gradients may arrive meanwhile.
        """
        roots: list[Tensor] = []
        given: list[Tensor] = []
        for name, output in flight.outputs.items():
            gradient = (gradients or {}).get(name)
            if output.requires_grad and gradient is not None:
                roots.append(output)
                given.append(gradient)
        if flight.arriving is None:
            flight.arriving = self._begin_receiving_gradients(flight)
        if then is not None and then.arriving is None and self.links.knows(then.key, back=True):
            then.arriving = self._begin_receiving_gradients(then)
        sent = [(crossing, x) for crossing, x in flight.sent if x.requires_grad]
        answering = set()  # stages that had received all of this part before they sent a gradient of it
        for (crossing, x), arriving in zip(sent, flight.arriving, strict=True):
            if arriving is not None:
                roots.append(x)
                given.append(self._wait(crossing, arriving))
                answering.add(crossing.target)
        self.links.release([pending for crossing, pending in flight.sending if crossing.target in answering])
        flight.sending = []
        if roots:
            torch.autograd.backward(roots, given)
        self.send_gradients(flight)

    def begin_update(self, schedule: Schedule) -> None:
        """Compute the next parts' weight gradients as a schedule says.

        Raises:
            ConvoyError: the network is compiled, and the schedule postpones them.
        """
        if schedule == "zero-bubble" and self.compile:
            raise ConvoyError(
                "the schedule zero-bubble takes the backward passes of layers apart, which --compile joins: choose "
                "the schedule 1f1b, or do not compile"
            )
        self.context.postponed = PostponedGradients() if schedule == "zero-bubble" else None

    def compute_weight_gradients(self, part: int, last: bool) -> None:
        """Compute the weight gradients that are missing, of all parts up to one; with those of the `last` one, all are
        added over the ranks."""
        assert self.context.postponed is not None
        with nullcontext() if last or self.reducer is None else self.reducer.paused():
            found = self.context.postponed.compute(part)
        if last and self.reducer is not None and not self.reducer.adds_any(found):
            self.reducer.reduce()  # those of other parameters: nobody has told it that a backward pass is done

    def send_gradients(self, flight: Flight) -> None:
        """Send the stages before this one the gradients of what they sent; the backward pass has run."""
        gradients = [(crossing, x.grad) for crossing, x in flight.received if x.requires_grad]
        self._send(flight.key, gradients, back=True)
        flight.received, flight.sent, flight.outputs, flight.arriving = [], [], {}, None

    @property
    def is_last(self) -> bool:
        """Whether this rank's stage gives the network's outputs."""
        return self.stage == self.stages.number - 1

    def complete_gradients(self) -> None:
        """Give the parameters of other stages a gradient, which is empty as they are, where they have one there: an
        optimizer then keeps as much of each, under the same names, on all ranks."""
        parameters = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        if self._used is None or self.samples is None:  # the trainer's loss has the same terms in every update
            own = [int(self.owns(name) and p.grad is not None) for name, p in parameters]
            self._used = [any(column) for column in zip(*gather_ints(own, self.links.group), strict=True)]
        for (name, parameter), used in zip(parameters, self._used, strict=True):
            if used and parameter.grad is None and not self.owns(name):
                parameter.grad = torch.zeros_like(parameter)

    def _send(
        self, key: Any, values: Sequence[tuple[Crossing, Tensor | None]], back: bool = False
    ) -> list[tuple[Crossing, Pending]]:
        with self.watch_wait(values[0][0].value) if values else nullcontext():
            return self.links.send(key, values, back=back)

    def _wait(self, crossing: Crossing, arriving: Arriving) -> Tensor:
        with self.watch_wait(crossing.value):
            return arriving.wait()

    def _begin_receiving(self, signature: Signature, inputs: Sequence[Tensor]) -> list[Arriving | None]:
        placement, program = self._program(signature)
        assert program.staged is not None
        wanted = [
            (crossing, self._local_shape(placement, placement.layouts[crossing.value], crossing.value))
            for crossing in program.staged.received(self.stage)
        ]
        return self.links.receive(self._key(signature, inputs), wanted, inputs[0].device)

    def _begin_receiving_gradients(self, flight: Flight) -> list[Arriving | None]:
        wanted = [(crossing, x.shape) for crossing, x in flight.sent if x.requires_grad]
        return self.links.receive(flight.key, wanted, flight.inputs[0].device, back=True)

    def _local_shape(self, placement: Placement, layout: Layout, name: str) -> tuple[int, ...]:
        return layout.local_shape(placement.graph.shape(name), self.groups.mesh, self.groups.coordinates)

    def _key(self, signature: Signature, inputs: Sequence[Tensor]) -> Any:
        kind = self.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if not torch.is_grad_enabled():
            return signature, autocast
        return signature, autocast, tuple(x.requires_grad for x in (*inputs, *self.model.parameters()))

    def staged(self, placement: Placement) -> StagedGraph:
        graph = placement.graph
        return StagedGraph(graph, tuple(placement.outputs), self.stages.of_calls(graph), self.stages.number)

    def _made(self, placement: Placement, compile: bool) -> Program:
        staged = self.staged(placement)
        return Program(
            placement, self.groups, self.context, self.channels_last, compile, staged=staged, stage=self.stage
        )

    # A whole pass, as a loop of one's own makes it.

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs, form = arguments(self.model, args, kwargs)
        values, output, samples = self._whole_pass(inputs, None if form.is_plain else form)
        return replace_leaves(output, Ref, lambda ref: writable(self.weigh(values[ref.name], samples)))

    def undivided_forward(self, *inputs: Tensor) -> tuple[dict[str, Tensor], Placement]:
        values, _, samples = self._whole_pass(inputs)
        return values, self._program(self._signature(samples, inputs))[0]

    def _whole_pass(
        self, inputs: Sequence[Tensor], form: Form | None = None
    ) -> tuple[dict[str, Tensor], Any, tuple[int, ...]]:
        """The network's outputs by name, what it returns with references to them, and every sample rank's samples."""
        inputs, samples = self.open_pass(inputs)
        self.context.postponed = None
        parts = self._parts(inputs, samples, form)
        sizes = self._sizes(samples, parts)
        flights = [
            self.forward_pass(own, now, form, then)
            for own, now, then in zip(self._announced(inputs, samples, parts), sizes, [*sizes[1:], None], strict=True)
        ]
        self.end_pass()
        output = flights[0].placement.graph.output
        return self._deliver(inputs, flights), output, samples

    def run_schedule(
        self,
        args: Sequence[Tensor],
        targets: Any,
        loss: Callable[[Any, Any], Tensor],
        schedule: Schedule,
    ) -> Tensor:
        """Forward and backward passes of all parts of a batch; see `convoy.forward_backward`."""
        if not torch.is_grad_enabled():
            raise ConvoyError("convoy.forward_backward runs a backward pass: call it outside of torch.no_grad()")
        inputs, given_form = arguments(self.model, args, {})
        form = None if given_form.is_plain else given_form
        inputs, samples = self.open_pass(inputs)
        parts = self._parts(inputs, samples, form)
        announced = self._announced(inputs, samples, parts)
        sizes = self._sizes(samples, parts)
        running: dict[int, tuple[Flight, Tensor | None]] = {}
        terms: list[Tensor] = []
        given: list[tuple[Tensor, ...]] = []
        start = 0
        self.begin_update(schedule)
        for kind, number in actions(schedule, parts, self.stage, self.stages.number):
            last = number == parts - 1
            pausing = nullcontext() if self.reducer is None else self.reducer.paused()
            if kind == "forward":
                given.append(next(announced))
                flight = self.forward_pass(given[-1], sizes[number], form, None if last else sizes[number + 1])
                value = None
                if self.is_last:
                    end = start + sizes[number][self.sample_rank]
                    own = replace_leaves(targets, Tensor, itemgetter(slice(start, end)))
                    value = self._loss_of(flight, own, loss, end - start, samples)
                    terms.append(value.detach().double())
                    start = end
                running[number] = flight, value
                continue
            if kind == "weights":
                self.compute_weight_gradients(number, last)
                continue
            flight, value = running.pop(number)
            with nullcontext() if last and self.context.postponed is None else pausing:
                if value is None:
                    self.backward_pass(flight, then=running[number + 1][0] if number + 1 in running else None)
                else:
                    value.backward()
                    self.send_gradients(flight)
                    value = None  # its graph ends in what was received, which can go now
        self.end_pass()
        self.finish_update()
        wanted = [place for place, x in enumerate(inputs) if x.requires_grad]
        if wanted:
            torch.autograd.backward([inputs[place] for place in wanted], self._input_gradients(given, wanted))
        total = torch.stack(terms).sum() if terms else torch.zeros((), dtype=torch.float64, device=inputs[0].device)
        return broadcast(total, self.links.group, self.stages.number - 1)

    def _loss_of(
        self, flight: Flight, targets: Any, loss: Callable[[Any, Any], Tensor], size: int, samples: tuple[int, ...]
    ) -> Tensor:
        """A part's term of the loss of this rank's samples."""
        outputs = replace_leaves(self.output_of(flight), Tensor, lambda x: writable(self.weigh(x, samples)))
        if size == 0:
            return torch.stack([x.sum() for x in leaves(outputs, Tensor)]).sum() * 0
        value = loss(outputs, targets)
        return value * (size / samples[self.sample_rank]) if self.loss == "mean" else value

    def _sizes(self, samples: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
        """How many samples of each part of a pass every sample rank has."""
        return list(zip(*(map(len, balanced(number, parts)) for number in samples), strict=True))

    def _announced(
        self, inputs: Sequence[Tensor], samples: tuple[int, ...], parts: int
    ) -> Iterator[tuple[Tensor, ...]]:
        """The inputs of each part, which is announced as it is its turn."""
        cuts = [balanced(number, parts) for number in samples]
        starts = list(accumulate(samples, initial=0))[:-1]
        step = self._passes
        announces = self.samples is None and self.model.training
        self._passes += announces
        for part in range(parts):
            if announces:
                places = [start + i for start, cut in zip(starts, cuts, strict=True) for i in cut[part]]
                own_sizes = tuple(len(cut[part]) for cut in cuts if len(cut[part]))
                sizes = own_sizes if self.context.batch_norm == "microbatch" else (len(places),)
                self.context.enter(step, places, sizes, inputs[0].device)
            own = cuts[self.sample_rank][part]
            yield tuple(_part(x, own) for x in inputs)

    def begin_pass(self, samples: tuple[int, ...], device: torch.device) -> None:
        """Parts are announced one by one."""

    def example_parts(self, samples: Sequence[int] | None = None) -> int:
        """Into how many parts a pass is cut with as many samples as the example has, or as are said of every rank."""
        own = self.example_samples(samples)
        inputs = [torch.empty(own[0], *shape[1:], dtype=dtype, device="meta") for shape, dtype in self.example]
        return self._parts(inputs, own, self.form)

    def _parts(self, inputs: Sequence[Tensor], samples: tuple[int, ...], form: Form | None) -> int:
        """Into how many parts a pass is cut."""
        most = min((number for number in samples if number), default=1)
        if most == 1 or (self.samples is not None and (self.model.training or self.context.statistics.in_order)):
            return 1  # as it was announced
        together = self._together(self._signature(samples, inputs, form))
        if not together:
            return min(self.microbatches or PARTS_PER_STAGE * self.stages.number, most)
        if self.model.training:
            self._check_parts(together)
        return 1

    def _check_parts(self, together: str) -> None:
        """Refuse parts that are asked for where a pass cannot be cut, for a reason that may be empty."""
        if together and self.microbatches not in (None, 1):
            raise ConvoyError(
                f"{together}, so a pass cannot be cut into {self.microbatches} parts: pass microbatches=1 to "
                "convoy.parallelize, or batch_norm='microbatch' for statistics of each part by itself"
            )

    def _together(self, signature: Signature) -> str:
        """Why a pass of several samples cannot be cut into parts, in words; empty where it can."""
        key = signature.training, signature.form, signature.exceptions
        if key not in self._reasons:
            self._reasons[key] = _reason(self._capture(signature), self.context.batch_norm)
        return self._reasons[key]

    def _deliver(self, inputs: Sequence[Tensor], flights: list[Flight]) -> dict[str, Tensor]:
        """The network's outputs, on every rank of a model group, with the backward pass of all parts behind them."""
        names = list(dict.fromkeys(ref.name for ref in leaves(flights[0].placement.graph.output, Ref)))
        values, differentiable = self._outputs(names, flights)
        if not torch.is_grad_enabled() or not any(differentiable):
            return dict(zip(names, values, strict=True))
        wanted = [place for place, x in enumerate(inputs) if x.requires_grad]

        def run(gradients: Sequence[Tensor | None]) -> list[Tensor]:
            found = self._backward(flights, dict(zip(names, gradients, strict=True)), wanted)
            flights.clear()
            return found

        delivered = _Delivered.apply(run, values, differentiable, self._anchor, *(inputs[place] for place in wanted))
        return dict(zip(names, delivered, strict=True))

    def _backward(
        self, flights: list[Flight], gradients: Mapping[str, Tensor | None], wanted: Sequence[int]
    ) -> list[Tensor]:
        """Run the backward pass of all parts; the gradients of the inputs that are `wanted`."""
        start = dict.fromkeys(gradients, 0)
        if not flights:
            raise ConvoyError(
                "backward was called a second time for one pass of a network in stages, which keeps nothing for that: "
                "add the losses up and call it once"
            )
        reducer = self.reducer
        if reducer is not None:
            reducer.flush()  # what terms of the loss beside the network have given
        for number, flight in enumerate(flights):
            own: dict[str, Tensor | None] = {}
            for name, gradient in gradients.items():
                if gradient is not None and len(flights) > 1:
                    size = len(flight.outputs[name]) if self.is_last else 0
                    own[name] = gradient[start[name] : start[name] + size]
                    start[name] += size
                else:
                    own[name] = gradient
            then = flights[number + 1] if number + 1 < len(flights) else None
            with nullcontext() if then is None or reducer is None else reducer.paused():
                self.backward_pass(flight, own, then)
        self.finish_update()
        return self._input_gradients([flight.inputs for flight in flights], wanted)

    def _input_gradients(self, given: Sequence[Sequence[Tensor]], wanted: Sequence[int]) -> list[Tensor]:
        """The gradients of some inputs, from those of their parts; a stage that does not use one has none of it."""
        found = []
        for place in wanted:
            parts = [torch.zeros_like(x) if x.grad is None else x.grad for x in (each[place] for each in given)]
            found.append(all_reduce(torch.cat(parts).contiguous(), self.links.group))
        return found

    def finish_update(self) -> None:
        """After the last backward pass: all is sent, and every parameter has a gradient."""
        with self.watch_wait("what was sent"):
            self.links.finish()
        self.complete_gradients()
        if self.guard is not None:
            self.guard.mark_gradients()

    def _outputs(self, names: Sequence[str], flights: Sequence[Flight]) -> tuple[list[Tensor], list[bool]]:
        """What the last stage gives, on all ranks, and what of it has a gradient."""
        values, differentiable = [], []
        for name in names:
            parts = [flight.outputs[name] for flight in flights] if self.is_last else []
            own = (torch.cat(parts) if len(parts) > 1 else parts[0]) if parts else None
            shapes = [
                self._local_shape(flight.placement, flight.placement.output_layouts[name], name) for flight in flights
            ]
            shape = (sum(each[0] for each in shapes), *shapes[0][1:]) if len(shapes) > 1 else shapes[0]
            value, has_gradient = self.links.from_last(own, shape, flights[0].inputs[0].device)
            values.append(value)
            differentiable.append(has_gradient)
        return values, differentiable


class _Delivered(torch.autograd.Function):
    """Outputs of the last stage on every rank; backward runs the stages backward."""

    @staticmethod
    def forward(
        ctx: Any, run: Any, values: Sequence[Tensor], differentiable: Sequence[bool], anchor: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x, has in zip(values, differentiable, strict=True) if not has))
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, None, None, None, *ctx.run(gradients)


def _part(x: Tensor, own: range) -> Tensor:
    """A part of an input, with a gradient of its own."""
    return x.detach()[own.start : own.stop].requires_grad_(x.requires_grad)


def _reason(graph: Graph, batch_norm: str) -> str:
    """Why a pass cannot be cut into parts, in words; empty where it can. The graph has several samples."""
    found = coupling(graph)
    normed = [call for call in graph.calls if call.op == "batch_norm" and call.updates] if batch_norm == "sync" else []
    if normed or found is not None:
        layer = f"layer {found.layer}" if found is not None and found.layer else "the network itself"
        who = f"batch norm over the global batch (layer {normed[0].layer})" if normed else layer
        return f"{who} computes with all samples of a pass at once"
    of_samples = set(graph.inputs)
    for call in graph.calls:
        if of_samples.intersection(call.inputs):
            of_samples.update(call.outputs)
    if any(ref.name not in of_samples for ref in leaves(graph.output, Ref)):
        return "the network returns a tensor in which there are no samples"
    return ""
