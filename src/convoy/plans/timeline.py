"""An update as a timeline: what ran on which stream of which rank, when, and after what.

A predicted update (`convoy.planner.cost.simulation`) and a measured one (`convoy.engine.watched`) are the same
`Timeline`, so that "predicted beside measured" is two of them side by side.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Literal

Stream = Literal["compute", "transfers", "gradients", "stages"]
"""`transfers` carries what layers wait for, `gradients` what is added while others compute, `stages` what a rank sends
to other stages, as it is predicted, and waits for from them, as it is measured."""

Kind = Literal["around", "forward", "backward", "copy", "transfer", "gradient", "update"]
"""What a task is for. `around`: input and loss, outside of the network. `copy`: packing and adding on the rank itself,
for the sake of what is sent. `transfer` and `gradient` are messages."""


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work. The tasks of a stream run in the order of the list that they stand in.

    Attributes:
        rank: the rank that does it.
        layer: its layer, empty where it belongs to none.
        name: the name of the call, the value or the parameter.
        seconds: the time it takes while nothing is in its way.
        host: the time that the host takes to issue it; 0 where the host is the device.
        after: places in the list of the tasks that must be done before it begins.
        meeting: tasks of several ranks with one number are one collective: they begin when all ranks are there, and
            end together. -1 for what a rank does by itself.
        cpu_share: the part of the rank's computing that it takes while it runs.
        num_bytes: size of the tensor, for messages.
        peer: the rank of another stage to which a message goes, which takes part in nothing else of it; else -1.
    """

    rank: int
    stream: Stream
    kind: Kind
    layer: str
    name: str
    seconds: float
    after: tuple[int, ...] = ()
    meeting: int = -1
    cpu_share: float = 0.0
    num_bytes: int = 0
    host: float = 0.0
    peer: int = -1


@dataclass(frozen=True, slots=True)
class Span:
    """When a task ran.

    Attributes:
        ready: when its rank's device was free for it: from here on it waits for other ranks, or for the host.
    """

    task: Task
    ready: float
    start: float
    end: float


PARTS = ("input", "forward", "backward", "rest", "packing", "waiting", "stages", "optimizer")
"""Of an update: `rest` is the loss and all that has no other name, `waiting` what is sent and waited for. Where there
are stages, `stages` is waiting for the others."""
_ROUNDING = 1e-12
_PART_OF: dict[Kind, str] = {"forward": "forward", "backward": "backward", "copy": "packing", "update": "optimizer"}


@dataclass(frozen=True)
class LayerSeconds:
    """A layer in an update.

    Attributes:
        computes: forward, backward and packing.
        waits: exchanging what layers need of others, and waiting for it.
    """

    computes: float = 0.0
    waits: float = 0.0

    def __add__(self, other: "LayerSeconds") -> "LayerSeconds":
        return LayerSeconds(self.computes + other.computes, self.waits + other.waits)


@dataclass(frozen=True)
class Summary:
    """Where the time of one rank goes in an update.

    Attributes:
        parts: seconds by name, as `PARTS` has them, `stages` only where there are any; they add up to the update.
        layers: by name.
        gradients: seconds in which only gradients, weights and statistics were exchanged.
    """

    parts: Mapping[str, float]
    layers: Mapping[str, LayerSeconds]
    gradients: float

    @staticmethod
    def median(of: Sequence["Summary"]) -> "Summary":
        """The median of every number; of nothing, no time."""
        names = dict.fromkeys(name for one in of for name in one.layers)
        layers = {name: [one.layers.get(name, LayerSeconds()) for one in of] for name in names}
        parts = [part for part in PARTS if not of or part in of[0].parts]
        return Summary(
            {part: median([one.parts[part] for one in of] or [0.0]) for part in parts},
            {
                name: LayerSeconds(median(one.computes for one in each), median(one.waits for one in each))
                for name, each in layers.items()
            },
            median([one.gradients for one in of] or [0.0]),
        )


