"""The work of every layer under a plan, what is sent for it and what each rank holds: in numbers, and as a table."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from convoy.graph.graph import Call
from convoy.plans.fit import axis_names
from convoy.plans.mesh import Mesh
from convoy.plans.place import COMPUTE, Memory, PlacedCall, Placement
from convoy.plans.plan import Plan
from convoy.plans.stages import StagedGraph
from convoy.plans.traffic import Crossed, Sent, Traffic, cut_traffic, gradient_traffic, transfer_traffic
from convoy.units import size, table


@dataclass(frozen=True)
class Row:
    """A call in the explanation; every number is in bytes, of the rank that has most of it."""

    layer: str  # name of the module
    op: str  # kind of work
    strategy: tuple[str, ...]  # on each mesh axis but that of stages; empty for calls that follow their input
    gives: str  # layout of the output, for people
    sent: tuple[str, ...]  # the steps for its inputs in which something is sent, each as `kind over axes`
    traffic: Traffic  # sent by a rank in these steps
    gradients: int  # sent by a rank to add up the gradients of its parameters
    parameters: int  # held by a rank
    note: str  # why it runs whole on every rank
    stage: int | None = None  # None where the network is in one piece


@dataclass(frozen=True)
class StageRow:
    """A stage, and what crosses the cuts before it."""

    layer: str  # at which it begins
    ranks: tuple[int, ...]
    takes: tuple[str, ...]  # the layers of earlier stages whose values it is sent
    # bytes of these values that a rank is sent in the forward pass, and of their gradients that it sends back
    received: Traffic


@dataclass(frozen=True)
class Explanation:
    """The effect of a plan on a network; bytes are those of the rank that has most of them."""

    # every call that a plan divides, has parameters, is sent something or runs whole for want of a rule
    rows: tuple[Row, ...]
    others: int  # number of calls that follow their input and send nothing
    output: Row | None  # what is sent for the network's output, if anything is
    traffic: Traffic  # sent in all steps together
    gradients: int  # sent for the gradients of all parameters
    memory: Memory  # on the rank that needs most
    whole: int  # bytes of all parameters
    unmatched: tuple[str, ...]  # layers with work to divide that no pattern matches
    stages: tuple[StageRow, ...] = ()  # none where the network is in one piece
    held: tuple[Memory, ...] = ()  # on the rank of each stage that needs most


def explanation(
    placement: Placement, memory: Sequence[Memory], plan: Plan | None = None, staged: StagedGraph | None = None
) -> Explanation:
    """The effect of a plan on a network, from the bytes on each rank; `plan` tells which layers no pattern matches, and
    ranks of a stage of `staged` run only their part of the network."""
    graph, mesh = placement.graph, placement.mesh
    crossings = cut_traffic(placement, staged) if staged is not None else []
    counted: set[str] = set()
    rows: list[Row] = []
    output, most, most_gradients = None, Traffic(), 0
    for stage in range(staged.number) if staged is not None else (None,):
        part = placement if staged is None or stage is None else staged.part(placement, stage)
        ranks = [rank for rank in range(mesh.num_devices) if staged is None or mesh.stage_of(rank) == stage]
        sent, gradients = transfer_traffic(part), gradient_traffic(part)
        for placed in part.calls:
            names = [
                name for name in placed.call.inputs if graph.values[name].origin == "parameter" and name not in counted
            ]
            counted |= set(names)
            row = _row(
                part, placed, [message for message in sent if message.call == placed.call.name], names, gradients
            )
            if row.sent or names or row.note or row.op in COMPUTE:
                rows.append(replace(row, stage=stage))
        last = [message for message in sent if not message.call]
        steps = _steps(part, last)
        if steps:
            output = Row("", "output", (), "", steps, _most(last), 0, 0, "", stage)
        sends = _most([*sent, *crossings], ranks)
        most = Traffic(max(most.forward, sends.forward), max(most.backward, sends.backward))
        most_gradients = max(most_gradients, *(sum(numbers[rank] for numbers in gradients.values()) for rank in ranks))
    return Explanation(
        tuple(rows),
        len(placement.calls) - len(rows),
        output,
        most,
        most_gradients,
        max(memory, key=lambda held: held.total),
        sum(math.prod(value.shape) * value.dtype.itemsize for value in graph.parameters()),
        _unmatched(placement, plan),
        rows_of_stages(placement, staged) if staged is not None else (),
        tuple(_most_held(memory, mesh, stage) for stage in range(staged.number)) if staged is not None else (),
    )


def rows_of_stages(placement: Placement, staged: StagedGraph) -> tuple[StageRow, ...]:
    """A network's stages, each with what it is sent in a pass over the batch that was placed."""
    graph, mesh, rows = placement.graph, placement.mesh, []
    makers = {name: call.layer or _unnamed(call) for call in graph.calls for name in call.outputs}
    crossings = cut_traffic(placement, staged)
    for stage in range(staged.number):
        ranks = tuple(rank for rank in range(mesh.num_devices) if mesh.stage_of(rank) == stage)
        arriving = [crossed for crossed in crossings if crossed.crossing.target == stage]
        forward = max(
            sum(crossed.ranks[_peer(rank, crossed.crossing.source, mesh)].forward for crossed in arriving)
            for rank in ranks
        )
        layer = next((graph.calls[number].layer for number in staged.calls(stage) if graph.calls[number].layer), "")
        takes = tuple(dict.fromkeys(makers[crossed.crossing.value] for crossed in arriving))
        rows.append(StageRow(layer, ranks, takes, Traffic(forward, _most(arriving, ranks).backward)))
    return tuple(rows)


