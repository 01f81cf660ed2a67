"""A placed network on one rank: kernels and transfers in the order in which they run.

Calls may overwrite what they are given where nobody needs it any more, which saves a tensor and a pass over fresh
memory (`overwriting`). The segments that only compute may be compiled by `torch.compile`; what lies between them runs
as it is (`compiled`). The backward pass of a compiled segment gives all of its gradients at its end, so that long ones
are cut where many gradients have come together: these are sent while the backward pass goes on in the segment before.

Stretches of calls are run again in the backward pass where the placement says so (`ops/recompute.py`). Torch's
checkpoint drops what autograd keeps of them and leaves the graph of the backward pass as it is, so that gradients are
computed, added up and sent in the same order as without.
"""

import math
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
from convoy.ops.kernel import Alone, Kernel, Recorded, Site
from convoy.ops.memory import Readers, overwritten
from convoy.ops.recompute import stretches
from convoy.plans.layout import Layout
from convoy.plans.place import PlacedCall, Placement
from convoy.plans.stages import Crossing
from convoy.plans.transfer import Step


def overwriting(placed: PlacedCall, readers: Readers, own: Container[str] | None = None) -> Kernel | None:
    """The version of a call that writes its result over an input that nobody else reads; None where it must not. In a
    stretch that will run again, only what is in `own`, which the stretch itself has made, may be overwritten."""

    def is_spare(source: str) -> bool:
        if placed.placed.inputs[source].partial:  # a rank that adds no bias gives a view, which autograd protects
            return False
        return (own is None or source in own) and readers.is_spare(source, placed.transfers)

    name = overwritten(placed.call, is_spare)
    if name is None:
        return None
    if len(placed.call.inputs) == 1:
        return lambda x: [torch.relu_(x)]
    return _add_to_first if name == placed.call.inputs[0] else lambda x, y: _add_to_first(y, x)


@dataclass(frozen=True)
class Taking:
    """Gives one of its inputs, in place of a call that was done within another."""

    place: int

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        return [tensors[self.place]]


