"""How the test error fell under each configuration, and how far from the serial run's it ever was."""

from dataclasses import dataclass

from convoy.bench.records import CONVOY, Configuration, Training, short
from convoy.bench.store import Store


@dataclass(frozen=True)
class Distance:
    """The largest distances between two curves, over all evaluations that both have."""

    error: float  # test error, 0 to 1
    error_at: int  # updates before it
    loss: float  # test loss
    loss_at: int  # updates before it
    evaluations: int  # how many were compared


class ErrorCurve:
    """A configuration's training, as far as it has come, with a value for each evaluation."""

    def __init__(self, row: Configuration, training: Training) -> None:
        self.label, self.name, self.devices = row.label, short(row.label), row.devices
        self.finished, self.sha256 = training.finished, training.sha256
        evaluations = [one for one in training.evaluations if one.error is not None and one.loss is not None]
        self.steps = [one.step for one in evaluations]  # weight updates
        self.errors = [one.error or 0.0 for one in evaluations]  # test error, 0 to 1
        self.losses = [one.loss or 0.0 for one in evaluations]  # test loss
        self.seconds = [one.train_s for one in evaluations]  # without evaluations and checkpoints
        self.distance: Distance | None = None  # from the reference, which itself has none

    def away_from(self, other: "ErrorCurve") -> Distance | None:
        values = dict(zip(other.steps, zip(other.errors, other.losses, strict=True), strict=True))
        distances = [
            (step, abs(error - values[step][0]), abs(loss - values[step][1]))
            for step, error, loss in zip(self.steps, self.errors, self.losses, strict=True)
            if step in values
        ]
        if not distances:
            return None
        error_at, error, _ = max(distances, key=lambda one: one[1])
        loss_at, _, loss = max(distances, key=lambda one: one[2])
        return Distance(error, error_at, loss, loss_at, len(distances))


class Convergence:
    """All curves of a study."""

    def __init__(self, store: Store, epochs: float) -> None:
        rows = [(row, row.training) for row in store.configurations if row.kind == CONVOY and row.training is not None]
        curves = [ErrorCurve(row, training) for row, training in rows]
        self.epochs, self.reproducible = epochs, bool(store.study.recipe["reproducible"])
        self.curves = [curve for curve in curves if curve.steps]
        # the serial run, or that on the fewest devices
        self.reference = min(self.curves, key=lambda curve: curve.devices, default=None)
        for curve in self.curves:
            if self.reference is not None and curve is not self.reference:
                curve.distance = curve.away_from(self.reference)
        self.images = max((training.images for _, training in rows), default=0)
        self.failed = [(row.where, training.failed) for row, training in rows if training.failed]
        self.waiting = [row.where for row, training in rows if not training.failed and not training.finished]

    @property
    def compared(self) -> list[tuple[ErrorCurve, Distance]]:
        return [(curve, curve.distance) for curve in self.curves if curve.distance is not None]

    def same_weights(self, curve: ErrorCurve) -> bool:
        return self.reference is not None and bool(curve.sha256) and curve.sha256 == self.reference.sha256


def convergence(store: Store) -> Convergence | None:
    """The curves of a study; None where nothing was to be trained."""
    return Convergence(store, store.training.epochs) if store.training is not None else None
