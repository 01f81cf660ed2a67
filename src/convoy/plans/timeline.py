"""An update as a timeline: what ran on which stream of which rank, when, and after what.

A predicted update (`convoy.planner.cost.simulation`) and a measured one (`convoy.engine.watched`) are the same
`Timeline`, so that "predicted beside measured" is two of them side by side, summarized by the same method. What a run
compares are medians over its watched updates, part by part: no two updates are alike.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, Literal, get_args

# `transfers` carries what layers wait for, `gradients` what is added while layers compute, `stages` what a rank sends
# to other stages, as it is predicted, and waits for from them, as it is measured
Stream = Literal["compute", "transfers", "gradients", "stages"]

# The purpose of a task. `around`: input and loss, outside of the network. `copy`: packing and adding on the rank
# itself, for the sake of messages. `transfer` and `gradient` are messages.
Kind = Literal["around", "forward", "backward", "copy", "transfer", "gradient", "update"]


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work. The tasks of a stream run in the order of the list that they stand in."""

    rank: int
    stream: Stream
    kind: Kind
    layer: str  # empty where it belongs to none
    name: str  # of the call, the value or the parameter
    seconds: float  # while nothing is in its way
    after: tuple[int, ...] = ()  # places in the list of the tasks that must be done before it begins
    # tasks of several ranks with one number are one collective: they begin when all ranks are there, and end together;
    # -1 for work of one rank alone
    meeting: int = -1
    cpu_share: float = 0.0  # the part of the rank's computing that it takes while it runs
    num_bytes: int = 0  # of the tensor, for messages
    host: float = 0.0  # seconds that the host takes to issue it; 0 where the host is the device
    peer: int = -1  # the rank of another stage to which a message goes, which takes part in nothing else of it; else -1


@dataclass(frozen=True, slots=True)
class Span:
    """When a task ran."""

    task: Task
    ready: float  # when its rank's device was free for it: from here on it waits for other ranks, or for the host
    start: float
    end: float


# Parts of an update: `rest` is the loss and all that has no other name, `waiting` what is sent and waited for. Where
# there are stages, `stages` is waiting for other stages.
PARTS = ("input", "forward", "backward", "rest", "packing", "waiting", "stages", "optimizer")
ENGINE = "the engine itself"  # the task `around` an update that is its time beside the optimizer's work, once
_ROUNDING = 1e-12
_PART_OF: dict[Kind, str] = {"forward": "forward", "backward": "backward", "copy": "packing", "update": "optimizer"}


@dataclass(frozen=True)
class LayerSeconds:
    """The time of a layer in an update."""

    computes: float = 0.0  # forward, backward and packing
    waits: float = 0.0  # exchanging what layers need of other ranks, and waiting for it

    def __add__(self, other: "LayerSeconds") -> "LayerSeconds":
        return LayerSeconds(self.computes + other.computes, self.waits + other.waits)


