"""The table of a study: for a terminal, as CSV with plain numbers, and as LaTeX for a paper."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from convoy.experiments import formats
from convoy.experiments.scaling.results.results import Results, Row
from convoy.experiments.scaling.study.configuration import short
from convoy.experiments.scaling.visits.parts import COMMUNICATION, COMPUTE, INPUT, OPTIMIZER
from convoy.planning.words import seconds as time_of
from convoy.plans.explain import size
from convoy.printable import printable

_LATEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}
NUMBERS = (
    "devices",
    "step",
    "images/s",
    "speed-up",
    "efficiency",
    "days",
    "exposed",
    "data wait",
    "memory",
    "predicted",
)
"""Columns that are aligned to the right."""


def records(found: Results) -> list[dict[str, Any]]:
    """The rows with plain numbers: seconds, bytes, and parts of one."""
    return [_record(row) for row in found.rows]


def _record(row: Row) -> dict[str, Any]:
    return {
        "configuration": row.label,
        "kind": row.kind,
        "devices": row.devices,
        "plan": row.plan,
        "batch": row.batch,
        "step_s": row.seconds,
        "spread_s": row.spread,
        "images_per_s": row.images_per_s,
        "speedup": row.speedup,
        "speedup_spread": row.speedup_spread,
        "efficiency": row.efficiency,
        "days": row.days,
        "compute_s": row.parts[COMPUTE],
        "exposed_communication_s": row.parts[COMMUNICATION],
        "data_wait_s": row.parts[INPUT],
        "optimizer_s": row.parts[OPTIMIZER],
        "memory_bytes": row.memory,
        "predicted_s": row.predicted,
        "prediction_error": row.error,
        "predicted_memory_bytes": row.predicted_memory,
        "rounds": row.rounds,
        "overhead_s": row.overhead,
    }


def lines(found: Results) -> list[dict[str, str]]:
    """The rows for people, in few characters."""
    return [_line(row) for row in found.rows]


def _line(row: Row) -> dict[str, str]:
    return {
        "configuration": plan_label(row),
        "devices": str(row.devices),
        "step": plus_minus(row.seconds, row.spread),
        "images/s": formats.significant(row.images_per_s),
        "speed-up": _ratio(row.speedup, row.speedup_spread),
        "efficiency": formats.percent(row.efficiency, 0),
        **({} if row.days is None else {"days": formats.significant(row.days)}),
        "exposed": time_of(row.parts[COMMUNICATION]),
        "data wait": time_of(row.parts[INPUT]),
        "memory": size(row.memory),
        "predicted": "–" if row.predicted is None else f"{time_of(row.predicted)} ({signed(row.error)})",
    }


def plan_label(row: Row) -> str:
    """The row with the plan that the planner took for it."""
    label = short(row.label)
    return (
        f"{label}: {short(row.plan)}" if row.plan and row.label.startswith("auto") and "\n" not in row.plan else label
    )


def plus_minus(seconds: float, spread: float | None) -> str:
    """A time with its spread in the same unit: `12.3 ± 0.4 ms`."""
    text = time_of(seconds)
    if spread is None:
        return text
    number, _, unit = text.partition(" ")
    scale = {"s": 1.0, "ms": 1e3, "µs": 1e6, "min": 1 / 60}.get(unit)
    if scale is None:
        return f"{text} ± {time_of(spread)}"
    places = len(number.partition(".")[2])
    return f"{number} ± {spread * scale:.{places}f} {unit}"


def _ratio(value: float, spread: float | None) -> str:
    return f"{value:.2f}" if spread is None else f"{value:.2f} ± {spread:.2f}"


def signed(share: float | None) -> str:
    """A relative error: `+3.1 %`."""
    if share is None:
        return "–"
    return f"{'+' if share >= 0 else formats.MINUS}{100 * abs(share):.1f}{formats.SPACE}%"


def csv_text(found: Results) -> str:
    """The table as CSV, with a heading."""
    return csv_of(records(found))


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with equal keys as CSV; a text that a spreadsheet would take for a formula has a `'` before it."""
    written = io.StringIO()
    writer = csv.DictWriter(written, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _no_formula(value) for key, value in row.items()} for row in rows)
    return written.getvalue()


def _no_formula(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = printable(value, keep="\n")
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def latex_text(found: Results, document: Mapping[str, Any]) -> str:
    """The table as LaTeX, for the package booktabs."""
    study = document["study"]
    batch = f"{study['batch']} {'a device' if study['weak'] else 'in all'}"
    columns = ["configuration", "devices", "step", "images/s", "speed-up", "efficiency", "days", "predicted"]
    if any(row.days is None for row in found.rows):
        columns.remove("days")
    head = " & ".join(columns) + r" \\"
    body = [" & ".join(escaped(line[key]) for key in columns) + r" \\" for line in lines(found)]
    return "\n".join(
        [
            f"% {printable(study['model'])}, batch {batch}; made by convoy bench; needs \\usepackage{{booktabs}}",
            rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}",
            r"\toprule",
            head,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def escaped(text: str) -> str:
    """Text for LaTeX."""
    signs = {"±": r"$\pm$", formats.MINUS: "$-$", formats.SPACE: r"\,", "×": r"$\times$", "µ": r"\textmu{}", "–": "--"}
    table = str.maketrans({**_LATEX, **signs})
    return printable(text).translate(table)