def _unnamed(call: Call) -> str:
    return f"{getattr(call.function, '__name__', 'a call').strip('_')} in the network itself"


def _most_held(memory: Sequence[Memory], mesh: Mesh, stage: int) -> Memory:
    of_stage = (held for rank, held in enumerate(memory) if mesh.stage_of(rank) == stage)
    return max(of_stage, key=lambda held: held.total)


def _peer(rank: int, stage: int, mesh: Mesh) -> int:
    """The rank of another stage at the same place on the other axes."""
    return mesh.rank([stage if axis == mesh.stage_axis else at for axis, at in enumerate(mesh.coordinates(rank))])


def _unmatched(placement: Placement, plan: Plan | None) -> tuple[str, ...]:
    if plan is None or all(plan.mesh.sizes[axis] == 1 for axis in plan.mesh.axes if axis != plan.mesh.stage_axis):
        return ()
    layers = dict.fromkeys(placed.call.layer for placed in placement.calls if placed.call.op in COMPUTE)
    return tuple(layer for layer in layers if plan.pattern(layer) is None)


def _row(
    placement: Placement,
    placed: PlacedCall,
    sent: Sequence[Sent],
    parameters: Sequence[str],
    gradients: dict[str, tuple[int, ...]],
) -> Row:
    mesh, graph = placement.mesh, placement.graph
    ranks = range(mesh.num_devices)

    def held(rank: int) -> int:
        return sum(
            math.prod(placement.layouts[name].local_shape(graph.shape(name), mesh, mesh.coordinates(rank)))
            * graph.values[name].dtype.itemsize
            for name in parameters
        )

    return Row(
        placed.call.layer,
        placed.call.op,
        tuple(
            strategy
            for axis, strategy in enumerate(placed.strategy)
            if placed.call.op in COMPUTE and axis != mesh.stage_axis
        ),
        _gives(placement, placed),
        _steps(placement, sent),
        _most(sent),
        max(sum(gradients[name][rank] for name in parameters if name in gradients) for rank in ranks),
        max(map(held, ranks)),
        placed.placed.note,
    )


def _steps(placement: Placement, sent: Sequence[Sent]) -> tuple[str, ...]:
    steps = [message.step for message in sent if any(traffic != Traffic() for traffic in message.ranks)]
    return tuple(f"{step.kind} over {axis_names(placement.mesh, step.axes)}" for step in steps)


def _most(sent: Sequence[Sent | Crossed], ranks: Sequence[int] | None = None) -> Traffic:
    """Traffic of the rank that sends most forward, and of the one that sends most backward."""
    if not sent:
        return Traffic()
    sums = [sum(numbers, Traffic()) for numbers in zip(*(message.ranks for message in sent), strict=True)]
    of_ranks = sums if ranks is None else [sums[rank] for rank in ranks]
    return Traffic(max(traffic.forward for traffic in of_ranks), max(traffic.backward for traffic in of_ranks))


def _gives(placement: Placement, placed: PlacedCall) -> str:
    """The layout of a call's first output, its dimensions by their names: `channels over filter`."""
    if not placed.call.outputs:
        return ""
    layout, mesh = placed.placed.outputs[placed.call.outputs[0]], placement.mesh
    count = len(placement.graph.shape(placed.call.outputs[0]))
    words = [f"{_dim(dim, count)} over {axis_names(mesh, split.axes)}" for dim, split in layout.splits]
    words += [f"partial over {mesh.names[axis]}" for axis in sorted(layout.partial)]
    return ", ".join(words) or "whole"


def _dim(dim: int, count: int) -> str:
    """The name of a dimension of an activation."""
    if dim == 0:
        return "samples"
    if count == 2:
        return "features"
    if dim == 1 and count in (3, 4, 5):
        return "channels"
    names = {(3, 2): "length", (4, 2): "rows", (4, 3): "columns", (5, 3): "rows", (5, 4): "columns"}
    return names.get((count, dim), f"dim {dim}")


_NUMBERS = ("forward", "backward", "gradients", "parameters")
_HEADERS = ("layer", "work", "strategy", "gives", "sent for its input", *_NUMBERS)
_STAGE_NUMBERS = ("forward", "backward", "parameters", "activations")
_STAGE_HEADERS = ("stage", "begins at", "ranks", "takes the output of", *_STAGE_NUMBERS)


