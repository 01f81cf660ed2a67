"""Where a network is cut into stages, and what passes from one stage to another.

A stage is a run of consecutive calls of the graph, so that no value ever goes back to an earlier one.
"""

import difflib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from convoy.errors import ConvoyError
from convoy.graph.graph import Graph, Ref, Value
from convoy.graph.tree import leaves
from convoy.plans.place import Placement
from convoy.terminal import did_you_mean
from convoy.units import plural

# stages send each other tensors of these types and of up to so many dimensions
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool]
DTYPES += [torch.uint8, torch.int8, torch.int16]
MOST_DIMS = 8


def why_not_sent(value: Value) -> str:
    """Why a stage cannot send a value to another, in words; empty where it can.

    >>> why_not_sent(Value("x", (2, 3), torch.complex64))
    'complex64'
    """
    if value.dtype not in DTYPES:
        return str(value.dtype).removeprefix("torch.")
    return f"of {len(value.shape)} dimensions" if len(value.shape) > MOST_DIMS else ""


def cut_points(graph: Graph) -> tuple[int, ...]:
    """The calls before which a network may be cut: those that are the first of their layers, but for the very first.

    Not the addition at the end of a residual block, which the block itself calls: its name stands for its first layer,
    so that a cut before it could not be written in a plan. A layer that is called again later, such as one activation
    for a whole network, begins where it is called first; so does one with others in it.

    >>> from torch import nn
    >>> graph = capture(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)), [(4, 3, 8, 8)])
    >>> [graph.calls[point].layer for point in cut_points(graph)]
    ['1', '2', '3']
    """
    earlier_layers: set[str] = set()
    first_calls = []
    for number, call in enumerate(graph.calls):
        if call.layer and call.layer not in earlier_layers:
            first_calls.append(number)
        earlier_layers.update(accumulate(call.layer.split("."), "{}.{}".format))
    return tuple(point for point in first_calls if point > 0)


def open_points(graph: Graph, points: Sequence[int]) -> tuple[int, ...]:
    """Those of some calls before which a stage may begin: no weight or buffer is used on both sides, nor a value that
    cannot be sent."""
    uses: dict[str, list[int]] = {}
    outputs = [ref.name for ref in leaves(graph.output, Ref)]
    for number, names in enumerate((*((*call.inputs, *call.outputs) for call in graph.calls), outputs)):
        for value in map(graph.values.__getitem__, names):
            if value.origin in ("parameter", "buffer") or (value.origin == "call" and why_not_sent(value)):
                uses.setdefault(value.name, []).append(number)
    shared = [(users[0], users[-1]) for users in uses.values() if users[0] < users[-1]]
    return tuple(point for point in points if not any(first < point <= last for first, last in shared))


def even_cuts(work: Sequence[float], points: Sequence[int], parts: int) -> tuple[int, ...]:
    """Where to cut so that the most work of any part is as little as can be; every part has some calls. `work` is that
    of every call, and `points` are the calls before which a cut may be, ascending and at least `parts - 1`.

    >>> even_cuts([4, 1, 1, 1, 5], points=[1, 2, 3, 4], parts=3)
    (1, 4)
    """
    sums = list(accumulate(work, initial=0.0))
    ends = [*points, len(work)]
    best: list[tuple[float, tuple[int, ...]]] = [(sums[end], ()) for end in ends]  # of one part up to each end
    for part in range(1, parts):
        best = [
            min(
                (max(best[cut][0], sums[ends[last]] - sums[ends[cut]]), (*best[cut][1], ends[cut]))
                for cut in range(part - 1, last)
            )
            if last >= part
            else (float("inf"), ())
            for last in range(len(ends))
        ]
    return best[-1][1]


@dataclass(frozen=True)
class Crossing:
    """A value that one stage sends another in every pass; its gradient comes back. Where several later stages use a
    value, each sends it on to the next, so that the gradients of all its uses are added in the order in which one
    device adds them."""

    value: str  # its name in the graph
    source: int  # the stage that sends it
    target: int  # the stage that receives it
    layer: str  # that gives it; empty for the network itself