@dataclass(frozen=True)
class Timeline:
    """An update, in seconds from its beginning.

    Attributes:
        spans: one for each task, in their order.

    Two seconds of computing, and a message of one second that waits for half of it:

    >>> conv = Task(0, "compute", "forward", "conv", "conv", 2.0)
    >>> gradient = Task(0, "gradients", "gradient", "conv", "conv.weight", 1.0, after=(0,))
    >>> timeline = Timeline((Span(conv, 0.0, 0.0, 2.0), Span(gradient, 2.0, 2.5, 3.5)))
    >>> timeline.total
    3.5
    >>> parts = timeline.summary().parts
    >>> parts["forward"], parts["waiting"]
    (2.0, 1.5)
    """

    spans: tuple[Span, ...]

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that were simulated, one of each sort."""
        return tuple(sorted({span.task.rank for span in self.spans}))

    @cached_property
    def busiest(self) -> int:
        """The rank that computes longest."""
        return self.busiest_of(self.ranks)

    def busiest_of(self, ranks: Collection[int]) -> int:
        """The one of these ranks that computes longest; 0 where none of them was simulated."""
        busy: dict[int, float] = defaultdict(float)
        for span in self.spans:
            if span.task.rank in ranks:
                busy[span.task.rank] += span.task.seconds if span.task.stream == "compute" else 0.0
        return max(busy, key=lambda rank: (busy[rank], -rank), default=0)

    def exposed(self, rank: int | None = None) -> dict[str, float]:
        """Seconds in which a rank has nothing to compute because it exchanges or waits for others, by layer.

        Args:
            rank: by default the busiest.
        """
        found: dict[str, float] = defaultdict(float)
        for span, seconds in self.exposed_spans(rank):
            found[span.task.layer] += seconds
        return dict(found)

    def exposed_spans(self, rank: int | None = None) -> list[tuple[Span, float]]:
        """The same for every message that keeps the rank waiting."""
        rank = self.busiest if rank is None else rank
        own = [span for span in self.spans if span.task.rank == rank]
        busy = sorted((span.ready, span.end) for span in own if span.task.stream == "compute")
        messages = [span for span in own if span.task.stream not in ("compute", "stages")]  # nobody waits for his own
        messages.sort(key=lambda span: span.end)
        found = []
        here = 0.0
        for start, end in [*busy, (self.total, self.total)]:
            for span in messages if start > here else ():
                left, right = max(here, span.ready), min(span.end, start)
                if right > left:
                    found.append((span, right - left))
                    here = right
            here = max(here, end)
        return found

    def by_kind(self, rank: int | None = None) -> dict[str, float]:
        """Where a rank's time goes: seconds of every kind of computing, `exposed` communication, and `idle`.

        The seconds add up to the total; computing is as long as it took, slowed down by messages where it was. Where
        the device waits for the host there is `issuing` too. `idle` is waiting for other stages, where there are any.
        """
        rank = self.busiest if rank is None else rank
        found: dict[str, float] = defaultdict(float)
        for span in self.spans:
            if span.task.rank == rank and span.task.stream == "compute":
                found[span.task.kind] += span.end - span.start
                if span.start > span.ready:
                    found["issuing"] += span.start - span.ready
        found["exposed"] = sum(self.exposed(rank).values())
        found["idle"] = max(0.0, self.total - sum(found.values()))
        return dict(found)

    def summary(self, rank: int | None = None) -> Summary:
        """Where a rank's time goes, by part of the update and by layer."""
        rank = self.busiest if rank is None else rank
        in_stages = any(span.task.stream == "stages" for span in self.spans)
        parts = {part: 0.0 for part in PARTS if in_stages or part != "stages"}
        layers: dict[str, LayerSeconds] = defaultdict(LayerSeconds)
        for span in self.spans:
            task, seconds = span.task, span.end - span.ready  # with what it waits for the host, as events measure it
            if task.rank != rank or task.stream != "compute":
                continue
            parts[_PART_OF.get(task.kind, "input" if task.name == "input" else "rest")] += seconds
            if task.kind in ("forward", "backward", "copy"):
                layers[task.layer] += LayerSeconds(computes=seconds)
        gradients = 0.0
        for span, seconds in self.exposed_spans(rank):
            if span.task.kind == "gradient":
                gradients += seconds
            else:
                layers[span.task.layer] += LayerSeconds(waits=seconds)
        kinds = self.by_kind(rank)
        parts["waiting"] = kinds["exposed"]
        parts["stages" if in_stages else "waiting"] += kinds["idle"]
        for part in ("waiting", "stages"):
            if parts.get(part, 1.0) <= _ROUNDING * self.total:
                parts[part] = 0.0
        return Summary(parts, dict(layers), gradients)

    def contention(self, rank: int | None = None) -> float:
        """Seconds by which messages have made a rank's computing longer."""
        rank = self.busiest if rank is None else rank
        own = (span for span in self.spans if span.task.rank == rank and span.task.stream == "compute")
        return sum(span.end - span.start - span.task.seconds for span in own)


ENGINE = "the engine itself"


def is_engine(task: Task) -> bool:
    """Whether it is what `split_engine_time` has made of the engine's time."""
    return task.kind == "around" and task.name == ENGINE


def split_engine_time(timeline: Timeline, fixed: float) -> Timeline:
    """The same timeline, where what an update takes beside the optimizer's work has a span of its own.

    Args:
        fixed: seconds once in an update: `convoy.planner.cost.gradients.Update.fixed`.
    """
    if fixed <= 0:
        return timeline
    spans: list[Span] = []
    engines: list[Span] = []  # at the end, so that the places of all other tasks stay as they are
    for span in timeline.spans:
        if span.task.kind != "update":
            spans.append(span)
            continue
        optimizer, engine = _divided(span, fixed)
        spans.append(optimizer)
        engines.append(engine)
    return Timeline((*spans, *engines))


def _divided(span: Span, fixed: float) -> tuple[Span, Span]:
    task = span.task
    own = min(fixed, task.seconds)
    middle = span.end - (span.end - span.start) * own / task.seconds
    return (
        replace(span, task=replace(task, seconds=task.seconds - own), end=middle),
        Span(replace(task, kind="around", name=ENGINE, seconds=own), middle, middle, span.end),
    )
