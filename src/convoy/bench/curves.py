"""How the test error fell under each configuration, and how far from the serial run's it ever was."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convoy.bench.configuration import CONVOY
from convoy.report.run_directory import column, read_metrics
from convoy.units import plural

EVALUATION = ("step", "epoch", "error", "loss", "train_s")
"""What is kept of an evaluation: updates and epochs done, test error (0 to 1), test loss, seconds of training."""


@dataclass(frozen=True)
class Distance:
    """The largest one between two curves, over all evaluations that both have.

    Attributes:
        error: of the test error, 0 to 1.
        error_at: after so many updates.
        loss: of the test loss.
        loss_at: after so many updates.
        evaluations: that were compared.
    """

    error: float
    error_at: int
    loss: float
    loss_at: int
    evaluations: int


@dataclass(frozen=True)
class ErrorCurve:
    """A configuration's training, as far as it has come.

    Attributes:
        key, label, devices, series: of the configuration.
        steps: weight updates before each evaluation.
        errors: test error of each, 0 to 1.
        losses: test loss of each.
        seconds: of training before each, without evaluations and checkpoints.
        finished: whether it came to its end.
        sha256: of the final weights; empty before the end.
        distance: from the reference; None for the reference itself.
    """

    key: str
    label: str
    devices: int
    series: str
    steps: tuple[int, ...]
    errors: tuple[float, ...]
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    finished: bool
    sha256: str
    distance: Distance | None = None


@dataclass(frozen=True)
class Convergence:
    """All curves of a study.

    Attributes:
        epochs: that each is trained.
        curves: those that have an evaluation at least.
        reference: the serial run's, or that on the fewest devices.
        images: of the test split.
        failed: label and reason of those that could not be trained.
        waiting: labels of those that are not finished.
        reproducible: the recipe asks for the same bits on any number of devices.
    """

    epochs: float
    curves: tuple[ErrorCurve, ...]
    reference: ErrorCurve | None
    images: int
    failed: tuple[tuple[str, str], ...]
    waiting: tuple[str, ...]
    reproducible: bool

    @property
    def others(self) -> tuple[ErrorCurve, ...]:
        """All but the reference."""
        return tuple(curve for curve in self.curves if curve.distance is not None)

    @property
    def worst_error(self) -> ErrorCurve | None:
        """The curve whose test error is farthest from the reference's."""
        return max(self.others, key=lambda curve: _distance(curve).error, default=None)

    @property
    def worst_loss(self) -> ErrorCurve | None:
        """The curve whose test loss is farthest from the reference's."""
        return max(self.others, key=lambda curve: _distance(curve).loss, default=None)

    def same_weights(self, curve: ErrorCurve) -> bool:
        """Whether it ended with the very weights of the reference."""
        return self.reference is not None and bool(curve.sha256) and curve.sha256 == self.reference.sha256


def training_facts(run: Path, batch: int) -> dict[str, Any]:
    """What is kept in bench.json of a run, as far as it has come.

    Args:
        run: its folder.
        batch: images of an update.
    """
    metrics = read_metrics(run / "metrics.jsonl")
    steps, rates = column(metrics.train, "step"), column(metrics.train, "images_per_s")
    ends = np.cumsum(np.diff(steps, prepend=0) * batch / rates)
    tested = column(metrics.test, "step")
    seconds = np.interp(tested, [0, *steps], [0, *ends])
    rows = [
        {
            "step": line.step,
            "epoch": line.epoch,
            "error": None if line.top1 is None else round(1 - line.top1, 9),
            "loss": line.loss,
            "train_s": round(float(second), 3),
        }
        for line, second in zip(metrics.test, seconds, strict=True)
    ]
    weights = run / "weights.safetensors"
    return {
        "run": run.name,
        "images": max((line.images or 0 for line in metrics.test), default=0),
        "evaluations": rows,
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest() if weights.is_file() else "",
    }


def convergence(document: Mapping[str, Any]) -> Convergence | None:
    """The curves of a study; None where nothing was to be trained.

    Args:
        document: as `Store` keeps it.
    """
    asked = document.get("training")
    if asked is None:
        return None
    rows = [row for row in document["configurations"] if row["kind"] == CONVOY and row.get("training") is not None]
    curves = [curve for curve in map(_curve, rows) if curve.steps]
    reference = min(curves, key=lambda curve: curve.devices, default=None)
    return Convergence(
        epochs=asked["epochs"],
        curves=tuple(curve if curve is reference else _compared(curve, reference) for curve in curves),
        reference=reference,
        images=max((row["training"]["images"] for row in rows), default=0),
        failed=tuple((where(row), str(row["training"]["failed"])) for row in rows if row["training"]["failed"]),
        waiting=tuple(where(row) for row in rows if not row["training"]["failed"] and not row["training"]["finished"]),
        reproducible=bool(document["study"]["recipe"]["reproducible"]),
    )


def where(row: Mapping[str, Any]) -> str:
    """A row of a document, for people."""
    return f"{row['label']} on {plural(row['devices'], 'device')}"


def _curve(row: Mapping[str, Any]) -> ErrorCurve:
    kept = row["training"]
    known = [one for one in kept["evaluations"] if one["error"] is not None and one["loss"] is not None]
    return ErrorCurve(
        key=row["key"],
        label=row["label"],
        devices=int(row["devices"]),
        series=row["series"],
        steps=tuple(one["step"] for one in known),
        errors=tuple(one["error"] for one in known),
        losses=tuple(one["loss"] for one in known),
        seconds=tuple(one["train_s"] for one in known),
        finished=kept["finished"],
        sha256=kept["sha256"],
    )


def _compared(curve: ErrorCurve, reference: ErrorCurve | None) -> ErrorCurve:
    assert reference is not None
    places = {step: place for place, step in enumerate(reference.steps)}
    both = [(place, places[step]) for place, step in enumerate(curve.steps) if step in places]
    errors = [abs(curve.errors[own] - reference.errors[other]) for own, other in both]
    losses = [abs(curve.losses[own] - reference.losses[other]) for own, other in both]
    if not both:
        return curve
    at = [curve.steps[own] for own, _ in both]
    distance = Distance(max(errors), _place(at, errors), max(losses), _place(at, losses), len(both))
    return ErrorCurve(**{**vars(curve), "distance": distance})


def _place(steps: Sequence[int], values: Sequence[float]) -> int:
    return steps[max(range(len(values)), key=values.__getitem__)]


def _distance(curve: ErrorCurve) -> Distance:
    assert curve.distance is not None
    return curve.distance