@dataclass(frozen=True)
class Stages:
    """A network's stages."""

    begins: tuple[str, ...]  # the layers at which the second and later ones begin
    layers: Mapping[str, int]  # the stage in which every layer is called first

    @staticmethod
    def of(graph: Graph, number: int, names: Sequence[str], work: Sequence[float]) -> "Stages":
        """The stages of a network, by the names of the layers at which they begin, the first of which may be empty;
        without names by equal `work`, the multiply-adds of every call. A ConvoyError where there are fewer layers than
        stages, or a name is unknown or out of order."""
        points = cut_points(graph) if names else open_points(graph, cut_points(graph))
        if len(points) < number - 1:
            raise ConvoyError(
                f"the network has {plural(len(points) + 1, 'layer')} at which a stage can begin that shares no weights "
                f"with another, and axis stage has size {number}: "
                + (f"make it at most {len(points) + 1}" if points else "take a plan without stages")
            )
        cuts = _named(graph, points, names) if names else even_cuts(work, points, number)
        stages = (bisect_right(cuts, place) for place in range(len(graph.calls)))
        layers: dict[str, int] = {}
        for call, stage in zip(graph.calls, stages, strict=True):
            layers.setdefault(call.layer, stage)
        return Stages(tuple(graph.calls[cut].layer for cut in cuts), layers)

    @property
    def number(self) -> int:
        return len(self.begins) + 1

    def of_calls(self, graph: Graph) -> tuple[int, ...]:
        """The stage of every call of a graph of this network, at any batch size and in either mode."""
        stages, stage = [], 0
        for call in graph.calls:
            stage = max(stage, self.layers.get(call.layer, 0))
            stages.append(stage)
        return tuple(stages)

    def owners(self, graph: Graph) -> dict[str, int]:
        """The stage that keeps each parameter and buffer that the network uses, the last for those that it returns; a
        ConvoyError where two stages use the same one."""
        tensors = {value.name for value in graph.values.values() if value.origin in ("parameter", "buffer")}
        first_users: dict[str, tuple[int, str]] = {}
        for call, stage in zip(graph.calls, self.of_calls(graph), strict=True):
            for name in filter(tensors.__contains__, call.inputs):
                begin, user = first_users.setdefault(name, (stage, call.layer or "the network itself"))
                if begin != stage:
                    raise ConvoyError(
                        f"{name} is used in stage {begin + 1}, by {user}, and in stage {stage + 1}, by "
                        f"{call.layer or 'the network itself'}: let one stage have both, by the list stages of a YAML "
                        "plan, or divide otherwise"
                    )
        last = self.number - 1
        for name in (ref.name for ref in leaves(graph.output, Ref) if ref.name in tensors):
            stage, _ = first_users.setdefault(name, (last, ""))
            if stage != last:
                raise ConvoyError(
                    f"the network returns {name}, which stage {stage + 1} has and the last one lacks: return a value "
                    "that is computed with it, or divide otherwise"
                )
        return {name: stage for name, (stage, _) in first_users.items()}


