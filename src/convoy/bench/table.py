"""The tables of a study, of its updates and of its trainings: for a terminal, as CSV, and as LaTeX for a paper."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from convoy import units
from convoy.bench.records import COMMUNICATION, INPUT, OPTIMIZER, Store
from convoy.bench.results import Convergence, ErrorCurve, Results, StudyRow
from convoy.files import csv_of
from convoy.terminal import printable
from convoy.units import seconds as time_of
from convoy.units import size, table

TEXTS = ("configuration", "trained", "final weights")  # columns that are not of numbers, which are aligned to the right
# What a terminal leaves out, and LaTeX too, as a page is not so wide.
_ON_PAGES = ("optimizer",)
_WIDE = ("exposed", "data wait", "memory", *_ON_PAGES)
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

    def _columns(self, without: Sequence[str]) -> list[str]:
        return [name for name in (self.rows[0] if self.rows else {"configuration": ""}) if name not in without]

    def lines(self) -> list[str]:
        columns = self._columns(_ON_PAGES)
        right = [name for name in columns if name not in TEXTS]
        return table(columns, [[row[name] for name in columns] for row in self.rows], right) if self.rows else []

    def csv(self) -> str:
        return csv_of(self.records)

    def latex(self) -> str:
        """For the package booktabs."""
        columns = self._columns(_WIDE)
        return "\n".join(
            [
                f"% {self.note}; made by convoy bench; needs \\usepackage{{booktabs}}",
                rf"\begin{{tabular}}{{{''.join('l' if name in TEXTS else 'r' for name in columns)}}}",
                r"\toprule",
                " & ".join(columns) + r" \\",
                r"\midrule",
                *(" & ".join(escaped(row[name]) for name in columns) + r" \\" for row in self.rows),
                r"\bottomrule",
                r"\end{tabular}",
                "",
            ]
        )


def escaped(text: str) -> str:
    """Text for LaTeX."""
    return printable(text).translate(str.maketrans(_LATEX))


def of_updates(results: Results, store: Store) -> Table:
    """A row for each configuration that was measured."""
    note = f"{printable(store.study.model)}, batch {store.study.batch} {'a device' if store.study.weak else 'in all'}"
    return Table([_cells(row) for row in results.rows], [row.record for row in results.rows], note)


def _cells(row: StudyRow) -> dict[str, str]:
    predicted = "" if row.predicted_s is None else f"{time_of(row.predicted_s)} ({signed(row.prediction_error or 0.0)})"
    return {
        "configuration": row.plan_label,
        "devices": str(row.devices),
        "step": plus_minus(row.step_s, row.spread_s),
        "images/s": units.significant(row.images_per_s),
        "speed-up": f"{row.speedup:.2f}" + ("" if row.speedup_spread is None else f" ± {row.speedup_spread:.2f}"),
        "efficiency": units.percent(row.efficiency, 0),
        **({} if row.days is None else {"days": units.significant(row.days)}),
        "exposed": time_of(row.parts[COMMUNICATION]),
        "data wait": time_of(row.parts[INPUT]),
        "optimizer": time_of(row.parts[OPTIMIZER]),
        "memory": size(row.memory_bytes),
        "predicted": predicted or units.UNKNOWN,
    }


def plus_minus(seconds: float, spread: float | None) -> str:
    """A time with its spread in the same unit: `12.3 ± 0.4 ms`."""
    number, _, unit = time_of(seconds).partition(" ")
    if spread is None:
        return f"{number} {unit}"
    places = len(number.partition(".")[2])
    return f"{number} ± {spread * {'ms': 1e3, 'µs': 1e6}.get(unit, 1.0):.{places}f} {unit}"


def signed(share: float) -> str:
    """A relative error: `+3.1 %`."""
    return f"{'+' if share >= 0 else units.MINUS}{100 * abs(share):.1f}{units.SPACE}%"


def points(share: float) -> str:
    """A difference of two test errors, in percentage points."""
    return f"{units.significant(100 * share, 2)}{units.SPACE}points" if share else "0"


def of_trainings(convergence: Convergence, store: Store) -> Table:
    """A row for each configuration that was trained."""
    note = f"{printable(store.study.model)}, {convergence.epochs:g} epochs"
    rows = [_curve_cells(convergence, curve) for curve in convergence.curves]
    return Table(rows, [curve.record for curve in convergence.curves], note)


def _curve_cells(convergence: Convergence, curve: ErrorCurve) -> dict[str, str]:
    weights = "not finished"
    if curve is convergence.reference:
        weights = "the reference"
    elif curve.finished:
        weights = "the same bits" if convergence.same_weights(curve) else "other bits"
    error, loss, places = curve.distance_error, curve.distance_loss, units.percent_places(convergence.images)
    return {
        "trained": curve.name,
        "devices": str(curve.devices),
        "updates": units.count(curve.updates),
        "test error": f"{units.decimal(100 * curve.test_error, places)}{units.SPACE}%",
        "test loss": units.significant(curve.test_loss),
        "trained in": units.duration(curve.train_s),
        "distance: error": units.UNKNOWN if error is None else points(error),
        "loss": units.UNKNOWN if loss is None else units.significant(loss, 2),
        "final weights": weights,
    }
