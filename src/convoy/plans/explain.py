"""A plan's explanation for people: a table of the layers, and what the plan costs in all."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from convoy.plans.explanation import Explanation, Row, explanation
from convoy.plans.place import COMPUTE, Placement
from convoy.plans.plan import Plan

_NUMBERS = ("forward", "backward", "gradients", "parameters")
_HEADERS = ("layer", "work", "strategy", "gives", "sent for its input", *_NUMBERS)


@dataclass(frozen=True)
class Setting:
    """For what an explanation holds.

    Attributes:
        training: the mode.
        parts: samples of every sample rank.
        capture: how the network was captured, in a few words: `as one program`.
    """

    training: bool
    parts: tuple[int, ...]
    num_devices: int
    capture: str = ""


def explain(placement: Placement, plan: Plan | None = None, capture: str = "") -> str:
    """A table of the layers of a plan, and what it costs in all.

    Args:
        placement: the network on the mesh.
        plan: for its name, and to say which layers no pattern matches.
        capture: how the network was captured, in a few words.
    """
    parts = tuple(map(len, placement.batch.parts))
    setting = Setting(placement.graph.training, parts, placement.mesh.num_devices, capture)
    notes = []
    if placement.graph.recomputed and setting.num_devices > 1:
        layers = listed(placement.graph.recomputed)
        notes.append(f"activation checkpointing has no effect on several devices: {layers}")
    name = f"plan {plan}" if plan is not None else f"mesh {placement.mesh}"
    return text_of(explanation(placement, plan), setting, name, notes)


def text_of(found: Explanation, setting: Setting, name: str, notes: Iterable[str] = ()) -> str:
    """An explanation as text.

    Args:
        found: the numbers.
        setting: for what they hold.
        name: the first line.
        notes: lines about layers that the plan does not divide.
    """
    return "\n".join(_lines(found, setting, name, notes)) + "\n"


def size(num_bytes: int) -> str:
    """A number of bytes for people: `1.5 MB`, or `-` for none."""
    if not num_bytes:
        return "-"
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        number = num_bytes / factor
        if number >= 0.9995:
            return f"{number:.0f} {unit}" if number >= 99.95 else f"{number:.3g} {unit}"
    return f"{num_bytes} B"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> list[str]:
    """Lines of a table whose columns are as wide as they must be.

    Args:
        headers: of the columns.
        rows: the cells.
        right: headers of the columns that are set flush right.
    """
    lines = [headers, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return [
        "  ".join(
            cell.rjust(width) if header in right else cell.ljust(width)
            for header, cell, width in zip(headers, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]


def _lines(found: Explanation, setting: Setting, name: str, notes: Iterable[str]) -> Iterable[str]:
    yield name
    yield _setting(setting)
    yield ""
    rows = [*found.rows, *([found.output] if found.output else [])]
    yield from table(_HEADERS, [_cells(row) for row in rows], _NUMBERS)
    yield ""
    if found.others:
        follow = "1 other call follows" if found.others == 1 else f"{found.others} other calls follow"
        yield f"{follow} the layout given, without sending anything"
    yield from notes
    for note in dict.fromkeys(row.note for row in found.rows if row.note):
        yield f"{note}: {listed([row.layer for row in found.rows if row.note == note])}"
    if found.unmatched:
        yield f"replicated, as no pattern matches them: {listed(found.unmatched)}"
    yield from _totals(found)


def listed(layers: Sequence[str]) -> str:
    """Names of layers in a sentence, the first eight of them."""
    names = [layer or "the network itself" for layer in dict.fromkeys(layers)]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def _setting(setting: Setting) -> str:
    shares = f" ({' + '.join(map(str, setting.parts))})" if len(setting.parts) > 1 else ""
    return ", ".join(
        [
            "training" if setting.training else "evaluation",
            f"{sum(setting.parts)} samples{shares}",
            f"{setting.num_devices} {'rank' if setting.num_devices == 1 else 'ranks'}",
            *([f"captured {setting.capture}"] if setting.capture else []),
        ]
    )


def _totals(found: Explanation) -> Iterable[str]:
    traffic, memory = found.traffic, found.memory
    parts = [
        (traffic.forward, "in the forward pass"),
        (traffic.backward, "in the backward pass"),
        (found.gradients, "for gradients of parameters"),
    ]
    sent = ", ".join(f"{size(number)} {words}" for number, words in parts if number)
    yield f"a rank sends {sent or 'nothing'}"
    share = f" of {size(found.whole)}" if found.whole != memory.parameters else ""
    held = [f"{size(memory.parameters)}{share} of parameters"]
    held += [f"{size(memory.gradients)} of gradients"] if memory.gradients else []
    held += [f"{size(memory.activations)} of activations kept for the backward pass"] if memory.activations else []
    yield f"a rank holds {', '.join(held)}"


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
