"""The engine's own time in a predicted update, apart from the optimiser's."""

from dataclasses import replace

from convoy.cost.task import Task
from convoy.cost.timeline import Span, Timeline

ENGINE = "the engine itself"


def is_engine(task: Task) -> bool:
    """Whether it is what `apart` has made of the engine's time."""
    return task.kind == "around" and task.name == ENGINE


def apart(timeline: Timeline, fixed: float) -> Timeline:
    """The same timeline, where what an update takes beside the optimiser's work has a span of its own.

    Args:
        fixed: seconds once in an update: `convoy.cost.update.Update.fixed`.
    """
    if fixed <= 0:
        return timeline
    spans: list[Span] = []
    engines: list[Span] = []  # at the end, so that the places of all other tasks stay as they are
    for span in timeline.spans:
        if span.task.kind != "update":
            spans.append(span)
            continue
        optimiser, engine = _divided(span, fixed)
        spans.append(optimiser)
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
