"""The tables of a study, of its updates and of its trainings: for a terminal, as CSV, and as LaTeX for a paper."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from convoy import units
from convoy.bench.records import COMMUNICATION, COMPUTE, INPUT, OPTIMIZER, Store
from convoy.bench.results import Convergence, ErrorCurve, Results, StudyRow
from convoy.terminal import printable
from convoy.units import seconds as time_of
from convoy.units import size, table

# Columns that are aligned to the right.
NUMBERS = {"devices", "step", "images/s", "speed-up", "efficiency", "days", "exposed", "data wait", "memory"}
NUMBERS |= {"predicted", "updates", "test error", "test loss", "trained in", "distance: error", "loss"}
# What LaTeX leaves out, as a page is not so wide.
_WIDE = ("exposed", "data wait", "memory")
_LATEX: dict[str, str | int | None] = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    units.MINUS: "$-$",
    units.SPACE: r"\,",
    "×": r"$\times$",
    "µ": r"\textmu{}",
    "–": "--",
}


@dataclass(frozen=True)
class Table:
    """The same rows for people, in few characters, and with plain numbers: seconds, bytes, and parts of one."""

    rows: list[dict[str, str]]
    records: list[dict[str, Any]]
    note: str  # what it is of

    def lines(self) -> list[str]:
        return table(list(self.rows[0]), [list(row.values()) for row in self.rows], list(NUMBERS)) if self.rows else []

    def csv(self) -> str:
        return csv_of(self.records)

    def latex(self) -> str:
        """For the package booktabs."""
        columns = [name for name in (self.rows[0] if self.rows else {"configuration": ""}) if name not in _WIDE]
        return "\n".join(
            [
                f"% {self.note}; made by convoy bench; needs \\usepackage{{booktabs}}",
                rf"\begin{{tabular}}{{{''.join('r' if name in NUMBERS else 'l' for name in columns)}}}",
                r"\toprule",
                " & ".join(columns) + r" \\",
                r"\midrule",
                *(" & ".join(escaped(row[name]) for name in columns) + r" \\" for row in self.rows),
                r"\bottomrule",
                r"\end{tabular}",
                "",
            ]
        )


def csv_of(records: Sequence[Mapping[str, Any]]) -> str:
    """Records with equal keys as CSV; a text that a spreadsheet would take for a formula has a `'` before it."""
    written = io.StringIO()
    writer = csv.DictWriter(written, list(records[0]) if records else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _no_formula(value) for key, value in record.items()} for record in records)
    return written.getvalue()


def _no_formula(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = printable(value, keep="\n")
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def escaped(text: str) -> str:
    """Text for LaTeX."""
    return printable(text).translate(str.maketrans(_LATEX))


def of_updates(results: Results, store: Store) -> Table:
    """A row for each configuration that was measured."""
    batch = f"{store.study.batch} {'a device' if store.study.weak else 'in all'}"
    note = f"{printable(store.study.model)}, batch {batch}"
    return Table([_cells(row) for row in results.rows], [_record(row) for row in results.rows], note)


def _cells(row: StudyRow) -> dict[str, str]:
    spread = "" if row.speedup_spread is None else f" ± {row.speedup_spread:.2f}"
    return {
        "configuration": row.plan_label,
        "devices": str(row.devices),
        "step": plus_minus(row.seconds, row.spread),
        "images/s": units.significant(row.images_per_s),
        "speed-up": f"{row.speedup:.2f}{spread}",
        "efficiency": units.percent(row.efficiency, 0),
        **({} if row.days is None else {"days": units.significant(row.days)}),
        "exposed": time_of(row.parts[COMMUNICATION]),
        "data wait": time_of(row.parts[INPUT]),
        "memory": size(row.memory),
        "predicted": "–" if row.predicted is None else f"{time_of(row.predicted)} ({signed(row.error)})",
    }


def _record(row: StudyRow) -> dict[str, Any]:
    return {
        "configuration": row.label,
        **{key: getattr(row, key) for key in ("kind", "devices", "plan", "batch")},
        "step_s": row.seconds,
        "spread_s": row.spread,
        **{key: getattr(row, key) for key in ("images_per_s", "speedup", "speedup_spread", "efficiency", "days")},
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


def with_spread(seconds: float, spread: float | None) -> tuple[str, str, str]:
    """A time, its spread in the same unit (empty for none), and the unit."""
    number, _, unit = time_of(seconds).partition(" ")
    if spread is None:
        return number, "", unit
    places = len(number.partition(".")[2])
    return number, f"{spread * {'ms': 1e3, 'µs': 1e6}.get(unit, 1.0):.{places}f}", unit


def plus_minus(seconds: float, spread: float | None) -> str:
    """A time with its spread: `12.3 ± 0.4 ms`."""
    number, difference, unit = with_spread(seconds, spread)
    return f"{number} ± {difference} {unit}" if difference else f"{number} {unit}"


def signed(share: float | None) -> str:
    """A relative error: `+3.1 %`."""
    if share is None:
        return "–"
    return f"{'+' if share >= 0 else units.MINUS}{100 * abs(share):.1f}{units.SPACE}%"


def points(share: float) -> str:
    """A difference of two test errors, in percentage points."""
    return f"{units.significant(100 * share, 2)}{units.SPACE}points" if share else "0"


def of_trainings(convergence: Convergence, store: Store) -> Table:
    """A row for each configuration that was trained."""
    note = f"{printable(store.study.model)}, {convergence.epochs:g} epochs"
    rows = [_curve_cells(convergence, curve) for curve in convergence.curves]
    return Table(rows, [_curve_record(curve) for curve in convergence.curves], note)


def _curve_cells(convergence: Convergence, curve: ErrorCurve) -> dict[str, str]:
    distance = curve.distance
    weights = "not finished"
    if curve is convergence.reference:
        weights = "the reference"
    elif curve.finished:
        weights = "the same bits" if convergence.same_weights(curve) else "other bits"
    error = units.decimal(100 * curve.errors[-1], units.percent_places(convergence.images))
    return {
        "trained": curve.name,
        "devices": str(curve.devices),
        "updates": units.count(curve.steps[-1]),
        "test error": f"{error}{units.SPACE}%",
        "test loss": units.significant(curve.losses[-1]),
        "trained in": units.duration(curve.seconds[-1]),
        "distance: error": units.UNKNOWN if distance is None else points(distance.error),
        "loss": units.UNKNOWN if distance is None else units.significant(distance.loss, 2),
        "final weights": weights,
    }


def _curve_record(curve: ErrorCurve) -> dict[str, Any]:
    distance = curve.distance
    return {
        "configuration": curve.label,
        "devices": curve.devices,
        "finished": curve.finished,
        "updates": curve.steps[-1],
        "test_error": curve.errors[-1],
        "test_loss": curve.losses[-1],
        "train_s": curve.seconds[-1],
        "distance_error": distance and distance.error,
        "distance_error_at": distance and distance.error_at,
        "distance_loss": distance and distance.loss,
        "distance_loss_at": distance and distance.loss_at,
        "evaluations": len(curve.steps),
        "weights_sha256": curve.sha256,
    }


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