def _add_to_first(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    is_same_kind = x.shape == y.shape and x.dtype == y.dtype and x.is_floating_point()
    return [x.add_(y) if is_same_kind else x + y]


@dataclass
class Ending:
    """What follows a batch norm at once, alone reads its result, and is done with it in one kernel on a GPU."""

    relu: bool = False  # after the addition, if there is one
    addition: PlacedCall | None = None  # adds `addend`; the batch norm runs right before it
    addend: str | None = None


def inside(
    calls: Sequence[PlacedCall], graph: Graph, readers: Readers, stretch: Callable[[int], range | None]
) -> tuple[dict[str, Ending], dict[str, int]]:
    """What follows each batch norm within it, by the name of its call; and by the name of each call that is done in
    one, which of its inputs is its result. `stretch` says with which calls a call is computed again."""
    buffers = Counter(
        placed_call.call.attributes["running_mean"] for placed_call in calls if placed_call.call.op == "batch_norm"
    )

    def movable(norm: Call) -> bool:  # not past another one that follows the same statistics
        return norm.attributes["running_mean"] is None or buffers[norm.attributes["running_mean"]] == 1

    norms: dict[str, tuple[int, PlacedCall]] = {}  # by what is their result so far
    endings: dict[str, Ending] = {}
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
        ending = endings.get(norm.name, Ending())
        if len(call.inputs) == 1:
            ending.relu = True
        else:
            addend = next(name for name in call.inputs if name != source)
            if ending != Ending() or not movable(norm) or graph.shape(addend) != graph.shape(source):
                continue
            ending.addition, ending.addend = placed, addend
        endings[norm.name] = ending
        inner_calls[call.name] = call.inputs.index(source)
        norms[call.outputs[0]] = norms[source]
    return endings, inner_calls


def _moved(calls: Sequence[PlacedCall], endings: Mapping[str, Ending]) -> Iterator[tuple[int, PlacedCall]]:
    """The calls with their numbers, as they run: a batch norm right before its addition."""
    numbers = {placed.call.name: number for number, placed in enumerate(calls)}
    norm_before = {ending.addition.call.name: norm for norm, ending in endings.items() if ending.addition is not None}
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


MOST_CUTS = 5
LEAST_BYTES = 2**23  # Cutting off fewer bytes of gradients gains less than what the compiler can no longer fuse.


def compiled(
    instructions: Sequence[Instruction], results: Iterable[int], gradients: Mapping[int, int]
) -> list[Instruction]:
    """The same program with every stretch of instructions that only compute as one, cut for the gradients' sake.
    `results` are the slots read after the last one, `gradients` the bytes that ranks exchange for the gradient of a
    slot."""
    live_slots = set(results)
    segments: list[Instruction] = []
    stretch: list[Instruction] = []
    enough = max(LEAST_BYTES, sum(gradients.values()) / MOST_CUTS)
    for instruction in reversed(instructions):
        if instruction.alone:
            segments += [*_joined(stretch, live_slots), instruction]
            stretch = []
            live_slots |= set(instruction.inputs)
            continue
        stretch.insert(0, instruction)
        if sum(gradients.get(slot, 0) for slot in {slot for member in stretch for slot in member.inputs}) >= enough:
            segments += _joined(stretch, live_slots)
            stretch = []
    segments += _joined(stretch, live_slots)
    return segments[::-1]


def _joined(stretch: Sequence[Instruction], live_slots: set[int]) -> list[Instruction]:
    """One instruction for a stretch; what it needs from before is live from then on."""
    if all(isinstance(instruction.run, Taking) for instruction in stretch):  # there is nothing to compile
        live_slots |= {slot for instruction in stretch for slot in instruction.inputs}
        return list(stretch[::-1])
    inputs, outputs = _ends(stretch, live_slots)
    live_slots |= set(inputs)
    return [Instruction(_compile(tuple(stretch), inputs, outputs), inputs, outputs, alone=False)]


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
        records: list[Instruction] = []
        self.received, self.sent = tuple(received), tuple(sent or ())
        self._placement = placement
        self._groups = groups
        self._context = context
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
        full_precision = {
            (name, layout)
            for placed in placement.calls
            for name, layout in placed.placed.inputs.items()
            if placed.call.op not in LOW_PRECISION
        }
        readers = Readers(placement.graph, [*placement.outputs, *placement.held])
        stretch_of = {number: stretch for stretch in stretches(placement) for number in stretch}
        endings, inner_calls = inside(placement.calls, graph, readers, stretch_of.get)
        places: dict[range, range] = {}
        results: set[str] = set()
        for number, placed in _moved(placement.calls, endings):
            ending = endings.get(placed.call.name, Ending())
            joining = [item for item in (placed, ending.addition) if item is not None]
            for name, steps, target in (
                (n, steps, joined_call.placed.inputs[n])
                for joined_call in joining
                for n, steps in joined_call.transfers.items()
            ):
                self._transfer(name, target, steps, placed.call.name, cast=(name, target) not in full_precision)
            ranks = {"groups": groups, "context": context}
            site = Site.of(placed, graph, mesh, coordinates, **ranks, relu=ending.relu)
            inputs = [self._slot(name, placed.placed.inputs[name]) for name in placed.call.inputs]
            outputs = [self._slot(name, placed.placed.outputs[name]) for name in placed.call.outputs]
            if ending.addition is not None and ending.addend is not None:
                site = replace(site, addend=ending.addend)
                inputs.append(self._slot(ending.addend, ending.addition.placed.inputs[ending.addend]))
            stretch, start = stretch_of.get(number), len(self._instructions)
            if stretch is not None and stretch not in places:
                results = set()
            if placed.call.name in inner_calls:
                kernel: Kernel | None = Taking(inner_calls[placed.call.name])
            else:
                kernel = overwriting(placed, readers, None if stretch is None else results)
            kernel = kernel or OPERATIONS[site.call.op].build(site)
            results.update(placed.call.outputs)
            if compile and isinstance(kernel, Recorded):
                terms = self._new_slot()
                self._add(kernel.compute, inputs, [*outputs, terms], name=placed.call.name)
                buffers = tuple(inputs[place] for place in kernel.buffers)
                records.append(Instruction(_recording(kernel), (*buffers, terms), (), alone=True))
            else:
                self._add(kernel, inputs, outputs, isinstance(kernel, Alone), placed.call.name)
            if stretch is not None:
                places[stretch] = range(places.get(stretch, range(start, start)).start, len(self._instructions))
        layouts = placement.output_layouts if sent is None else placement.layouts
        for name, steps in placement.outputs.items():
            self._transfer(name, layouts[name], steps, "the output")
        self.outputs = list(placement.outputs if sent is None else dict.fromkeys(crossing.value for crossing in sent))
        self._outputs = [self._slot(name, layouts[name]) for name in self.outputs]
        self._instructions += records
        if places:
            self._fold(list(places.values()), compile)
        if compile:
            self._instructions = compiled(self._instructions, self._outputs, self._gradients())
        self._program = freeing(self._instructions, {*self._outputs, *self._constants})

    def __call__(self, tensors: Sequence[Tensor], watch: Watch | None = None) -> list[Tensor]:
        """This rank's part of every output, in order, from its part of every source; `watch` sees every instruction."""
        slots: list[Any] = [None] * self._num_slots
        for slot, constant in self._constants.items():
            slots[slot] = constant
        for slot, tensor in zip(self._sources, tensors, strict=True):
            slots[slot] = tensor
        execute(self._program, slots, watch)
        outputs = [slots[slot] for slot in self._outputs]
        return [tensor for tensor in outputs if tensor is not None]

    def _slot(self, name: str, layout: Layout) -> int:
        if (name, layout) not in self._slots:
            self._slots[name, layout] = self._new_slot()
        return self._slots[name, layout]

    def _new_slot(self) -> int:
        self._num_slots += 1
        return self._num_slots - 1

    def _add(
        self,
        run: Callable[..., Sequence[Any]],
        inputs: Sequence[int],
        outputs: Sequence[int],
        alone: bool = False,
        name: str = "",
        layer: str = "",
    ) -> None:
        self._instructions.append(
            Instruction(run, tuple(inputs), tuple(outputs), alone, name=name, layer=layer or name)
        )

    def _transfer(self, name: str, target: Layout, steps: tuple[Step, ...], layer: str, cast: bool = False) -> None:
        """Redistribute a value, once for all who want it in the same layout; `cast` sends it as autocast computes."""
        if not steps or (name, target) in self._slots:
            return
        source = self._slot(name, steps[0].source)
        move = self._build_transfer(steps, self._placement.graph.shape(name))
        slot = self._slot(name, target)
        self._add((lambda x: [move(_low(x))]) if cast else (lambda x: [move(x)]), [source], [slot], True, layer=layer)

    def _redistribution(self, steps: tuple[Step, ...], shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        groups = self._groups
        return redistribute(steps, self._placement.mesh, groups.coordinates, groups, shape, self._channels_last)

    def _gradients(self) -> dict[int, int]:
        """Bytes that ranks exchange for the gradient of the parameter in a slot."""
        placement, num_bytes = self._placement, {}
        for name, slot in zip(self.sources, self._sources, strict=True):
            value, layout = placement.graph.values[name], placement.layouts[name]
            if value.origin == "parameter" and placement.mesh.size(tuple(layout.copied)) > 1:
                parts = placement.mesh.size(tuple(layout.split_axes))
                num_bytes[slot] = math.prod(value.shape) * value.dtype.itemsize // parts
        return num_bytes

    def _fold(self, places: Sequence[range], compile: bool) -> None:
        """Make one instruction of each stretch that is run again, which are at these places."""
        changing = self._changing()
        for place in reversed(places):
            body, rest = self._instructions[place.start : place.stop], self._instructions[place.stop :]
            inputs, outputs = _ends(body, {*self._outputs, *(slot for after in rest for slot in after.inputs)})
            if compile:
                body = compiled(body, outputs, self._gradients())
            updated = frozenset(changing.intersection(inputs))
            stretch = Stretch(freeing(body, outputs), inputs, outputs, updated, self._context)
            joined = Instruction(stretch, inputs, outputs, alone=True)
            self._instructions[place.start : place.stop] = [joined]

    def _changing(self) -> set[int]:
        graph, layouts = self._placement.graph, self._placement.layouts
        names = {name for call in graph.calls if call.updates for name in call.inputs}
        return {self._slot(n, layouts[n]) for n in names if graph.values[n].origin == "buffer" and n in layouts}


def _recording(kernel: Recorded) -> Callable[..., Sequence[Any]]:
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
