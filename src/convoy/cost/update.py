"""What the optimiser costs: seconds of an update, and bytes of its state."""

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.plans.buckets import WORTH_DIVIDING


@dataclass(frozen=True)
class Update:
    """An optimiser on a device.

    Attributes:
        per_byte: seconds for each byte of the parameters: one pass over weights, gradients and state.
        per_tensor: seconds for each parameter.
        fixed: seconds once, with whatever else is done once in an update.
        state: bytes of state for each byte of a parameter: 1 for a momentum, 2 for Adam's two averages.
        divisible: whether it treats each number by itself, so that ranks on CPUs with the same parameters may divide
            the update of large ones (`engine/gradients/sharded.py`).
    """

    per_byte: float = 0.0
    per_tensor: float = 0.0
    fixed: float = 0.0
    state: float = 1.0
    divisible: bool = False

    def seconds(self, num_bytes: float, tensors: int) -> float:
        """Time to update so many parameters."""
        return self.fixed + self.per_byte * num_bytes + self.per_tensor * tensors

    def divides(self, large: int) -> bool:
        """Whether ranks that have `large` bytes of large gradients in common divide their update."""
        return self.divisible and large >= WORTH_DIVIDING

    @staticmethod
    def fit(measured: Sequence[tuple[int, int, float]], *, state: float = 1.0, divisible: bool = False) -> "Update":
        """From measured updates.

        Args:
            measured: bytes of the parameters, how many they are, and seconds. One point gives the rate alone, two or
                more also the time for a tensor: the least squares of relative errors, neither number below zero.
            state, divisible: as in `Update`.
        """
        points = [(num_bytes, tensors, seconds) for num_bytes, tensors, seconds in measured if seconds > 0]
        by_bytes = _slope([(num_bytes / seconds) for num_bytes, _, seconds in points])
        by_tensors = _slope([tensors / seconds for _, tensors, seconds in points])
        aa = sum((a / s) ** 2 for a, _, s in points)
        bb = sum((b / s) ** 2 for _, b, s in points)
        ab = sum(a * b / s**2 for a, b, s in points)
        determinant = aa * bb - ab * ab
        if len(points) < 2 or determinant <= 1e-9 * aa * bb:
            return Update(by_bytes, 0.0, state=state, divisible=divisible)
        a = sum(a / s for a, _, s in points)
        b = sum(b / s for _, b, s in points)
        per_byte, per_tensor = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if per_tensor < 0:
            per_byte, per_tensor = by_bytes, 0.0
        elif per_byte < 0:
            per_byte, per_tensor = 0.0, by_tensors
        return Update(per_byte, per_tensor, state=state, divisible=divisible)


def _slope(rates: Sequence[float]) -> float:
    """Seconds for a unit whose number over seconds is each of the rates, by least squares of relative errors."""
    squares = sum(rate * rate for rate in rates)
    return sum(rates) / squares if squares else 0.0