@dataclass(frozen=True)
class StagedGraph:
    """A graph with the stage of each of its calls, whose `outputs` name the values that the network returns; a
    ConvoyError where a value that crosses is of a type or of more dimensions than stages send."""

    graph: Graph
    outputs: tuple[str, ...]
    stages: tuple[int, ...]
    number: int

    def __post_init__(self) -> None:
        for crossing in self.crossings:
            if why := why_not_sent(self.graph.values[crossing.value]):
                where = f"layer {crossing.layer}" if crossing.layer else "the network itself"
                raise ConvoyError(
                    f"{where} gives a tensor that is {why}, which stage {crossing.source + 1} cannot send to stage "
                    f"{crossing.target + 1}: begin a stage elsewhere, by the list stages of a YAML plan, or divide "
                    "otherwise"
                )

    @cached_property
    def crossings(self) -> tuple[Crossing, ...]:
        """The values that stages send each other, in the order in which they are made; outputs end up in the last
        stage."""
        layers: dict[str, str] = {}
        users: dict[str, set[int]] = {}
        for call, stage in zip(self.graph.calls, self.stages, strict=True):
            for name in call.inputs:
                if name in users:
                    users[name].add(stage)
            users |= {name: {stage} for name in call.outputs}
            layers |= dict.fromkeys(call.outputs, call.layer)
        for name in self.outputs:
            if name in users:
                users[name].add(self.number - 1)
        return tuple(
            Crossing(name, source, target, layers[name])
            for name, stages in users.items()
            for source, target in pairwise(sorted(stages))
        )

    def calls(self, stage: int) -> tuple[int, ...]:
        """The numbers of a stage's calls."""
        return tuple(number for number, stage_of_call in enumerate(self.stages) if stage_of_call == stage)

    def part(self, placement: Placement, stage: int) -> Placement:
        """The part of a placed network that the ranks of a stage run."""
        calls = tuple(placement.calls[number] for number in self.calls(stage))
        outputs = placement.outputs if stage == self.number - 1 else {}
        names = {name for placed in calls for name in (*placed.call.inputs, *placed.call.outputs)}
        values_held = tuple(dict.fromkeys(crossing.value for crossing in (*self.received(stage), *self.sent(stage))))
        names.update(outputs, values_held)
        layouts = {name: layout for name, layout in placement.layouts.items() if name in names}
        return replace(placement, calls=calls, layouts=layouts, outputs=outputs, held=values_held)

    def received(self, stage: int) -> tuple[Crossing, ...]:
        return tuple(crossing for crossing in self.crossings if crossing.target == stage)

    def sent(self, stage: int) -> tuple[Crossing, ...]:
        return tuple(crossing for crossing in self.crossings if crossing.source == stage)


_FEW = 12  # so many layers are all named


def where_to_begin(name: str, layers: Sequence[str]) -> str:
    """Where a stage can begin, for a sentence about an unknown name: the layers nearest to it."""
    nearby = layers if len(layers) <= _FEW else difflib.get_close_matches(name, layers, 6, cutoff=0.0)
    return f"a stage can begin at {', '.join(layer for layer in layers if layer in nearby)}" + (
        ", …" if len(nearby) < len(layers) else ""
    )


def _named(graph: Graph, points: Sequence[int], names: Sequence[str]) -> tuple[int, ...]:
    """The calls at which layers, or what they contain, begin."""
    layers = list(dict.fromkeys(call.layer for call in graph.calls if call.layer))
    firsts = [next(iter(layers)), *(graph.calls[point].layer for point in points)]
    numbers = dict(zip(firsts, (0, *points), strict=True))
    cuts: list[int] = []
    for place, name in enumerate(names):
        if place == 0 and not name:
            continue
        members = [layer for layer in firsts if layer == name or layer.startswith(f"{name}.")]
        point = min((numbers[layer] for layer in members), default=-1)
        problem = ""
        if not members:
            hint = did_you_mean(name, layers, otherwise=where_to_begin(name, firsts))
            problem = f"the network calls no layer {name}{hint}"
        elif place == 0 and point > 0:
            problem = (
                f"the first stage begins with the network, at layer {firsts[0]}, not at {name}: name that one first, "
                "or only where the other stages begin"
            )
        elif place > 0 and point == 0:
            later = f", {firsts[1]} for example" if len(firsts) > 1 else ""
            problem = (
                f"{name} is where the network begins, and with it the first stage: begin stage {place + 1} at a later "
                f"layer{later}"
            )
        elif place > 0 and point <= (cuts[-1] if cuts else 0):
            problem = (
                f"{name} begins stage {place + 1}, but is not called after {names[place - 1] or firsts[0]}, where "
                f"stage {place} begins, so that no layer would be between them: list the layers in the order in which "
                "the network calls them"
            )
        if problem:
            raise ConvoyError(f"stages: {problem}")
        cuts += [point] if place > 0 else []
    return tuple(cuts)
