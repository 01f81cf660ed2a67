"""Seconds of an operation forward and backward, and where they come from: a table of measurements, or a roofline.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", CACM 2009.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from convoy.planner.cost.local_op import LocalOp


@dataclass(frozen=True)
class Times:
    """Seconds of one forward and one backward pass."""

    forward: float = 0.0  # of the device; likewise `backward`
    backward: float = 0.0
    host_forward: float = 0.0  # of the host that issues them; 0 where the host is the device
    host_backward: float = 0.0

    def __add__(self, other: "Times") -> "Times":
        return Times(*map(operator.add, self.numbers, other.numbers))

    def __mul__(self, factor: float) -> "Times":
        """Scale the device's seconds; the host takes as long as before."""
        return replace(self, forward=self.forward * factor, backward=self.backward * factor)

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        return self.forward, self.backward, self.host_forward, self.host_backward

    @property
    def total(self) -> float:
        return self.forward + self.backward

    @property
    def host(self) -> float:
        return self.host_forward + self.host_backward


class LayerTimes(Protocol):
    """Anything that says how long a rank takes for an operation, while nobody takes its cores away."""

    def __call__(self, local_op: LocalOp, /) -> Times: ...


class Table:
    """Times that were measured, by `LocalOp.key`, and another source for all else."""

    def __init__(self, measured: Mapping[str, Times], otherwise: LayerTimes) -> None:
        self.measured = dict(measured)
        self.otherwise = otherwise

    def __call__(self, local_op: LocalOp, /) -> Times:
        times = self.measured.get(local_op.key)
        return self.otherwise(local_op) if times is None else times


@dataclass(frozen=True)
class Roofline:
    """A device in three numbers."""

    flops_per_s: float  # of convolutions and matrix products, multiplications and additions both counted
    bytes_per_s: float  # of its memory
    overhead_s: float = 0.0  # to start a kernel, once forward and once backward

    def __call__(self, local_op: LocalOp, /) -> Times:
        flops, moved = local_op.flops, local_op.bytes
        return Times(self._seconds(flops.forward, moved.forward), self._seconds(flops.backward, moved.backward))

    def _seconds(self, flops: int, num_bytes: int) -> float:
        if not flops and not num_bytes:
            return 0.0
        return self.overhead_s + max(flops / self.flops_per_s, num_bytes / self.bytes_per_s)
