"""A placed network on one rank: kernels and transfers in the order in which they run.

Calls may overwrite what they are given where nobody needs it any more, which saves a tensor and a pass over fresh
memory (`overwriting`). The segments that only compute may be compiled by `torch.compile`; what lies between them runs
as it is (`compiled`).

Stretches of calls are run again in the backward pass where the placement says so (`ops/recompute.py`). Torch's
checkpoint drops what autograd keeps of them and leaves the graph of the backward pass as it is, so that gradients are
computed, added up and sent in the same order as without; an autograd function of our own would add up those of its
inputs in another order, and give all at its end. A stretch ends at every redistribution: to send again is dear, and
would have to be in the order of the forward pass while gradients travel. What ranks exchange inside it is kept.
"""

import itertools
import types
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from convoy.comm.groups import Groups
from convoy.comm.position import current
from convoy.comm.redistribution import redistribute
from convoy.compiler import compile_function
from convoy.engine.allocation import give_back_where_scarce
from convoy.engine.shards import cut
from convoy.graph.graph import Call, Graph
from convoy.ops import OPERATIONS
from convoy.ops.context import StepContext
from convoy.ops.kernel import Kernel, NotCompiled, Site, WithStatistics
from convoy.ops.memory import Readers, overwritten
from convoy.ops.recompute import stretches
from convoy.plans.layout import Layout
from convoy.plans.place import PlacedCall, Placement
from convoy.plans.stages import Crossing
from convoy.plans.transfer import Step


def overwriting(placed: PlacedCall, readers: Readers, local_values: Container[str] | None) -> Kernel | None:
    """The version of a call that writes its result over an input that nobody else reads; None where it must not. In a
    stretch that will run again, only the stretch's own results, `local_values`, may be overwritten."""

    def is_spare(source: str) -> bool:
        if placed.placed.inputs[source].partial:  # a rank that adds no bias gives a view, which autograd protects
            return False
        return (local_values is None or source in local_values) and readers.is_spare(source, placed.transfers)

    name = overwritten(placed.call, is_spare)
    if name is None:
        return None
    if len(placed.call.inputs) == 1:
        return lambda x: [torch.relu_(x)]
    return _add_to_first if name == placed.call.inputs[0] else lambda x, y: _add_to_first(y, x)


@dataclass(frozen=True)
class Alias:
    """Gives one of its inputs, in place of a call that was done within another."""

    place: int

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        return [tensors[self.place]]


