"""Steps as Chrome traces, which https://ui.perfetto.dev opens: predicted and measured ones side by side.

The format is Google's "Trace Event Format": complete events (`X`) in microseconds, a process for each rank, a thread
for each stream, and metadata events (`M`) with their names.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convoy.planner.cost.timeline import Timeline

_THREADS = ("compute", "transfers", "gradients")
_COLORS = {
    "forward": "thread_state_running",
    "backward": "thread_state_runnable",
    "transfer": "terrible",
    "gradient": "bad",
    "copy": "yellow",
    "update": "good",
    "around": "grey",
}


@dataclass(frozen=True)
class Event:
    """Something that ran, predicted or measured.

    Attributes:
        stream: on which it ran, any name.
        start: seconds from the beginning of the step.
    """

    rank: int
    stream: str
    kind: str
    layer: str
    name: str
    start: float
    seconds: float
    num_bytes: int = 0


def events(timeline: Timeline) -> list[Event]:
    """What a predicted step consists of."""
    return [
        Event(
            span.task.rank,
            span.task.stream,
            span.task.kind,
            span.task.layer,
            span.task.name,
            span.start,
            span.end - span.start,
            span.task.num_bytes,
        )
        for span in timeline.spans
    ]


def trace(**sources: Iterable[Event]) -> dict[str, Any]:
    """The trace of one or several steps as JSON has it.

    Args:
        sources: events by where they come from, as `predicted=events(timeline), measured=…`; each rank of each is a
            process, and the processes of a rank stand below each other.
    """
    given = {name: list(found) for name, found in sources.items()}
    found: list[dict[str, Any]] = []
    for number, (source, its) in enumerate(given.items()):
        found += _of_source(source, number, len(given), its)
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def write_trace(path: Path, **sources: Iterable[Event]) -> None:
    """Write such a trace into a file that Perfetto and chrome://tracing open."""
    path.write_text(json.dumps(trace(**sources), allow_nan=False), encoding="utf-8")


def _of_source(source: str, number: int, count: int, its: list[Event]) -> Iterator[dict[str, Any]]:
    streams = sorted({event.stream for event in its}, key=lambda name: (*_place(name), name))
    threads = {stream: place for place, stream in enumerate(streams, 1)}

    def process_of(rank: int) -> int:
        return 1 + rank * count + number  # viewers treat process 0 as the kernel's

    for rank in sorted({event.rank for event in its}):
        process = process_of(rank)
        yield _named("process_name", process, 0, name=f"{source} rank {rank}")
        yield _named("process_sort_index", process, 0, sort_index=process)
        for stream in sorted({event.stream for event in its if event.rank == rank}, key=threads.__getitem__):
            yield _named("thread_name", process, threads[stream], name=stream)
            yield _named("thread_sort_index", process, threads[stream], sort_index=threads[stream])
    for event in its:
        # in whole nanoseconds, as viewers count, so that events that follow each other do not overlap
        start, end = round(event.start * 1e9), round((event.start + event.seconds) * 1e9)
        arguments: dict[str, Any] = {"layer": event.layer, "kind": event.kind}
        if event.num_bytes:
            arguments["bytes"] = event.num_bytes
        found = {
            "ph": "X",
            "name": event.name or event.layer or event.kind,
            "cat": event.kind,
            "pid": process_of(event.rank),
            "tid": threads[event.stream],
            "ts": start / 1e3,
            "dur": (end - start) / 1e3,
            "args": arguments,
        }
        if event.kind in _COLORS:
            found["cname"] = _COLORS[event.kind]
        yield found


def _named(what: str, process: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": arguments}


def _place(stream: str) -> tuple[int]:
    return (_THREADS.index(stream) if stream in _THREADS else len(_THREADS),)