def explain(
    placement: Placement,
    memory: Sequence[Memory],
    plan: Plan | None = None,
    capture: str = "",
    staged: StagedGraph | None = None,
    notes: Iterable[str] = (),
) -> str:
    """A table of the layers of a plan, and what it costs in all, from the bytes on each rank. `plan` gives its name and
    the layers that no pattern matches, `capture` says in a few words how the network was captured, and `notes` are
    lines about layers."""
    result, ranks = explanation(placement, memory, plan, staged), placement.mesh.num_devices
    setting = setting_text(placement.graph.training, [len(part) for part in placement.batch.parts], ranks, capture)
    rows = [*result.rows, *([result.output] if result.output else [])]
    cells, number = [_cells(row) for row in rows], len(result.stages)
    headers: tuple[str, ...] = _HEADERS
    if number:
        headers = ("stage", *_HEADERS)
        cells = [[_numbered(row.stage), *line] for row, line in zip(rows, cells, strict=True)]
    lines = [f"plan {plan}" if plan is not None else f"mesh {placement.mesh}", setting, ""]
    lines += [*table(headers, cells, _NUMBERS), ""]
    if number:
        pairs = enumerate(zip(result.stages, result.held, strict=True))
        cells = [_stage_cells(stage, row, held) for stage, (row, held) in pairs]
        lines += [*table(_STAGE_HEADERS, cells, _STAGE_NUMBERS), ""]
    if result.others:
        calls = "1 other call follows" if result.others == 1 else f"{result.others} other calls follow"
        lines.append(f"{calls} the layout given, without sending anything")
    if number:
        limit = f"at most those of {number} parts in stage 1, down to 1 in stage {number}"
        lines.append(f"activations are GPipe's, of all parts of a pass; 1F1B keeps {limit}")
    lines += notes
    for note in dict.fromkeys(row.note for row in result.rows if row.note):
        lines.append(f"{note}: {listed([row.layer for row in result.rows if row.note == note])}")
    if result.unmatched:
        lines.append(f"replicated, as no pattern matches them: {listed(result.unmatched)}")
    return "\n".join([*lines, *_totals(result)]) + "\n"


def listed(layers: Sequence[str]) -> str:
    """Names of layers in a sentence, the first eight of them."""
    names = [layer or "the network itself" for layer in dict.fromkeys(layers)]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def setting_text(training: bool, parts: Sequence[int], num_ranks: int, capture: str = "") -> str:
    """The setting of an explanation: `training, 8 samples (4 + 4), 2 ranks, captured as one program`."""
    mode = "training" if training else "evaluation"
    shares = f" ({' + '.join(map(str, parts))})" if len(parts) > 1 else ""
    ranks = f"{num_ranks} {'rank' if num_ranks == 1 else 'ranks'}"
    return ", ".join([mode, f"{sum(parts)} samples{shares}", ranks, *([f"captured {capture}"] if capture else [])])


def _totals(result: Explanation) -> Iterable[str]:
    traffic, memory = result.traffic, result.memory
    parts = [
        (traffic.forward, "in the forward pass"),
        (traffic.backward, "in the backward pass"),
        (result.gradients, "for gradients of parameters"),
    ]
    sent = ", ".join(f"{size(number)} {words}" for number, words in parts if number)
    yield f"a rank sends {sent or 'nothing'}"
    who = "a rank holds"
    if result.stages:
        who = f"a rank of stage {result.held.index(memory) + 1} holds most in all:"
    share = f" of {size(result.whole)}" if result.whole != memory.parameters else ""
    held = [f"{size(memory.parameters)}{share} of parameters"]
    held += [f"{size(memory.gradients)} of gradients"] if memory.gradients else []
    held += [f"{size(memory.activations)} of activations kept for the backward pass"] if memory.activations else []
    yield f"{who} {', '.join(held)}"


def _cells(row: Row) -> list[str]:
    strategy = ",".join(row.strategy) if row.op in COMPUTE else "-"
    numbers = (row.traffic.forward, row.traffic.backward, row.gradients, row.parameters)
    return [
        row.layer or "-",
        row.op,
        strategy or "-",
        row.gives or "-",
        "; ".join(row.sent) or "-",
        *map(size, numbers),
    ]


def _stage_cells(number: int, row: StageRow, held: Memory) -> list[str]:
    numbers = (row.received.forward, row.received.backward, held.parameters, held.activations)
    return [_numbered(number), row.layer or "-", some_ranks(row.ranks), listed(row.takes) or "-", *map(size, numbers)]


def some_ranks(ranks: Sequence[int]) -> str:
    """Numbers of ranks, the first eight of them."""
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")


def _numbered(stage: int | None) -> str:
    """The stage's number for people, who count from 1."""
    return "-" if stage is None else str(stage + 1)
