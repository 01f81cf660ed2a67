"""Time of a piece where nothing can be measured: its arithmetic or its bytes, whichever takes longer.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", CACM 2009.
"""

from dataclasses import dataclass

from convoy.cost.piece import Piece
from convoy.cost.times import Times


@dataclass(frozen=True)
class Roofline:
    """A device in three numbers.

    Attributes:
        flops_per_s: what convolutions and matrix products reach, multiplications and additions both counted.
        bytes_per_s: of its memory.
        overhead_s: of starting a kernel, once forward and once backward.
    """

    flops_per_s: float
    bytes_per_s: float
    overhead_s: float = 0.0

    def __call__(self, piece: Piece, /) -> Times:
        """Seconds of a piece; views take none."""
        flops, moved = piece.flops, piece.bytes
        return Times(self._seconds(flops.forward, moved.forward), self._seconds(flops.backward, moved.backward))

    def _seconds(self, flops: int, num_bytes: int) -> float:
        if not flops and not num_bytes:
            return 0.0
        return self.overhead_s + max(flops / self.flops_per_s, num_bytes / self.bytes_per_s)