@dataclass(frozen=True)
class Summary:
    """Where the time of one rank goes in an update."""

    # seconds by name, as in `PARTS`, `stages` only where there are any; they add up to the update
    parts: Mapping[str, float]
    layers: Mapping[str, LayerSeconds]  # by name
    gradients: float  # seconds in which only gradients, weights and statistics were exchanged

    @staticmethod
    def median(of: Sequence["Summary"]) -> "Summary":
        """The median of every number of at least one summary."""
        layers = {
            name: [summary.layers.get(name, LayerSeconds()) for summary in of]
            for name in dict.fromkeys(name for summary in of for name in summary.layers)
        }
        return Summary(
            {part: median(summary.parts[part] for summary in of) for part in of[0].parts},
            {
                name: LayerSeconds(median(layer.computes for layer in times), median(layer.waits for layer in times))
                for name, times in layers.items()
            },
            median(summary.gradients for summary in of),
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

    @cached_property
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
        seconds_of: dict[int, float] = defaultdict(float)
        for span in self.spans:
            if span.task.rank in ranks:
                seconds_of[span.task.rank] += span.task.seconds if span.task.stream == "compute" else 0.0
        return max(seconds_of, key=lambda rank: (seconds_of[rank], -rank), default=0)

    def _of(self, rank: int | None) -> tuple[list[Span], list[Span]]:
        """What a rank, by default the busiest, computes, and the messages that it may wait for: nobody waits for what
        he sends to another stage."""
        rank = self.busiest if rank is None else rank
        spans = [span for span in self.spans if span.task.rank == rank and span.task.stream != "stages"]
        computing = [span for span in spans if span.task.stream == "compute"]
        return computing, [span for span in spans if span.task.stream != "compute"]

    def exposed(self, rank: int | None = None) -> dict[str, float]:
        """Seconds in which a rank, by default the busiest, has nothing to compute because it exchanges or waits for
        others, by layer."""
        seconds_by_layer: dict[str, float] = defaultdict(float)
        for span, seconds in self.exposed_spans(rank):
            seconds_by_layer[span.task.layer] += seconds
        return dict(seconds_by_layer)

    def exposed_spans(self, rank: int | None = None) -> list[tuple[Span, float]]:
        """The same for every message that keeps the rank waiting."""
        computing, messages = self._of(rank)
        messages.sort(key=lambda span: span.end)
        exposed, reached = [], 0.0
        for start, end in [*sorted((span.ready, span.end) for span in computing), (self.total, self.total)]:
            for span in messages if start > reached else ():
                begin, stop = max(reached, span.ready), min(span.end, start)
                if stop > begin:
                    exposed.append((span, stop - begin))
                    reached = stop
            reached = max(reached, end)
        return exposed

    def by_kind(self, rank: int | None = None) -> dict[str, float]:
        """Where a rank's time goes: seconds of every kind of computing, of `around` apart `input` and `engine`,
        `exposed` communication, and `idle`.

        The seconds add up to the total; computing is as long as it took, slowed down by messages where it was. Where
        the device waits for the host there is `issuing` too. `idle` is waiting for other stages, where there are any.
        """
        by_kind: dict[str, float] = defaultdict(float)
        for span in self._of(rank)[0]:
            task = span.task
            kind = {"input": "input", ENGINE: "engine"}.get(task.name, "around") if task.kind == "around" else task.kind
            by_kind[kind] += span.end - span.start
            if span.start > span.ready:
                by_kind["issuing"] += span.start - span.ready
        by_kind["exposed"] = sum(self.exposed(rank).values())
        by_kind["idle"] = max(0.0, self.total - sum(by_kind.values()))
        return dict(by_kind)

    def summary(self, rank: int | None = None) -> Summary:
        """Where a rank's time goes, by part of the update and by layer."""
        in_stages = any(span.task.stream == "stages" for span in self.spans)
        parts = {part: 0.0 for part in PARTS if in_stages or part != "stages"}
        layers: dict[str, LayerSeconds] = defaultdict(LayerSeconds)
        for span in self._of(rank)[0]:
            task, seconds = span.task, span.end - span.ready  # with what it waits for the host, as events measure it
            parts[_PART_OF.get(task.kind, "input" if task.name == "input" else "rest")] += seconds
            if task.kind in ("forward", "backward", "copy"):
                layers[task.layer] += LayerSeconds(computes=seconds)
        gradients = 0.0
        for span, seconds in self.exposed_spans(rank):
            parts["waiting"] += seconds
            if span.task.kind == "gradient":
                gradients += seconds
            else:
                layers[span.task.layer] += LayerSeconds(waits=seconds)
        parts["stages" if in_stages else "waiting"] += max(0.0, self.total - sum(parts.values()))
        for part in {"waiting", "stages"} & parts.keys():
            parts[part] = parts[part] if parts[part] > _ROUNDING * self.total else 0.0
        return Summary(parts, dict(layers), gradients)

    def contention(self) -> float:
        """Seconds by which messages have made the busiest rank's computing longer."""
        return sum(span.end - span.start - span.task.seconds for span in self._of(None)[0])


def trace(**sources: Timeline) -> dict[str, Any]:
    """The trace of one or several steps as JSON has it, by where they come from: `predicted=…, measured=…`. Each rank
    of each is a process, and the processes of a rank stand below each other."""
    events: list[dict[str, Any]] = []
    for number, (source, timeline) in enumerate(sources.items()):
        pairs = {(span.task.rank, span.task.stream) for span in timeline.spans}
        streams = [stream for stream in get_args(Stream) if any(stream == other for _, other in pairs)]
        threads = {stream: place for place, stream in enumerate(streams, 1)}
        # viewers treat process 0 as the kernel's
        processes = {rank: 1 + rank * len(sources) + number for rank in sorted({rank for rank, _ in pairs})}
        for rank, process in processes.items():
            names: list[tuple[str, int, dict[str, Any]]] = [
                ("process_name", 0, {"name": f"{source} rank {rank}"}),
                ("process_sort_index", 0, {"sort_index": process}),
            ]
            for stream in (stream for stream in streams if (rank, stream) in pairs):
                names.append(("thread_name", threads[stream], {"name": stream}))
                names.append(("thread_sort_index", threads[stream], {"sort_index": threads[stream]}))
            events += [
                {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": arguments}
                for what, thread, arguments in names
            ]
        for span in timeline.spans:
            task = span.task
            # in whole nanoseconds, as viewers count, so that events that follow each other do not overlap
            start, end = round(span.start * 1e9), round(span.end * 1e9)
            arguments = {"layer": task.layer, "kind": task.kind} | ({"bytes": task.num_bytes} if task.num_bytes else {})
            event: dict[str, Any] = {"ph": "X", "name": task.name or task.layer or task.kind, "cat": task.kind}
            event |= {"pid": processes[task.rank], "tid": threads[task.stream]}
            event |= {"ts": start / 1e3, "dur": (end - start) / 1e3, "args": arguments}
            events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
