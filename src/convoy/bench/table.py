"""The tables of a study, of its updates and of its trainings: for a terminal, as CSV, and as LaTeX for a paper."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from convoy import units
from convoy.bench.configuration import short
from convoy.bench.curves import Convergence, ErrorCurve
from convoy.bench.measurement import COMMUNICATION, COMPUTE, INPUT, OPTIMIZER
from convoy.bench.results import Results, StudyRow
from convoy.terminal import printable
from convoy.units import seconds as time_of
from convoy.units import size

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
    return [
        {
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
        for row in found.rows
    ]


def lines(found: Results) -> list[dict[str, str]]:
    """The rows for people, in few characters."""
    return [_line(row) for row in found.rows]


def _line(row: StudyRow) -> dict[str, str]:
    return {
        "configuration": plan_label(row),
        "devices": str(row.devices),
        "step": plus_minus(row.seconds, row.spread),
        "images/s": units.significant(row.images_per_s),
        "speed-up": _ratio(row.speedup, row.speedup_spread),
        "efficiency": units.percent(row.efficiency, 0),
        **({} if row.days is None else {"days": units.significant(row.days)}),
        "exposed": time_of(row.parts[COMMUNICATION]),
        "data wait": time_of(row.parts[INPUT]),
        "memory": size(row.memory),
        "predicted": "–" if row.predicted is None else f"{time_of(row.predicted)} ({signed(row.error)})",
    }


def plan_label(row: StudyRow) -> str:
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
    return f"{'+' if share >= 0 else units.MINUS}{100 * abs(share):.1f}{units.SPACE}%"


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
    note = f"{printable(study['model'])}, batch {batch}"
    return _tabular(
        note, f"l{'r' * (len(columns) - 1)}", columns, [[line[key] for key in columns] for line in lines(found)]
    )


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


CONVERGENCE_NUMBERS = ("devices", "updates", "test error", "test loss", "trained in", "distance: error", "loss")
"""Columns that are aligned to the right."""
_COLUMNS = ("trained", *CONVERGENCE_NUMBERS, "final weights")


def convergence_records(found: Convergence) -> list[dict[str, Any]]:
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
        for curve in found.curves
    ]


def convergence_lines(found: Convergence) -> list[dict[str, str]]:
    """The same for people, in few characters."""
    return [dict(zip(_COLUMNS, _cells(found, curve), strict=True)) for curve in found.curves]


def _cells(found: Convergence, curve: ErrorCurve) -> tuple[str, ...]:
    distance = curve.distance
    places = units.percent_places(found.images)
    reference = curve is found.reference
    return (
        short(curve.label),
        str(curve.devices),
        units.count(curve.steps[-1]),
        f"{units.decimal(100 * curve.errors[-1], places)}{units.SPACE}%",
        units.significant(curve.losses[-1]),
        units.duration(curve.seconds[-1]),
        units.UNKNOWN if distance is None else points(distance.error),
        units.UNKNOWN if distance is None else _exactly(distance.loss),
        "the reference" if reference else _weights(found, curve),
    )


def _weights(found: Convergence, curve: ErrorCurve) -> str:
    if not curve.finished:
        return "not finished"
    return "the same bits" if found.same_weights(curve) else "other bits"


def points(share: float) -> str:
    """A difference of two test errors, in percentage points."""
    return f"{_exactly(100 * share)}{units.SPACE}points" if share else "0"


def _exactly(value: float) -> str:
    return units.significant(value, 2) if value else "0"


def convergence_remarks(found: Convergence) -> list[str]:
    """Sentences on how far the curves are from each other, the most important first."""
    if not found.curves:
        return []
    return [one for one in (_distance(found), _bits(found), _scale(found), _how(found)) if one]


def convergence_missing(found: Convergence) -> list[str]:
    """Sentences on configurations that could not be trained, or not yet."""
    said = [f"{label} was not trained: {reason.rstrip('.')}." for label, reason in found.failed]
    if found.waiting:
        said.append(f"Not trained to the end yet: {', '.join(found.waiting)}; the same command goes on.")
    return said


def _distance(found: Convergence) -> str:
    error, loss, reference = found.worst_error, found.worst_loss, found.reference
    if error is None or loss is None or reference is None or error.distance is None or loss.distance is None:
        return ""
    number = _evaluations(found)
    apart = _not_compared(found)
    base = "the serial run's" if reference.devices == 1 else f"those of {_where(reference)}"
    if not error.distance.error and not loss.distance.loss:
        return (
            f"Over updates the curves are one: in all {number} evaluations of "
            f"{_configurations(found, len(found.others))} test error and test loss are {base} to the last bit, "
            f"distance 0.{apart}"
        )
    return (
        f"Over updates the test error is never farther from {base} than {points(error.distance.error)} "
        f"({_where(error)}, after {units.count(error.distance.error_at)} updates), the test loss never farther than "
        f"{_exactly(loss.distance.loss)} ({_where(loss)}, after {units.count(loss.distance.loss_at)}), over {number} "
        f"evaluations of {units.plural(len(found.others), 'other configuration')}.{apart}"
    )


def _evaluations(found: Convergence) -> str:
    numbers = sorted({curve.distance.evaluations for curve in found.others if curve.distance is not None})
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _configurations(found: Convergence, others: int) -> str:
    everything = others + 1 == len(found.curves) and not found.failed and not found.waiting
    return f"{'all ' if everything else ''}{others + 1} configurations"


def _not_compared(found: Convergence) -> str:
    names = [_where(curve) for curve in found.curves if curve.distance is None and curve is not found.reference]
    return f" Not compared, as no evaluation was after as many updates: {', '.join(names)}." if names else ""


def _where(curve: ErrorCurve) -> str:
    devices = "" if curve.devices == 1 or "=" in curve.label else f" on {curve.devices}"
    return f"{short(curve.label)}{devices}"


def _bits(found: Convergence) -> str:
    done = [curve for curve in found.curves if curve.finished and curve is not found.reference]
    if found.reference is None or not found.reference.sha256 or not done:
        return ""
    same = [curve for curve in done if found.same_weights(curve)]
    other = [_where(curve) for curve in done if curve not in same]
    if not same:
        return (
            "No final weights are the reference's bit for bit; reproducible=true makes them so under plans by sample."
        )
    checksum = f"SHA-256 {found.reference.sha256}"
    if not other:
        return f"The final weights of {_configurations(found, len(done))} are the same bit for bit: {checksum}."
    exact = ", the reproducible mode's promise being for plans by sample" if found.reproducible else ""
    return (
        f"The final weights of {', '.join(_where(curve) for curve in same)} are the reference's bit for bit, "
        f"{checksum}; those of {', '.join(other)} are not{exact}."
    )


def _scale(found: Convergence) -> str:
    """What a distance is to be held against."""
    if found.reference is None or not found.images or not any(c.distance and c.distance.error for c in found.others):
        return ""
    share = found.reference.errors[-1]
    deviation = math.sqrt(share * (1 - share) / found.images)
    return (
        f"To compare: {units.percent(share, units.percent_places(found.images))} of {units.count(found.images)} "
        f"test images is known to ± {points(deviation)} (one standard deviation), and one image is "
        f"{points(1 / found.images)}."
    )


def _how(found: Convergence) -> str:
    return (
        f"Each configuration was trained once, for {units.value(found.epochs)} epochs from the same seed, by the "
        "trainer itself; its run is in the folder training. Time is that of the updates; evaluations and checkpoints "
        "are left out."
    )


def convergence_csv(found: Convergence) -> str:
    """A line for each configuration."""
    return csv_of(convergence_records(found))


def curves_csv(found: Convergence) -> str:
    """A line for each evaluation of each configuration: what the pictures are drawn from."""
    return csv_of(
        [
            {
                "configuration": curve.label,
                "devices": curve.devices,
                "updates": step,
                "train_s": second,
                "test_error": error,
                "test_loss": loss,
            }
            for curve in found.curves
            for step, second, error, loss in zip(curve.steps, curve.seconds, curve.errors, curve.losses, strict=True)
        ]
    )


def convergence_latex(found: Convergence, document: Mapping[str, Any]) -> str:
    """The table for the package booktabs."""
    note = f"{printable(document['study']['model'])}, {found.epochs:g} epochs"
    return _tabular(note, "lrrrrrrrl", _COLUMNS, (line.values() for line in convergence_lines(found)))
