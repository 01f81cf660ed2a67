"""Steps as Chrome traces, which https://ui.perfetto.dev opens: predicted and measured ones side by side.

The format is Google's "Trace Event Format": complete events (`X`) in microseconds, a process for each rank, a thread
for each stream, and metadata events (`M`) with their names.
"""

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from convoy.plans.timeline import Span, Stream, Timeline

_THREADS = get_args(Stream)
_COLORS = {
    "forward": "thread_state_running",
    "backward": "thread_state_runnable",
    "transfer": "terrible",
    "gradient": "bad",
    "copy": "yellow",
    "update": "good",
    "around": "grey",
}


def trace(**sources: Timeline) -> dict[str, Any]:
    """The trace of one or several steps as JSON has it, by where they come from: `predicted=…, measured=…`. Each rank
    of each is a process, and the processes of a rank stand below each other."""
    events: list[dict[str, Any]] = []
    for number, (source, timeline) in enumerate(sources.items()):
        events += _of_source(source, number, len(sources), timeline.spans)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _of_source(source: str, number: int, count: int, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    streams = sorted({span.task.stream for span in spans}, key=lambda name: (*_place(name), name))
    threads = {stream: place for place, stream in enumerate(streams, 1)}

    def process_of(rank: int) -> int:
        return 1 + rank * count + number  # viewers treat process 0 as the kernel's

    for rank in sorted({span.task.rank for span in spans}):
        process = process_of(rank)
        yield _named("process_name", process, 0, name=f"{source} rank {rank}")
        yield _named("process_sort_index", process, 0, sort_index=process)
        for stream in sorted({span.task.stream for span in spans if span.task.rank == rank}, key=threads.__getitem__):
            yield _named("thread_name", process, threads[stream], name=stream)
            yield _named("thread_sort_index", process, threads[stream], sort_index=threads[stream])
    for span in spans:
        task = span.task
        # in whole nanoseconds, as viewers count, so that events that follow each other do not overlap
        start, end = round(span.start * 1e9), round(span.end * 1e9)
        arguments: dict[str, Any] = {"layer": task.layer, "kind": task.kind}
        if task.num_bytes:
            arguments["bytes"] = task.num_bytes
        event = {
            "ph": "X",
            "name": task.name or task.layer or task.kind,
            "cat": task.kind,
            "pid": process_of(task.rank),
            "tid": threads[task.stream],
            "ts": start / 1e3,
            "dur": (end - start) / 1e3,
            "args": arguments,
        }
        if task.kind in _COLORS:
            event["cname"] = _COLORS[task.kind]
        yield event


def _named(what: str, process: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": arguments}


def _place(stream: str) -> tuple[int]:
    return (_THREADS.index(stream) if stream in _THREADS else len(_THREADS),)
