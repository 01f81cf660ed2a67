"""What the trainings of a study came to: a table for a terminal, as CSV and LaTeX, and the sentences beside it."""

import math
from collections.abc import Mapping
from typing import Any

from convoy.experiments import formats
from convoy.experiments.scaling.results.curves import Convergence, Curve
from convoy.experiments.scaling.results.table import csv_of, escaped
from convoy.experiments.scaling.study.configuration import short
from convoy.printable import printable

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


def _cells(found: Convergence, curve: Curve) -> tuple[str, ...]:
    distance = curve.distance
    places = formats.percent_places(found.images)
    reference = curve is found.reference
    return (
        short(curve.label),
        str(curve.devices),
        formats.count(curve.steps[-1]),
        f"{formats.decimal(100 * curve.errors[-1], places)}{formats.SPACE}%",
        formats.significant(curve.losses[-1]),
        formats.duration(curve.seconds[-1]),
        formats.UNKNOWN if distance is None else points(distance.error),
        formats.UNKNOWN if distance is None else _exactly(distance.loss),
        "the reference" if reference else _weights(found, curve),
    )


def _weights(found: Convergence, curve: Curve) -> str:
    if not curve.finished:
        return "not finished"
    return "the same bits" if found.same_weights(curve) else "other bits"


def points(share: float) -> str:
    """A difference of two test errors, in percentage points."""
    return f"{_exactly(100 * share)}{formats.SPACE}points" if share else "0"


def _exactly(value: float) -> str:
    return formats.significant(value, 2) if value else "0"


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
        f"({_where(error)}, after {formats.count(error.distance.error_at)} updates), the test loss never farther than "
        f"{_exactly(loss.distance.loss)} ({_where(loss)}, after {formats.count(loss.distance.loss_at)}), over {number} "
        f"evaluations of {formats.plural(len(found.others), 'other configuration')}.{apart}"
    )


def _evaluations(found: Convergence) -> str:
    """How many of each curve were compared."""
    numbers = sorted({curve.distance.evaluations for curve in found.others if curve.distance is not None})
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _configurations(found: Convergence, others: int) -> str:
    """So many others and the reference."""
    everything = others + 1 == len(found.curves) and not found.failed and not found.waiting
    return f"{'all ' if everything else ''}{others + 1} configurations"


def _not_compared(found: Convergence) -> str:
    """A sentence, after a space, on curves that share no evaluation with the reference; empty where all do."""
    names = [_where(curve) for curve in found.curves if curve.distance is None and curve is not found.reference]
    return f" Not compared, as no evaluation was after as many updates: {', '.join(names)}." if names else ""


def _where(curve: Curve) -> str:
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
        f"To compare: {formats.percent(share, formats.percent_places(found.images))} of {formats.count(found.images)} "
        f"test images is known to ± {points(deviation)} (one standard deviation), and one image is "
        f"{points(1 / found.images)}."
    )


def _how(found: Convergence) -> str:
    return (
        f"Each configuration was trained once, for {formats.value(found.epochs)} epochs from the same seed, by the "
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
    model = printable(document["study"]["model"])
    lines = convergence_lines(found)
    return "\n".join(
        [
            f"% {model}, {found.epochs:g} epochs; made by convoy bench; needs \\usepackage{{booktabs}}",
            r"\begin{tabular}{lrrrrrrrl}",
            r"\toprule",
            " & ".join(_COLUMNS) + r" \\",
            r"\midrule",
            *(" & ".join(escaped(cell) for cell in line.values()) + r" \\" for line in lines),
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )
