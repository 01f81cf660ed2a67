"""A plan's explanation for people: a table of the layers, and what the plan costs in all."""

from collections.abc import Iterable, Sequence

from convoy.plans.explanation import Explanation, Row, explanation
from convoy.plans.place import COMPUTE, Placement
from convoy.plans.plan import Plan

_NUMBERS = ("forward", "backward", "gradients", "parameters")
_HEADERS = ("layer", "work", "strategy", "gives", "sent for its input", *_NUMBERS)


def explain(placement: Placement, plan: Plan | None = None, capture: str = "") -> str:
    """A table of the layers of a plan, and what it costs in all.

    Args:
        placement: the network on the mesh.
        plan: for its name, and to say which layers no pattern matches.
        capture: how the network was captured, in a few words.
    """
    return "\n".join(_lines(explanation(placement, plan), placement, plan, capture)) + "\n"


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


def _lines(found: Explanation, placement: Placement, plan: Plan | None, capture: str) -> Iterable[str]:
    yield f"plan {plan}" if plan is not None else f"mesh {placement.mesh}"
    yield _setting(placement, capture)
    yield ""
    rows = [*found.rows, *([found.output] if found.output else [])]
    yield from table(_HEADERS, [_cells(row) for row in rows], _NUMBERS)
    yield ""
    if found.others:
        follow = "1 other call follows" if found.others == 1 else f"{found.others} other calls follow"
        yield f"{follow} the layout given, without sending anything"
    for note in dict.fromkeys(row.note for row in found.rows if row.note):
        yield f"{note}: {_listed([row.layer for row in found.rows if row.note == note])}"
    if found.unmatched:
        yield f"replicated, as no pattern matches them: {_listed(found.unmatched)}"
    yield from _totals(found)


def _listed(layers: Sequence[str]) -> str:
    names = [layer or "the network itself" for layer in dict.fromkeys(layers)]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def _setting(placement: Placement, capture: str) -> str:
    parts = [len(part) for part in placement.batch.parts]
    shares = f" ({' + '.join(map(str, parts))})" if len(parts) > 1 else ""
    num_devices = placement.mesh.num_devices
    return ", ".join(
        [
            "training" if placement.graph.training else "evaluation",
            f"{placement.batch.num_samples} samples{shares}",
            f"{num_devices} {'rank' if num_devices == 1 else 'ranks'}",
            *([f"captured by {capture}"] if capture else []),
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