def _add_to_first(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    is_same_kind = x.shape == y.shape and x.dtype == y.dtype and x.is_floating_point()
    return [x.add_(y) if is_same_kind else x + y]


@dataclass
class Epilogue:
    """What follows a batch norm at once, alone reads its result, and is done with it in one kernel on a GPU."""

    relu: bool = False  # after the addition, if there is one
    addition: PlacedCall | None = None  # adds `addend`; the batch norm runs right before it
    addend: str | None = None


def fused_epilogues(
    calls: Sequence[PlacedCall], graph: Graph, readers: Readers, stretch: Callable[[int], range | None]
) -> tuple[dict[str, Epilogue], dict[str, int]]:
    """What follows each batch norm within it, by the name of its call; and by the name of each call that is done in
    one, which of its inputs is its result. `stretch` says with which calls a call is computed again."""
    buffers = Counter(
        placed_call.call.attributes["running_mean"] for placed_call in calls if placed_call.call.op == "batch_norm"
    )

    def movable(norm: Call) -> bool:  # not past another one that follows the same statistics
        return norm.attributes["running_mean"] is None or buffers[norm.attributes["running_mean"]] == 1

    norms: dict[str, tuple[int, PlacedCall]] = {}  # by what is their result so far
    epilogues: dict[str, Epilogue] = {}
    inner_calls: dict[str, int] = {}
    for number, placed in enumerate(calls):
        call = placed.call
        if call.op == "batch_norm":
            norms[call.outputs[0]] = number, placed
        spare = [
            name
            for name in call.inputs
            if name in norms
            and not placed.placed.inputs[name].partial
            and stretch(norms[name][0]) == stretch(number)
            and readers.is_spare(name, placed.transfers)
        ]
        source = overwritten(call, lambda name, spare=spare: name in spare)  # type: ignore[misc]
        if source is None:
            continue
        norm = norms[source][1].call
        epilogue = epilogues.get(norm.name, Epilogue())
        if len(call.inputs) == 1:
            epilogue.relu = True
        else:
            addend = next(name for name in call.inputs if name != source)
            if epilogue != Epilogue() or not movable(norm) or graph.shape(addend) != graph.shape(source):
                continue
            epilogue.addition, epilogue.addend = placed, addend
        epilogues[norm.name] = epilogue
        inner_calls[call.name] = call.inputs.index(source)
        norms[call.outputs[0]] = norms[source]
    return epilogues, inner_calls


def _moved(calls: Sequence[PlacedCall], epilogues: Mapping[str, Epilogue]) -> Iterator[tuple[int, PlacedCall]]:
    """The calls with their numbers, as they run: a batch norm right before its addition."""
    numbers = {placed.call.name: number for number, placed in enumerate(calls)}
    norm_before = {end.addition.call.name: norm for norm, end in epilogues.items() if end.addition is not None}
    for number, placed in enumerate(calls):
        if placed.call.name in norm_before:
            norm = numbers[norm_before[placed.call.name]]
            yield norm, calls[norm]
        if placed.call.name not in norm_before.values():
            yield number, placed


@dataclass(frozen=True)
class Instruction:
    """Takes what is in some slots, fills others, and empties those (`free`) that nobody reads any more."""

    run: Callable[..., Sequence[Any]]  # computes; a `Stretch` is run again in the backward pass
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    alone: bool  # it does more than compute: it talks to other ranks, or keeps something
    free: tuple[int, ...] = ()
    name: str = ""  # of the call; empty where it is none or several
    layer: str = ""  # for people


def execute(instructions: Sequence[Instruction], slots: dict[int, Any] | list[Any], watch: "Watch | None") -> None:
    """Run instructions one after the other on what is in the slots."""
    for instruction in instructions:
        give_back_where_scarce()
        tensors = [slots[slot] for slot in instruction.inputs]
        if isinstance(instruction.run, Stretch):
            results = instruction.run(*tensors, watch=watch)
        else:
            current.at(instruction.layer)
            if watch is not None:
                watch.before(instruction.name)
            results = instruction.run(*tensors)
            if watch is not None:
                watch.after(instruction.name, results)
        del tensors
        for slot, result in zip(instruction.outputs, results, strict=True):
            slots[slot] = result
        for slot in instruction.free:
            slots[slot] = None


def freeing(instructions: Sequence[Instruction], results: Iterable[int]) -> tuple[Instruction, ...]:
    """The instructions, each emptying the slots that it reads last; those of the results stay."""
    live_slots = set(results)
    instructions_back: list[Instruction] = []
    for instruction in reversed(instructions):
        read = set(instruction.inputs) | set(instruction.outputs)
        instructions_back.append(replace(instruction, free=tuple(sorted(read - live_slots))))
        live_slots |= read
    return tuple(instructions_back[::-1])


@dataclass(frozen=True)
class Stretch:
    """Instructions that leave nothing for the backward pass but their inputs, and are run again there. `inputs` and
    `outputs` are the slots that they take from before and leave for later; `updated` are those inputs that are buffers
    which they bring up to date. Torch sees to it that all others are in the backward pass what they were."""

    body: tuple[Instruction, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    updated: frozenset[int]
    context: StepContext

    def __call__(self, *tensors: Any, watch: "Watch | None" = None) -> Sequence[Any]:
        slots = dict(zip(self.inputs, tensors, strict=True))
        if not torch.is_grad_enabled():
            return self._run(slots, watch)
        buffers = {slot: slots.pop(slot) for slot in self.updated}
        names, rerun = tuple(slots), self.context.rerun()
        is_first = True

        def run(*tensors: Any) -> Sequence[Any]:
            nonlocal is_first
            context, watcher = (rerun.first(), watch) if is_first else (rerun.again(), None)
            is_first = False
            with context:
                return self._run({**buffers, **dict(zip(names, tensors, strict=True))}, watcher)

        results: Sequence[Any] = checkpoint(run, *slots.values(), use_reentrant=False, preserve_rng_state=False)
        return results

    def _run(self, slots: dict[int, Any], watch: "Watch | None") -> Sequence[Any]:
        execute(self.body, slots, watch)
        return [slots[slot] for slot in self.outputs]


def compiled(instructions: Sequence[Instruction], results: Iterable[int]) -> list[Instruction]:
    """The same program with every stretch of instructions that only compute as one; `results` are the slots that are
    read after the last one. Between the stretches ranks exchange: inside compiled code that would have to be torch's
    functional collectives over gloo."""
    live_slots = set(results)
    segments: list[Instruction] = []
    for alone, members in itertools.groupby(reversed(instructions), lambda instruction: instruction.alone):
        stretch = tuple(members)[::-1]
        if not (alone or all(isinstance(instruction.run, Alias) for instruction in stretch)):
            inputs, outputs = _ends(stretch, live_slots)
            stretch = (Instruction(_compile(stretch, inputs, outputs), inputs, outputs, alone=False),)
        segments += stretch[::-1]
        live_slots.update(slot for instruction in stretch for slot in instruction.inputs)
    return segments[::-1]


def _ends(body: Sequence[Instruction], live_slots: Container[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The slots that instructions take from before, and those that they fill for later."""
    results = {slot for instruction in body for slot in instruction.outputs}
    inputs = dict.fromkeys(slot for instruction in body for slot in instruction.inputs if slot not in results)
    return tuple(inputs), tuple(sorted(slot for slot in results if slot in live_slots))


def _compile(stretch: Sequence[Instruction], inputs: Sequence[int], outputs: Sequence[int]) -> Callable[..., Any]:
    def run(*tensors: Any) -> list[Any]:
        slots = dict(zip(inputs, tensors, strict=True))
        for instruction in stretch:
            values = instruction.run(*[slots[slot] for slot in instruction.inputs])
            for slot, value in zip(instruction.outputs, values, strict=True):
                slots[slot] = value
        return [slots[slot] for slot in outputs]

    # torch.compile keeps what it has made by code object, and only so much for each: every stretch needs its own
    code = run.__code__.replace(co_name="stretch")
    function = types.FunctionType(code, run.__globals__, "stretch", None, run.__closure__)
    return compile_function(function, dynamic=False)


LOW_PRECISION = {"conv", "linear"}  # Calls that autocast computes in low precision: what they need is sent so.

Place = tuple[str, Layout]  # a value in one layout: what a slot of the program holds


# From steps and the shape of the whole tensor to what does them on this rank.
BuildTransfer = Callable[[tuple[Step, ...], tuple[int, ...]], Callable[[Tensor], Tensor]]


class Watch(Protocol):
    """Sees the instructions of a program as they run."""

    def before(self, name: str) -> None:
        """An instruction begins: that of the call of this name, or a transfer, whose name is empty."""

    def after(self, name: str, results: Sequence[Any]) -> None:
        """It has given its results."""


class Program:
    """Runs a network's forward pass on this rank.

    Args:
        placement: of the network, or of the part of it that is this rank's stage.
        groups: the process groups.
        context: of the step.
        channels_last: whether images travel with the channels innermost in memory; the same on all ranks.
        compile: whether what lies between the exchanges runs through `torch.compile`.
        transfer: builds what redistributes a value; by default what does it over the groups.
        received: what earlier stages send.
        sent: what later stages are sent, in place of the network's outputs, which the last one gives.

    Attributes:
        sources: names of the tensors that it is given, in order: inputs, parameters and buffers, and what it receives.
        outputs: names of those that it gives, in order: the network's, or what is sent.
    """

    def __init__(
        self,
        placement: Placement,
        groups: Groups,
        context: StepContext,
        channels_last: bool = False,
        compile: bool = False,
        transfer: BuildTransfer | None = None,
        received: Sequence[Crossing] = (),
        sent: Sequence[Crossing] | None = None,
    ) -> None:
        self._slots: dict[Place, int] = {}
        self._num_slots = 0
        self._instructions: list[Instruction] = []
        self.received, self.sent = tuple(received), tuple(sent or ())
        self._placement, self._groups, self._context = placement, groups, context
        self._channels_last = channels_last
        self._build_transfer = transfer or self._redistribution
        graph, mesh, coordinates = placement.graph, placement.mesh, groups.coordinates
        origins = ("input", "parameter", "buffer")
        self.sources = [n for n, v in graph.values.items() if v.origin in origins and n in placement.layouts]
        self.sources += [crossing.value for crossing in received]
        self._sources = [self._slot(name, placement.layouts[name]) for name in self.sources]
        self._constants = {
            self._slot(name, placement.layouts[name]): cut(value, placement.layouts[name], mesh, coordinates)
            for name, value in graph.constants.items()
            if name in placement.layouts
        }
        records, places = self._add_calls(compile)
        layouts = placement.output_layouts if sent is None else placement.layouts
        for name, steps in placement.outputs.items():
            self._transfer(name, layouts[name], steps, "the output")
        self.outputs = list(placement.outputs if sent is None else dict.fromkeys(crossing.value for crossing in sent))
        self._outputs = [self._slot(name, layouts[name]) for name in self.outputs]
        self._instructions += records
        self._fold(places, compile)
        if compile:
            self._instructions = compiled(self._instructions, self._outputs)
        self._program = freeing(self._instructions, {*self._outputs, *self._constants})

    def _add_calls(self, compile: bool) -> tuple[list[Instruction], list[range]]:
        """Add the calls, each after the transfers of its inputs. What is to be recorded after all of them, where they
        are compiled, and the places of the stretches that run again."""
        placement, graph = self._placement, self._placement.graph
        full_precision = {
            (name, layout)
            for placed in placement.calls
            for name, layout in placed.placed.inputs.items()
            if placed.call.op not in LOW_PRECISION
        }
        readers = Readers(graph, [*placement.outputs, *placement.held])
        stretch_of = {number: stretch for stretch in stretches(placement) for number in stretch}
        epilogues, inner_calls = fused_epilogues(placement.calls, graph, readers, stretch_of.get)
        places: dict[range, range] = {}
        results: dict[range, set[str]] = {stretch: set() for stretch in stretch_of.values()}
        records: list[Instruction] = []
        for number, placed in _moved(placement.calls, epilogues):
            name, stretch = placed.call.name, stretch_of.get(number)
            epilogue = epilogues.get(name, Epilogue())
            for member in filter(None, (placed, epilogue.addition)):
                for source, steps in member.transfers.items():
                    target = member.placed.inputs[source]
                    self._transfer(source, target, steps, name, cast=(source, target) not in full_precision)
            inputs = [self._slot(source, placed.placed.inputs[source]) for source in placed.call.inputs]
            outputs = [self._slot(result, placed.placed.outputs[result]) for result in placed.call.outputs]
            if epilogue.addition is not None and epilogue.addend is not None:
                inputs.append(self._slot(epilogue.addend, epilogue.addition.placed.inputs[epilogue.addend]))
            start = len(self._instructions)
            if name in inner_calls:
                kernel: Kernel = Alias(inner_calls[name])
            else:
                local_values = None if stretch is None else results[stretch]
                rest = {"context": self._context, "relu": epilogue.relu, "addend": epilogue.addend}
                groups, build = self._groups, OPERATIONS[placed.call.op].build
                site = Site.of(placed, graph, placement.mesh, groups.coordinates, groups=groups, **rest)
                kernel = overwriting(placed, readers, local_values) or build(site)
            run: Callable[..., Sequence[Any]] = kernel
            is_alone = isinstance(kernel, NotCompiled)
            if compile and isinstance(kernel, WithStatistics):
                terms = self._new_slot()
                buffers = [inputs[place] for place in kernel.buffers]
                records.append(Instruction(_recording(kernel), (*buffers, terms), (), alone=True))
                run, is_alone, outputs = kernel.compute, False, [*outputs, terms]
            self._instructions.append(Instruction(run, tuple(inputs), tuple(outputs), is_alone, name=name, layer=name))
            if stretch is not None:
                results[stretch].update(placed.call.outputs)
                places[stretch] = range(places.get(stretch, range(start, start)).start, len(self._instructions))
        return records, list(places.values())

    def __call__(self, tensors: Sequence[Tensor], watch: Watch | None = None) -> list[Tensor]:
        """This rank's part of every output, in order, from its part of every source; `watch` sees every instruction."""
        slots: list[Any] = [None] * self._num_slots
        for slot, constant in self._constants.items():
            slots[slot] = constant
        for slot, tensor in zip(self._sources, tensors, strict=True):
            slots[slot] = tensor
        execute(self._program, slots, watch)
        return [slots[slot] for slot in self._outputs]

    def _slot(self, name: str, layout: Layout) -> int:
        if (name, layout) not in self._slots:
            self._slots[name, layout] = self._new_slot()
        return self._slots[name, layout]

    def _new_slot(self) -> int:
        self._num_slots += 1
        return self._num_slots - 1

    def _transfer(self, name: str, target: Layout, steps: tuple[Step, ...], layer: str, cast: bool = False) -> None:
        """Redistribute a value, once for all who want it in the same layout; `cast` sends it as autocast computes."""
        if not steps or (name, target) in self._slots:
            return
        source = self._slot(name, steps[0].source)
        move = self._build_transfer(steps, self._placement.graph.shape(name))
        run: Kernel = (lambda x: [move(_low(x))]) if cast else (lambda x: [move(x)])
        self._instructions.append(Instruction(run, (source,), (self._slot(name, target),), alone=True, layer=layer))

    def _redistribution(self, steps: tuple[Step, ...], shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        return redistribute(steps, self._groups, shape, self._channels_last)

    def _fold(self, places: Sequence[range], compile: bool) -> None:
        """Make one instruction of each stretch that is run again, which are at these places."""
        changing = self._changing()
        for place in reversed(places):
            body, later = self._instructions[place.start : place.stop], self._instructions[place.stop :]
            inputs, outputs = _ends(
                body, {*self._outputs, *(slot for instruction in later for slot in instruction.inputs)}
            )
            if compile:
                body = compiled(body, outputs)
            updated = frozenset(changing.intersection(inputs))
            stretch = Stretch(freeing(body, outputs), inputs, outputs, updated, self._context)
            self._instructions[place.start : place.stop] = [Instruction(stretch, inputs, outputs, alone=True)]

    def _changing(self) -> set[int]:
        graph, layouts = self._placement.graph, self._placement.layouts
        names = {name for call in graph.calls if call.updates for name in call.inputs}
        return {self._slot(n, layouts[n]) for n in names if graph.values[n].origin == "buffer" and n in layouts}


def _recording(kernel: WithStatistics) -> Callable[..., Sequence[Any]]:
    def run(*tensors: Any) -> Sequence[Any]:
        *buffers, terms = tensors
        kernel.record(buffers, terms)
        return ()

    return run


def _low(x: Tensor) -> Tensor:
    """The tensor in the precision in which autocast would have the next layer compute."""
    kind = x.device.type
    if x.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x
