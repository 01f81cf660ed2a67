"""Seconds of one kind of layer as a sum: so much for starting, for each operation, and for each byte of two sorts.

Weights are read, and their gradients written, however few samples there are; so their bytes count apart from those of
activations. The four rates are the least squares of relative errors, none below zero, held near a device's roofline
where what was measured says nothing of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from convoy.cost.piece import Piece
from convoy.cost.roofline import Roofline

Way = Literal[0, 1]
"""Forward or backward, as places in `Both`."""

_HELD = 0.001
"""Weight of the roofline beside the squared relative error of one measurement."""
_ROUNDS = 200


@dataclass(frozen=True)
class Regression:
    """Seconds of pieces of one kind, forward or backward.

    Attributes:
        roofline: the device; gives the unit of each rate.
        way: forward or backward.
        rates: in these units, for starting, operations, bytes of activations, bytes of parameters.
    """

    roofline: Roofline
    way: Way
    rates: tuple[float, ...]

    def __call__(self, piece: Piece) -> float:
        """Seconds of a piece."""
        return sum(rate * term for rate, term in zip(self.rates, terms(piece, self.way, self.roofline), strict=True))


def terms(piece: Piece, way: Way, roofline: Roofline) -> tuple[float, ...]:
    """What a piece consists of, in seconds on the roofline."""
    flops, moved = piece.flops[way], piece.bytes[way]
    if not flops and not moved:
        return 0.0, 0.0, 0.0, 0.0
    weights = min(moved, sum(operand.bytes for operand in piece.inputs if operand.role == "parameter") * (1 + way))
    return (
        max(roofline.overhead_s, 1e-6),
        flops / roofline.flops_per_s,
        (moved - weights) / roofline.bytes_per_s,
        weights / roofline.bytes_per_s,
    )


def fit(measured: Sequence[tuple[Piece, float]], way: Way, roofline: Roofline) -> Regression | None:
    """The regression of measured pieces of a kind; None where none of them takes time.

    Args:
        measured: pieces with their seconds.
        way: forward or backward.
        roofline: of the device, as far as it is known.
    """
    rows = [(terms(piece, way, roofline), seconds) for piece, seconds in measured if seconds > 0]
    points = [[term / seconds for term in row] for row, seconds in rows if sum(row) > 0]
    if not points:
        return None
    level = median(1 / sum(point) for point in points)  # of the whole roofline, before its parts are told apart
    count = range(len(points[0]))
    products = [[sum(point[i] * point[j] for point in points) for j in count] for i in count]
    sums = [sum(point[i] for point in points) for i in count]
    rates = [level for _ in count]
    for _ in range(_ROUNDS):
        for i in count:
            others = sum(products[i][j] * rates[j] for j in count if j != i)
            wanted = (sums[i] - others + _HELD / level) / (products[i][i] + _HELD / level**2)
            rates[i] = max(0.0, wanted)
    return Regression(roofline, way, tuple(rates))
