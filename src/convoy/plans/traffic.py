"""How many bytes each rank sends for a plan, counted from the layouts, before anything runs; and as a table for people,
with the work of every layer and what each rank holds.

A rank of a group of k sends for a tensor of n elements: in an all-reduce 2(k-1)/k·n (ring: Patarasuk and Yuan, 2009),
in a gather its own part to k-1 others, in an exchange or reduce-scatter exactly what the others ask of it. What is sent
inside a layer (the statistics of a batch norm over several ranks) is not counted.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from convoy import terminal
from convoy.graph.graph import Call
from convoy.plans.fit import axis_names
from convoy.plans.layout import WHOLE, Layout
from convoy.plans.mesh import Coordinates, Mesh, ranks_of
from convoy.plans.place import COMPUTE, Memory, PlacedCall, Placement
from convoy.plans.plan import Plan
from convoy.plans.stages import Crossing, StagedGraph
from convoy.plans.transfer import Step
from convoy.units import size, table


@dataclass(frozen=True)
class Traffic:
    """Numbers that one rank sends in the forward and in the backward pass: elements or bytes."""

    forward: int = 0
    backward: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, factor: int) -> "Traffic":
        return Traffic(self.forward * factor, self.backward * factor)


@dataclass(frozen=True)
class Sent:
    """The messages of one step."""

    call: str  # that asks for it; empty where the network's own output does
    value: str  # name of the tensor
    step: Step
    ranks: tuple[Traffic, ...]  # bytes that each rank sends


@dataclass(frozen=True)
class Crossed:
    """The messages of stages for one value."""

    crossing: Crossing
    ranks: tuple[Traffic, ...]  # bytes that each rank sends: of the value forward, of its gradient backward


def all_reduce_elements(num_elements: int, count: int) -> int:
    """Elements that a rank sends in an all-reduce over `count` ranks."""
    return -(-2 * (count - 1) * num_elements // count)


@functools.lru_cache(maxsize=4096)
def step_elements(step: Step, mesh: Mesh, coordinates: Coordinates, shape: tuple[int, ...]) -> Traffic:
    """Elements that the rank at `coordinates` sends for one step of a tensor of the whole `shape`."""
    count = mesh.size(step.axes)
    before, after = (layout.numel(shape, mesh, coordinates) for layout in (step.source, step.target))
    if step.kind == "reduce":
        return Traffic(all_reduce_elements(before, count), 0)
    if step.kind == "copy":
        return Traffic(0, all_reduce_elements(before, count))
    if step.kind == "slice":
        axes = tuple(axis for axis in step.axes if axis not in step.source.copied)
        return Traffic(0, (mesh.size(axes) - 1) * after)
    if step.kind == "gather":
        return Traffic((count - 1) * before, 0)
    if step.kind == "keep":
        return Traffic()
    peers = [place for place in mesh.group(coordinates, step.axes) if place != coordinates]
    if step.kind == "reduce_scatter":
        return Traffic(sum(step.target.numel(shape, mesh, peer) for peer in peers), (count - 1) * after)
    from_peers = _received(step, mesh, coordinates, shape)
    return Traffic(
        sum(_received(step, mesh, peer, shape)[coordinates] for peer in peers), sum(from_peers[peer] for peer in peers)
    )


@functools.lru_cache(maxsize=4096)
def _received(step: Step, mesh: Mesh, receiver: Coordinates, shape: tuple[int, ...]) -> dict[Coordinates, int]:
    """Elements that a rank gets from each rank of its group: its own, and the rest from the first that has them."""
    members = mesh.group(receiver, step.axes)
    elements = dict.fromkeys(members, 1)
    for dim, length in enumerate(shape):
        split = step.source.split(dim)
        places = {place: mesh.index(place, split.axes) if split else 0 for place in members}
        indices_left = set(step.target.parts(dim, mesh, receiver, length))
        numbers: dict[int, int] = {}
        for place in sorted(members, key=lambda place: (places[place] != places[receiver], places[place])):
            if places[place] not in numbers:
                part = indices_left.intersection(step.source.parts(dim, mesh, place, length))
                numbers[places[place]] = len(part)
                indices_left -= part
        for place in members:
            elements[place] *= numbers[places[place]]
    return elements


def redistributions(placement: Placement) -> Iterator[tuple[int, str, tuple[Step, ...]]]:
    """The steps that bring values to layouts in which they do not lie, each once for all calls that want a value so:
    number of the first of these calls (for the network's own outputs, how many calls there are), value and steps."""
    targets: set[tuple[str, Layout]] = set()
    for number, transfers in enumerate((*(placed.transfers for placed in placement.calls), placement.outputs)):
        for name, steps in transfers.items():
            if steps and (name, steps[-1].target) not in targets:
                targets.add((name, steps[-1].target))
                yield number, name, steps


def transfer_traffic(placement: Placement) -> list[Sent]:
    """The messages between calls."""
    graph, mesh = placement.graph, placement.mesh
    places = [mesh.coordinates(rank) for rank in range(mesh.num_devices)]
    elements_of: dict[tuple[Step, tuple[int, ...]], list[Traffic]] = {}  # blocks repeat
    calls, messages = [*(placed.call.name for placed in placement.calls), ""], []
    for number, name, steps in redistributions(placement):
        value = graph.values[name]
        for step in steps:
            key = step, value.shape
            if key not in elements_of:
                elements_of[key] = [step_elements(step, mesh, place, value.shape) for place in places]
            traffics = (elements * value.dtype.itemsize for elements in elements_of[key])
            ranks = tuple(sent if name in graph.differentiable else Traffic(sent.forward) for sent in traffics)
            messages.append(Sent(calls[number], name, step, ranks))
    return messages


def cut_traffic(placement: Placement, staged: StagedGraph) -> list[Crossed]:
    """The messages between stages: ranks at one place on the other axes send their part of each value at a cut."""
    mesh, differentiable, messages = placement.mesh, placement.graph.differentiable, []
    for crossing in staged.crossings:
        ranks = []
        for rank in range(mesh.num_devices):
            held = placement.local_bytes(crossing.value, rank)
            backward = held if mesh.stage_of(rank) == crossing.target and crossing.value in differentiable else 0
            ranks.append(Traffic(held if mesh.stage_of(rank) == crossing.source else 0, backward))
        messages.append(Crossed(crossing, tuple(ranks)))
    return messages


def gradient_traffic(placement: Placement) -> dict[str, tuple[int, ...]]:
    """For every parameter whose gradient is added over some axes, the bytes that each rank sends for it."""
    graph, mesh, traffic = placement.graph, placement.mesh, dict[str, tuple[int, ...]]()
    for value in graph.parameters() if graph.training else ():
        axes = placement.layouts.get(value.name, WHOLE).copied
        if axes and value.trains:
            count, width = mesh.size(tuple(axes)), value.dtype.itemsize
            sizes = (placement.local_bytes(value.name, rank) for rank in range(mesh.num_devices))
            traffic[value.name] = tuple(width * all_reduce_elements(size // width, count) for size in sizes)
    return traffic


@dataclass(frozen=True)
class StageRow:
    """A stage, and what crosses the cuts before it."""

    begins: str  # at this layer
    ranks: tuple[int, ...]
    takes: tuple[str, ...]  # the layers of earlier stages whose values it is sent
    received_bytes: Traffic  # of these values that a rank is sent forward, and of their gradients that it sends back


def rows_of_stages(placement: Placement, staged: StagedGraph) -> tuple[StageRow, ...]:
    """A network's stages, each with what it is sent in a pass over the batch that was placed."""
    graph, mesh, rows = placement.graph, placement.mesh, []
    makers = {name: call.layer or _unnamed(call) for call in graph.calls for name in call.outputs}
    crossings = cut_traffic(placement, staged)
    for stage in range(staged.number):
        arriving = [crossed for crossed in crossings if crossed.crossing.target == stage]
        layer = next((graph.calls[number].layer for number in staged.calls(stage) if graph.calls[number].layer), "")
        takes = tuple(dict.fromkeys(makers[crossed.crossing.value] for crossed in arriving))
        forward: dict[tuple[int, ...], int] = {}  # stages send between ranks at one place on the other axes
        for crossed in arriving:
            for rank, traffic in enumerate(crossed.ranks):
                place = mesh.beside_stages(mesh.coordinates(rank))
                forward[place] = forward.get(place, 0) + traffic.forward
        ranks = ranks_of(mesh, stage)
        received = Traffic(max(forward.values(), default=0), _most(arriving, ranks).backward)
        rows.append(StageRow(layer, ranks, takes, received))
    return tuple(rows)


def _unnamed(call: Call) -> str:
    return f"{getattr(call.function, '__name__', 'a call').strip('_')} in the network itself"


_NUMBERS = ("forward", "backward", "gradients", "parameters")
_HEADERS = ("stage", "layer", "work", "strategy", "gives", "sent for its input", *_NUMBERS)


def explain(
    placement: Placement,
    memory: Sequence[Memory],
    plan: Plan,
    capture: str = "",
    staged: StagedGraph | None = None,
    notes: Iterable[str] = (),
) -> str:
    """A table of the layers of a plan, and what it costs in all, from the bytes on each rank; a number is that of the
    rank that has most. `plan` gives its name and the layers that no pattern matches, `capture` says in a few words how
    the network was captured, `staged` gives every rank its part of the network, and `notes` are lines about layers."""
    graph, mesh, calls = placement.graph, placement.mesh, placement.calls
    crossings = cut_traffic(placement, staged) if staged is not None else []
    parameters = {value.name for value in graph.parameters()}  # each counts where it is first used
    rows, output, totals = [], list[list[str]](), [0, 0, 0]
    for stage in range(staged.number if staged is not None else 1):
        part = placement if staged is None else staged.part(placement, stage)
        of_part, of_output, totals_of_part = _rows(part, ranks_of(mesh, stage), crossings, parameters)
        rows += [[str(stage + 1), *row] for row in of_part]
        output = [[str(stage + 1), *row] for row in of_output] or output
        totals = [max(pair) for pair in zip(totals, totals_of_part, strict=True)]
    first = 0 if staged is not None else 1  # column
    parts = list(map(len, placement.batch.parts))
    lines = [f"plan {plan}", setting_text(graph.training, parts, mesh.num_devices, capture), ""]
    cells = [[cell or "-" for cell in row[first:]] for row in (*rows, *output)]
    lines += [*table(_HEADERS[first:], cells, _NUMBERS), ""]
    if staged is not None:
        lines += [*_stages(placement, staged, memory), ""]
    if number := len(calls) - len(rows):
        follow = "1 other call follows" if number == 1 else f"{number} other calls follow"
        lines.append(f"{follow} the layout given, without sending anything")
    if staged is not None:
        limit = f"at most those of {staged.number} parts in stage 1, down to 1 in stage {staged.number}"
        lines.append(f"activations are GPipe's, of all parts of a pass; 1F1B keeps {limit}")
    lines += notes
    for note in dict.fromkeys(placed.placed.note for placed in calls if placed.placed.note):
        lines.append(f"{note}: {listed([placed.call.layer for placed in calls if placed.placed.note == note])}")
    if any(ranks > 1 for ranks in mesh.beside_stages(mesh.sizes)):
        layers = [placed.call.layer for placed in calls if placed.call.op in COMPUTE]
        if unmatched := [layer for layer in layers if plan.pattern(layer) is None]:
            lines.append(f"replicated, as no pattern matches them: {listed(unmatched)}")
    of_what = ("in the forward pass", "in the backward pass", "for gradients of parameters")
    totals_text = ", ".join(f"{size(number)} {words}" for number, words in zip(totals, of_what, strict=True) if number)
    lines.append(f"a rank sends {totals_text or 'nothing'}")
    return "\n".join([*lines, _held(placement, memory, staged)]) + "\n"


def _rows(
    part: Placement, ranks: Sequence[int], crossings: Sequence[Crossed], parameters: set[str]
) -> tuple[list[list[str]], list[list[str]], tuple[int, int, int]]:
    """The rows of a network or a stage: of every call that a plan divides, has parameters, is sent something or runs
    whole for want of a rule; of its output, if anything is sent for it. And bytes that a rank sends forward, backward
    and for gradients. Of the `parameters` those are taken out that have been counted."""
    messages, gradients, mesh = transfer_traffic(part), gradient_traffic(part), part.mesh

    def messages_of(call: str) -> tuple[str, Traffic]:
        of_call = [message for message in messages if message.call == call]
        steps = [message.step for message in of_call if any(traffic != Traffic() for traffic in message.ranks)]
        return "; ".join(f"{step.kind} over {axis_names(mesh, step.axes)}" for step in steps), _most(of_call, ranks)

    rows = []
    for placed in part.calls:
        call = placed.call
        steps, traffic = messages_of(call.name)
        names = [name for name in call.inputs if name in parameters]
        parameters.difference_update(names)
        if steps or names or placed.placed.note or call.op in COMPUTE:
            strategy = ",".join(mesh.beside_stages(placed.strategy)) if call.op in COMPUTE else ""
            gradient_bytes = max(sum(gradients[name][rank] for name in names if name in gradients) for rank in ranks)
            parameter_bytes = max(sum(part.local_bytes(name, rank) for name in names) for rank in ranks)
            words = call.layer, call.op, strategy, _gives(part, placed), steps
            rows.append([*words, *map(size, (traffic.forward, traffic.backward, gradient_bytes, parameter_bytes))])
    steps, traffic = messages_of("")
    output = [["", "output", "", "", steps, size(traffic.forward), size(traffic.backward), "", ""]] if steps else []
    most = _most([*messages, *crossings], ranks)
    return rows, output, (most.forward, most.backward, max(sum(sent[r] for sent in gradients.values()) for r in ranks))


def _stages(placement: Placement, staged: StagedGraph, memory: Sequence[Memory]) -> list[str]:
    numbers, rows = ("forward", "backward", "parameters", "activations"), []
    for number, row in enumerate(rows_of_stages(placement, staged), 1):
        most = max((memory[rank] for rank in row.ranks), key=lambda held: held.total)
        sizes = row.received_bytes.forward, row.received_bytes.backward, most.parameters, most.activations
        rows.append([*stage_cells(number, row), *map(size, sizes)])
    return table(("stage", "begins at", "ranks", "takes the output of", *numbers), rows, numbers)


def stage_cells(number: int, row: StageRow) -> list[str]:
    """The first columns of a table of stages."""
    return [str(number), row.begins or "-", some_ranks(row.ranks), listed(row.takes) or "-"]


def _held(placement: Placement, memory: Sequence[Memory], staged: StagedGraph | None) -> str:
    """What the rank that needs most holds, of how much in all."""
    rank = max(range(len(memory)), key=lambda rank: memory[rank].total)
    most, graph = memory[rank], placement.graph
    whole = sum(math.prod(value.shape) * value.dtype.itemsize for value in graph.parameters())
    share = f" of {size(whole)}" if whole != most.parameters else ""
    held = [f"{size(most.parameters)}{share} of parameters"]
    held += [f"{size(most.gradients)} of gradients"] if most.gradients else []
    held += [f"{size(most.activations)} of activations kept for the backward pass"] if most.activations else []
    who = "a rank holds"
    if staged is not None:
        who = f"a rank of stage {placement.mesh.stage_of(rank) + 1} holds most in all:"
    return f"{who} {', '.join(held)}"


def listed(layers: Sequence[str]) -> str:
    """Names of layers in a sentence, the first eight of them."""
    return terminal.listed([layer or "the network itself" for layer in dict.fromkeys(layers)], 8)


def some_ranks(ranks: Sequence[int]) -> str:
    """Numbers of ranks, the first eight of them."""
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")


def setting_text(training: bool, parts: Sequence[int], num_ranks: int, capture: str = "") -> str:
    """The setting of an explanation: `training, 8 samples (4 + 4), 2 ranks, captured as one program`."""
    shares = f" ({' + '.join(map(str, parts))})" if len(parts) > 1 else ""
    setting = f"{'training' if training else 'evaluation'}, {sum(parts)} samples{shares}, {num_ranks} rank"
    return f"{setting}{'s' * (num_ranks != 1)}{f', captured {capture}' if capture else ''}"


def _most(sent: Sequence[Sent | Crossed], ranks: Sequence[int]) -> Traffic:
    """Traffic of the rank that sends most forward, and of the one that sends most backward."""
    sums = [sum((message.ranks[rank] for message in sent), Traffic()) for rank in ranks]
    return Traffic(max(total.forward for total in sums), max(total.backward for total in sums))


_DIMS = {(4, 2): "rows", (4, 3): "columns", (5, 3): "rows", (5, 4): "columns", (3, 2): "length", (2, 1): "features"}
_DIMS |= {(count, 1): "channels" for count in (3, 4, 5)}  # by the number of dimensions, and the dimension


def _gives(placement: Placement, placed: PlacedCall) -> str:
    """The layout of a call's first output, its dimensions by their names: `channels over filter`."""
    if not placed.call.outputs:
        return ""
    layout, count = placed.placed.outputs[placed.call.outputs[0]], len(placement.graph.shape(placed.call.outputs[0]))
    names = {0: "samples"} | {dim: name for (number, dim), name in _DIMS.items() if number == count}
    return layout.describe(placement.mesh, names)
