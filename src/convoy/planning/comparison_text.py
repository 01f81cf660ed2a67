"""What was predicted of a run beside what was measured, for a terminal."""

from collections.abc import Iterator

from convoy.planning.comparison import Both, Comparison
from convoy.planning.words import seconds
from convoy.plans.explain import table

WORDS = {
    "input": "input",
    "forward": "forward",
    "backward": "backward",
    "rest": "loss and all else",
    "packing": "packing for messages",
    "waiting": "exposed communication",
    "optimiser": "optimiser",
}
"""The parts of an update for people."""
_ALIKE = 0.02


def comparison_text(found: Comparison) -> str:
    """The whole update, its parts and its layers, as aligned tables; no more than sentences where there is little."""
    return "\n".join(_lines(found))


def headline(found: Comparison) -> str:
    """The whole update in a sentence; empty where it was not measured."""
    predicted, measured = found.update.predicted_s, found.update.measured_s
    if measured is None:
        return ""
    said = f"an update took {seconds(measured)}, the median of {found.timed}"
    if found.error is None or predicted is None:
        return said
    return f"{said}; {seconds(predicted)} were predicted ({difference(found.error)})"


def difference(error: float) -> str:
    """By how much a prediction is off: `+3.2 %`."""
    return f"{100 * error:+.1f} %" if abs(error) < 0.0995 else f"{100 * error:+.0f} %"


def apart(parts_s: float, update_s: float | None) -> str:
    """Why the parts of an update add up to another time than an update takes; empty where they do not."""
    if update_s is None or abs(parts_s / update_s - 1) < _ALIKE:
        return ""
    return ", as watching takes time too" if parts_s > update_s else ", as no two updates are alike"


def shown(number: float | None) -> str:
    """Seconds, empty where there are none."""
    return "" if number is None else seconds(number)


def _lines(found: Comparison) -> Iterator[str]:
    said = headline(found)
    if said:
        yield said
    if found.watched:
        has_both = found.update.predicted_s is not None
        names = ("predicted", "measured") if has_both else ("measured",)
        rows = [(WORDS[name], *_cells(both, has_both)) for name, both in found.parts.items() if _counts(both)]
        yield from table(("time", *names), rows, names)
        total = sum(both.measured_s or 0.0 for both in found.parts.values())
        others = "1 other update" if found.watched == 1 else f"{found.watched} other updates"
        why = apart(total, found.update.measured_s)
        yield f"measured: each part the median of {others}; they add up to {seconds(total)}{why}"
        if found.groups:
            yield ""
            waits = ("waits: predicted", "measured") if has_both else ("waits",)
            computes = ("computes: predicted", "measured") if has_both else ("computes",)
            groups = [(one.name, *_cells(one.computes, has_both), *_cells(one.waits, has_both)) for one in found.groups]
            yield from table(("layer", *computes, *waits), groups, (*computes, *waits))
    yield from found.notes


def _cells(both: Both, has_both: bool) -> tuple[str, ...]:
    return (shown(both.predicted_s), shown(both.measured_s)) if has_both else (shown(both.measured_s),)


def _counts(both: Both) -> bool:
    return bool(both.predicted_s or both.measured_s)
