"""How the test error fell under each configuration, and how far from the serial run's it ever was."""

from dataclasses import dataclass

from convoy.bench.records import CONVOY, Configuration, Training, short
from convoy.bench.store import Store


@dataclass(frozen=True)
class Distance:
    """The largest distances between two curves, over all evaluations that both have.

    Attributes:
        error: of the test error, 0 to 1, after `error_at` updates.
        loss: of the test loss, after `loss_at` updates.
        evaluations: so many were compared.
    """

    error: float
    error_at: int
    loss: float
    loss_at: int
    evaluations: int


class ErrorCurve:
    """A configuration's training, as far as it has come.

    Attributes:
        name: of the configuration, in short.
        steps: weight updates before each evaluation.
        errors: test error of each, 0 to 1.
        losses: test loss of each.
        seconds: of training before each, without evaluations and checkpoints.
        sha256: of the final weights; empty before the end.
        distance: from the reference; None for the reference itself, or where nothing can be compared.
    """

    def __init__(self, row: Configuration, training: Training) -> None:
        self.label, self.name, self.devices = row.label, short(row.label), row.devices
        self.finished, self.sha256 = training.finished, training.sha256
        known = [one for one in training.evaluations if one.error is not None and one.loss is not None]
        self.steps = [one.step for one in known]
        self.errors = [one.error or 0.0 for one in known]
        self.losses = [one.loss or 0.0 for one in known]
        self.seconds = [one.train_s for one in known]
        self.distance: Distance | None = None

    def away_from(self, other: "ErrorCurve") -> Distance | None:
        """How far it is from another one."""
        theirs = dict(zip(other.steps, zip(other.errors, other.losses, strict=True), strict=True))
        apart = [
            (step, abs(error - theirs[step][0]), abs(loss - theirs[step][1]))
            for step, error, loss in zip(self.steps, self.errors, self.losses, strict=True)
            if step in theirs
        ]
        if not apart:
            return None
        error_at, error, _ = max(apart, key=lambda one: one[1])
        loss_at, _, loss = max(apart, key=lambda one: one[2])
        return Distance(error, error_at, loss, loss_at, len(apart))


class Convergence:
    """All curves of a study.

    Attributes:
        epochs: of each training.
        curves: those that have an evaluation at least.
        reference: the serial run's, or that on the fewest devices.
        images: of the test split.
        failed: label and reason of those that could not be trained.
        waiting: labels of those that are not finished.
        reproducible: the recipe asks for the same bits on any number of devices.
    """

    def __init__(self, store: Store, epochs: float) -> None:
        rows = [(row, row.training) for row in store.configurations if row.kind == CONVOY and row.training is not None]
        curves = [ErrorCurve(row, training) for row, training in rows]
        self.epochs, self.reproducible = epochs, bool(store.study.recipe["reproducible"])
        self.curves = [curve for curve in curves if curve.steps]
        self.reference = min(self.curves, key=lambda curve: curve.devices, default=None)
        for curve in self.curves:
            if self.reference is not None and curve is not self.reference:
                curve.distance = curve.away_from(self.reference)
        self.images = max((training.images for _, training in rows), default=0)
        self.failed = [(row.where, training.failed) for row, training in rows if training.failed]
        self.waiting = [row.where for row, training in rows if not training.failed and not training.finished]

    @property
    def compared(self) -> list[tuple[ErrorCurve, Distance]]:
        """The curves that have a distance from the reference."""
        return [(curve, curve.distance) for curve in self.curves if curve.distance is not None]

    def same_weights(self, curve: ErrorCurve) -> bool:
        """Whether it ended with the very weights of the reference."""
        return self.reference is not None and bool(curve.sha256) and curve.sha256 == self.reference.sha256


def convergence(store: Store) -> Convergence | None:
    """The curves of a study; None where nothing was to be trained."""
    return Convergence(store, store.training.epochs) if store.training is not None else None
