"""A network in stages: batches are cut into parts, which go through the stages one after the other.

Weights are those of the update in all stages, so that the result is that of one device, in whatever order a stage does
its work (`plans/schedule.py`). Parts go forward in their order, and back in their order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from convoy.comm.collectives import all_reduce, broadcast
from convoy.comm.redistribution import first_derivative
from convoy.engine.agreement import SCHEDULED, Form, Signature, arguments
from convoy.engine.coupling import why_together
from convoy.engine.gradients.reducer import writable
from convoy.engine.stage import Flight, Stage
from convoy.errors import ConvoyError
from convoy.graph.graph import Ref
from convoy.graph.tree import leaves
from convoy.graph.tree import replace as replace_leaves
from convoy.plans.layout import balanced
from convoy.plans.schedule import PARTS_PER_STAGE, Schedule
from convoy.plans.stages import why_not_sent
from convoy.units import shorten


@dataclass
class StagedNetwork(Stage):
    """Runs whole batches, in parts: as a loop of one's own asks for them, or in the order of a schedule."""

    microbatches: int | None = None  # parts of a rank's samples in a pass that nobody announces; None: as many as serve
    schedule: Schedule = field(default="gpipe", init=False)  # of the last training; plain loops have gpipe

    def __post_init__(self) -> None:
        super().__post_init__()
        self._reasons: dict[Any, str] = {}  # why passes are not cut into parts, by mode
        self._anchor = torch.zeros((), requires_grad=True)

    def place_parameters(self) -> None:
        graphs = self._graphs
        super().place_parameters()
        if self.model.training:  # layers may be put into evaluation later, and are then asked again
            for graph in graphs:
                self._check_parts(why_together(graph, self.context.batch_norm) if graph.training else "")

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs, form = arguments(self.model, args, kwargs, self._own_forward)
        inputs, samples = self.open_pass(inputs, form)
        parts = self._parts(inputs, samples, form)
        self.begin_update("gpipe", parts)
        if self.model.training:
            self.schedule = "gpipe"
        sizes = self._sizes(samples, parts)
        flights = [
            self.forward_pass(part_inputs, sizes[part], form, sizes[part + 1 :])
            for part, part_inputs in enumerate(self._announced(inputs, samples, parts))
        ]
        self.end_pass()
        output = flights[0].placement.graph.output
        values = self._deliver(inputs, flights)
        self.links.release(lambda send: not send.back)  # the last stage is through with all parts, so all has arrived
        return replace_leaves(output, Ref, lambda ref: writable(self.weigh(values[ref.name], samples)))

    def run_schedule(
        self, args: Sequence[Tensor], targets: Any, loss: Callable[[Any, Any], Tensor], schedule: Schedule
    ) -> Tensor:
        """Forward and backward passes of all parts of a batch; see `convoy.forward_backward`."""
        if not torch.is_grad_enabled():
            raise ConvoyError("convoy.forward_backward runs a backward pass: call it outside of torch.no_grad()")
        inputs, form = arguments(self.model, args, {}, self._own_forward)
        for target in leaves(targets, Tensor):
            if not target.dim() or len(target) != len(inputs[0]):
                raise ConvoyError(
                    f"convoy.forward_backward is given {len(inputs[0])} samples, and a target of shape "
                    f"{list(target.shape)}: pass the targets of this rank's samples, with these along dim 0"
                )
        inputs, samples = self.open_pass(inputs, form, SCHEDULED[schedule])
        parts = self._parts(inputs, samples, form)
        announced = self._announced(inputs, samples, parts)
        sizes = self._sizes(samples, parts)
        running: dict[int, tuple[Flight, Tensor | None]] = {}
        terms: list[Tensor] = []
        part_inputs: list[tuple[Tensor, ...]] = []
        start = 0
        self.schedule = schedule
        for kind, number in self.begin_update(schedule, parts):
            last = number == parts - 1
            pausing = nullcontext() if self.reducer is None else self.reducer.paused()
            if kind == "forward":
                part_inputs.append(next(announced))
                flight = self.forward_pass(part_inputs[-1], sizes[number], form, sizes[number + 1 :])
                value = None
                if self.is_last:
                    end = start + sizes[number][self.sample_rank]
                    part_targets = replace_leaves(targets, Tensor, itemgetter(slice(start, end)))
                    value = self._loss_of(flight, part_targets, loss, end - start, samples)
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
                    self.backward_pass(flight, then=[later for later, _ in running.values()])
                else:
                    value.backward()
                    self.send_gradients(flight)
                    value = None  # its graph ends in what was received, which can go now
        self.end_pass()
        self.finish_update()
        places = [place for place, x in enumerate(inputs) if x.requires_grad]
        if places:
            torch.autograd.backward([inputs[place] for place in places], self._input_gradients(part_inputs, places))
        total = torch.stack(terms).sum() if terms else torch.zeros((), dtype=torch.float64, device=inputs[0].device)
        return broadcast(total, self.links.group, self.stages.number - 1)

    def _loss_of(
        self, flight: Flight, targets: Any, loss: Callable[[Any, Any], Tensor], size: int, samples: tuple[int, ...]
    ) -> Tensor:
        outputs = replace_leaves(self.output_of(flight), Tensor, lambda x: writable(self.weigh(x, samples)))
        if size == 0:
            return torch.stack([x.sum() for x in leaves(outputs, Tensor)]).sum() * 0
        value = differentiable_loss(loss(outputs, targets), self.loss)
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
        step = self.passes
        announces = self.samples is None and self.trains
        self.passes += announces
        for part in range(parts):
            if announces:
                places = [start + i for start, cut in zip(starts, cuts, strict=True) for i in cut[part]]
                own_sizes = tuple(len(cut[part]) for cut in cuts if len(cut[part]))
                sizes = own_sizes if self.context.batch_norm == "microbatch" else (len(places),)
                self.context.enter(step, places, sizes, inputs[0].device)
            part_samples = cuts[self.sample_rank][part]
            own = slice(part_samples.start, part_samples.stop)  # with gradients of their own
            yield tuple(x.detach()[own].requires_grad_(x.requires_grad) for x in inputs)

    def begin_pass(self, samples: tuple[int, ...], device: torch.device) -> None:
        """Parts are announced one by one."""

    def example_parts(self, samples: Sequence[int] | None) -> int:
        """Into how many parts a pass is cut with as many samples as the example has, or as are said of every rank."""
        counts = self.example_samples(samples)
        inputs = [torch.empty(counts[0], *shape[1:], dtype=dtype, device="meta") for shape, dtype in self.example]
        return self._parts(inputs, counts, self.form)

    def _parts(self, inputs: Sequence[Tensor], samples: tuple[int, ...], form: Form | None) -> int:
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
        key = signature.training, signature.form, signature.exceptions, signature.state
        if key not in self._reasons:
            self._reasons[key] = why_together(self.capture_again(signature), self.context.batch_norm)
        return self._reasons[key]

    def _deliver(self, inputs: Sequence[Tensor], flights: list[Flight]) -> dict[str, Tensor]:
        """The network's outputs, on every rank of a model group, with the backward pass of all parts behind them."""
        names = list(dict.fromkeys(ref.name for ref in leaves(flights[0].placement.graph.output, Ref)))
        values, differentiable = self._outputs(names, flights)
        if not torch.is_grad_enabled() or not any(differentiable):
            return dict(zip(names, values, strict=True))
        places = [place for place, x in enumerate(inputs) if x.requires_grad]

        def run(gradients: Sequence[Tensor | None]) -> list[Tensor]:
            with nullcontext() if self.guard is None else self.guard.inner_backward():
                input_gradients = self._backward(flights, dict(zip(names, gradients, strict=True)), places)
            flights.clear()
            return input_gradients

        delivered = _Delivered.apply(run, values, differentiable, self._anchor, *(inputs[place] for place in places))
        return dict(zip(names, delivered, strict=True))

    def _backward(
        self, flights: list[Flight], gradients: Mapping[str, Tensor | None], places: Sequence[int]
    ) -> list[Tensor]:
        """Run the backward pass of all parts; the gradients of the inputs at these places."""
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
            part_gradients: dict[str, Tensor | None] = {}
            for name, gradient in gradients.items():
                if gradient is not None and len(flights) > 1:
                    size = len(flight.outputs[name]) if self.is_last else 0
                    part_gradients[name] = gradient[start[name] : start[name] + size]
                    start[name] += size
                else:
                    part_gradients[name] = gradient
            then = flights[number + 1 :]
            with nullcontext() if not then or reducer is None else reducer.paused():
                self.backward_pass(flight, part_gradients, then)
        self.finish_update()
        return self._input_gradients([flight.inputs for flight in flights], places)

    def _input_gradients(self, inputs_of_parts: Sequence[Sequence[Tensor]], places: Sequence[int]) -> list[Tensor]:
        """The gradients of some inputs, from those of their parts; a stage that does not use one has none of it."""
        gradients = []
        for place in places:
            parts = [
                torch.zeros_like(x) if x.grad is None else x.grad for x in (inputs[place] for inputs in inputs_of_parts)
            ]
            gradients.append(all_reduce(torch.cat(parts).contiguous(), self.links.group))
        return gradients

    def _outputs(self, names: Sequence[str], flights: Sequence[Flight]) -> tuple[list[Tensor], list[bool]]:
        """What the last stage gives, on all ranks, and what of it has a gradient."""
        values, differentiable = [], []
        for name in names:
            if why := why_not_sent(flights[0].placement.graph.values[name]):
                raise ConvoyError(
                    f"the network returns a tensor that is {why}, which the last stage cannot send to the others: let "
                    "it return another, or call convoy.forward_backward, which leaves outputs in the last stage"
                )
            parts = [flight.outputs[name] for flight in flights] if self.is_last else []
            whole = (torch.cat(parts) if len(parts) > 1 else parts[0]) if parts else None
            shapes = [
                self._local_shape(flight.placement, flight.placement.output_layouts[name], name) for flight in flights
            ]
            shape = (sum(part_shape[0] for part_shape in shapes), *shapes[0][1:]) if len(shapes) > 1 else shapes[0]
            value, has_gradient = self.links.from_last(whole, shape, flights[0].inputs[0].device)
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
    @first_derivative
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, None, None, None, *ctx.run(gradients)


def differentiable_loss(loss: Any, kind: str) -> Tensor:
    """The result of a user's loss function, if a backward pass can begin at it; ConvoyError otherwise. `kind` is `mean`
    or `part`, as `convoy.parallelize` takes it."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        loss_text = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise ConvoyError(
            f"the loss function given to convoy.forward_backward returned {shorten(loss_text, 80)}: let it return a "
            f"scalar, {'the mean' if kind == 'mean' else 'a sum'} over the samples that it is given"
        )
    if not loss.requires_grad or not loss.is_floating_point():
        loss_text = f"{str(loss.dtype).removeprefix('torch.')} with{'' if loss.requires_grad else 'out'} a gradient"
        raise ConvoyError(
            f"the loss function given to convoy.forward_backward returned {loss_text}: let it return a real number, "
            "computed from what the network gives by operations that torch differentiates"
        )
    return loss.reshape(())
