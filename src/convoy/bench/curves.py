"""How the test error fell under each configuration, and how far from the serial run's it ever was."""

from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class ErrorCurve:
    """A configuration's training, as far as it has come.

    Attributes:
        label: for people.
        steps: weight updates before each evaluation.
        errors: test error of each, 0 to 1.
        losses: test loss of each.
        seconds: of training before each, without evaluations and checkpoints.
        finished: whether it came to its end.
        sha256: of the final weights; empty before the end.
        distance: from the reference; None for the reference itself, or where nothing can be compared.
    """

    label: str
    devices: int
    steps: tuple[int, ...]
    errors: tuple[float, ...]
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    finished: bool
    sha256: str
    distance: Distance | None = None

    @property
    def name(self) -> str:
        """The label in short."""
        return short(self.label)

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


@dataclass(frozen=True)
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

    epochs: float
    curves: tuple[ErrorCurve, ...]
    reference: ErrorCurve | None
    images: int
    failed: tuple[tuple[str, str], ...]
    waiting: tuple[str, ...]
    reproducible: bool

    @property
    def compared(self) -> list[tuple[ErrorCurve, Distance]]:
        """The curves that have a distance from the reference."""
        return [(curve, curve.distance) for curve in self.curves if curve.distance is not None]

    def same_weights(self, curve: ErrorCurve) -> bool:
        """Whether it ended with the very weights of the reference."""
        return self.reference is not None and bool(curve.sha256) and curve.sha256 == self.reference.sha256


def convergence(store: Store) -> Convergence | None:
    """The curves of a study; None where nothing was to be trained."""
    if store.training is None:
        return None
    rows = [(row, row.training) for row in store.configurations if row.kind == CONVOY and row.training is not None]
    curves = [curve for row, training in rows if (curve := _curve(row, training)).steps]
    reference = min(curves, key=lambda curve: curve.devices, default=None)
    return Convergence(
        epochs=store.training.epochs,
        curves=tuple(
            curve if reference is None or curve is reference else replace(curve, distance=curve.away_from(reference))
            for curve in curves
        ),
        reference=reference,
        images=max((training.images for _, training in rows), default=0),
        failed=tuple((row.where, training.failed) for row, training in rows if training.failed),
        waiting=tuple(row.where for row, training in rows if not training.failed and not training.finished),
        reproducible=bool(store.study.recipe["reproducible"]),
    )


def _curve(row: Configuration, kept: Training) -> ErrorCurve:
    known = [
        (one.step, one.error, one.loss, one.train_s)
        for one in kept.evaluations
        if one.error is not None and one.loss is not None
    ]
    return ErrorCurve(
        label=row.label,
        devices=row.devices,
        steps=tuple(step for step, _, _, _ in known),
        errors=tuple(error for _, error, _, _ in known),
        losses=tuple(loss for _, _, loss, _ in known),
        seconds=tuple(seconds for _, _, _, seconds in known),
        finished=kept.finished,
        sha256=kept.sha256,
    )
