"""The tables of a study, of its updates and of its trainings: for a terminal, as CSV, and as LaTeX for a paper."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from convoy import units
from convoy.bench.records import COMMUNICATION, COMPUTE, INPUT, OPTIMIZER, Store
from convoy.bench.results import Convergence, ErrorCurve, Results
from convoy.terminal import printable
from convoy.units import seconds as time_of
from convoy.units import size

_LATEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}
# Columns that are aligned to the right.
NUMBERS = (
    *("devices", "step", "images/s", "speed-up", "efficiency"),
    *("days", "exposed", "data wait", "memory", "predicted"),
)


# The columns for programs, with the attributes of a row: seconds, bytes, and parts of one.
_RECORD = (
    *(("configuration", "label"), ("kind", "kind"), ("devices", "devices"), ("plan", "plan"), ("batch", "batch")),
    *(("step_s", "seconds"), ("spread_s", "spread"), ("images_per_s", "images_per_s")),
    *(("speedup", "speedup"), ("speedup_spread", "speedup_spread"), ("efficiency", "efficiency"), ("days", "days")),
    *(("compute_s", COMPUTE), ("exposed_communication_s", COMMUNICATION), ("data_wait_s", INPUT)),
    *(("optimizer_s", OPTIMIZER), ("memory_bytes", "memory"), ("predicted_s", "predicted")),
    *(("prediction_error", "error"), ("predicted_memory_bytes", "predicted_memory")),
    *(("rounds", "rounds"), ("overhead_s", "overhead")),
)


def records(results: Results) -> list[dict[str, Any]]:
    """The rows with plain numbers."""
    return [
        {key: row.parts[name] if name in row.parts else getattr(row, name) for key, name in _RECORD}
        for row in results.rows
    ]


def lines(results: Results) -> list[dict[str, str]]:
    """The rows for people, in few characters."""
    return [
        {
            "configuration": row.plan_label,
            "devices": str(row.devices),
            "step": plus_minus(row.seconds, row.spread),
            "images/s": units.significant(row.images_per_s),
            "speed-up": f"{row.speedup:.2f}" + ("" if row.speedup_spread is None else f" ± {row.speedup_spread:.2f}"),
            "efficiency": units.percent(row.efficiency, 0),
            **({} if row.days is None else {"days": units.significant(row.days)}),
            "exposed": time_of(row.parts[COMMUNICATION]),
            "data wait": time_of(row.parts[INPUT]),
            "memory": size(row.memory),
            "predicted": "–" if row.predicted is None else f"{time_of(row.predicted)} ({signed(row.error)})",
        }
        for row in results.rows
    ]


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


def signed(share: float | None) -> str:
    """A relative error: `+3.1 %`."""
    if share is None:
        return "–"
    return f"{'+' if share >= 0 else units.MINUS}{100 * abs(share):.1f}{units.SPACE}%"


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


def latex_text(results: Results, store: Store) -> str:
    """The table as LaTeX, for the package booktabs."""
    batch = f"{store.study.batch} {'a device' if store.study.weak else 'in all'}"
    columns = ["configuration", "devices", "step", "images/s", "speed-up", "efficiency", "days", "predicted"]
    if any(row.days is None for row in results.rows):
        columns.remove("days")
    note = f"{printable(store.study.model)}, batch {batch}"
    cells = [[line[key] for key in columns] for line in lines(results)]
    return _tabular(note, f"l{'r' * (len(columns) - 1)}", columns, cells)


def _tabular(note: str, alignment: str, columns: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    return "\n".join(
        [
            f"% {note}; made by convoy bench; needs \\usepackage{{booktabs}}",
            rf"\begin{{tabular}}{{{alignment}}}",
            r"\toprule",
            " & ".join(columns) + r" \\",
            r"\midrule",
            *(" & ".join(map(escaped, row)) + r" \\" for row in rows),
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def escaped(text: str) -> str:
    """Text for LaTeX."""
    signs = {"±": r"$\pm$", units.MINUS: "$-$", units.SPACE: r"\,", "×": r"$\times$", "µ": r"\textmu{}", "–": "--"}
    table = str.maketrans({**_LATEX, **signs})
    return printable(text).translate(table)


# Columns that are aligned to the right.
CONVERGENCE_NUMBERS = ("devices", "updates", "test error", "test loss", "trained in", "distance: error", "loss")
_COLUMNS = ("trained", *CONVERGENCE_NUMBERS, "final weights")


def convergence_records(convergence: Convergence) -> list[dict[str, Any]]:
    """A record for each training, with plain numbers: errors and distances 0 to 1, seconds."""
    return [
        {
            "configuration": curve.label,
            "devices": curve.devices,
            "finished": curve.finished,
            "updates": curve.steps[-1],
            "test_error": curve.errors[-1],
            "test_loss": curve.losses[-1],
            "train_s": curve.seconds[-1],
            "distance_error": curve.distance.error if curve.distance else None,
            "distance_error_at": curve.distance.error_at if curve.distance else None,
            "distance_loss": curve.distance.loss if curve.distance else None,
            "distance_loss_at": curve.distance.loss_at if curve.distance else None,
            "evaluations": len(curve.steps),
            "weights_sha256": curve.sha256,
        }
        for curve in convergence.curves
    ]


def convergence_lines(convergence: Convergence) -> list[dict[str, str]]:
    """The trainings for people, in few characters."""
    return [dict(zip(_COLUMNS, _cells(convergence, curve), strict=True)) for curve in convergence.curves]


def _cells(convergence: Convergence, curve: ErrorCurve) -> tuple[str, ...]:
    distance = curve.distance
    weights = "the same bits" if convergence.same_weights(curve) else "other bits"
    return (
        curve.name,
        str(curve.devices),
        units.count(curve.steps[-1]),
        f"{units.decimal(100 * curve.errors[-1], units.percent_places(convergence.images))}{units.SPACE}%",
        units.significant(curve.losses[-1]),
        units.duration(curve.seconds[-1]),
        units.UNKNOWN if distance is None else points(distance.error),
        units.UNKNOWN if distance is None else units.significant(distance.loss, 2),
        "the reference" if curve is convergence.reference else weights if curve.finished else "not finished",
    )


def points(share: float) -> str:
    """A difference of two test errors, in percentage points."""
    return f"{units.significant(100 * share, 2)}{units.SPACE}points" if share else "0"


def curve_records(convergence: Convergence) -> list[dict[str, Any]]:
    """A record for each evaluation of each training, as in the pictures."""
    return [
        {
            "configuration": curve.label,
            "devices": curve.devices,
            "updates": step,
            "train_s": second,
            "test_error": error,
            "test_loss": loss,
        }
        for curve in convergence.curves
        for step, second, error, loss in zip(curve.steps, curve.seconds, curve.errors, curve.losses, strict=True)
    ]


def convergence_latex(convergence: Convergence, store: Store) -> str:
    """The table of trainings as LaTeX, for the package booktabs."""
    note = f"{printable(store.study.model)}, {convergence.epochs:g} epochs"
    return _tabular(note, "lrrrrrrrl", _COLUMNS, (line.values() for line in convergence_lines(convergence)))
