"""What a device and its links cost, in one place: all that a step is predicted from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from convoy.engine.profiling import Times as Times  # part of what costs are
from convoy.planner.cost.link import Link, Links
from convoy.planner.cost.local_op import BatchNorm, LocalOp
from convoy.plans.buckets import Sizes
from convoy.plans.mesh import Axes, Mesh


def mean(times: Sequence[Times]) -> Times:
    """The mean; of none, no time."""
    total, part = sum(times, Times()), 1 / max(1, len(times))
    return Times(*(seconds * part for seconds in total.numbers))


@dataclass(frozen=True)
class Update:
    """Seconds of an optimizer on a device, and the memory of its state."""

    per_byte: float = 0.0  # of the parameters: one pass over weights, gradients and state
    per_tensor: float = 0.0
    fixed: float = 0.0  # with whatever else is done once in an update
    state: float = 1.0  # bytes of state for each byte of a parameter: 1 for a momentum, 2 for Adam's two averages
    host: float = 0.0  # for the host to issue it once, with whatever else it does once in an update
    host_per_tensor: float = 0.0

    def seconds(self, num_bytes: float, tensors: int) -> float:
        """Of the optimizer, without what is done once."""
        return self.per_byte * num_bytes + self.per_tensor * tensors

    def issuing(self, tensors: int) -> float:
        return self.host + self.host_per_tensor * tensors

    @staticmethod
    def fit(measured: Sequence[tuple[int, int, float]], *, state: float = 1.0) -> "Update":
        """From measured updates: bytes of the parameters, how many they are, and seconds. The rates for a byte and for
        a tensor are the least squares of relative errors."""
        rows = [(num_bytes / seconds, tensors / seconds) for num_bytes, tensors, seconds in measured if seconds > 0]
        per_byte, per_tensor = least_squares(rows, [1.0] * len(rows))
        return Update(per_byte, per_tensor, state=state)


def least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float], count: int = 2) -> list[float]:
    """The `count` rates by which the rows come nearest to the targets; of one that would be below zero the column
    goes."""
    rates, columns = [0.0] * count, list(range(count))
    while rows and columns:
        solution = np.linalg.lstsq(np.array(rows)[:, columns], np.array(targets), rcond=None)[0].tolist()
        if min(solution) >= 0:
            for column, rate in zip(columns, solution, strict=True):
                rates[column] = rate
            break
        columns.remove(columns[solution.index(min(solution))])
    return rates


# Says how long a rank takes for an operation, while nobody takes its cores away
LayerTimes = Callable[[LocalOp], Times]


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


@dataclass(frozen=True)
class HostCost:
    """Work for a pass outside of the network, on each rank for its own samples; in seconds."""

    per_pass: float = 0.0
    per_sample: float = 0.0
    beside: bool = False  # others do it while the rank computes, so that an update waits only for what is left of it
    host: float = 0.0  # for the host to issue it, once; 0 where it is the device

    def seconds(self, samples: float) -> float:
        return self.per_pass + self.per_sample * samples


@dataclass(frozen=True)
class Costs:
    """Times on one kind of device, all in seconds and bytes."""

    times: LayerTimes  # of single operations
    links: Links = field(default_factory=Links)
    update: Update = field(default_factory=Update)
    input: HostCost = field(default_factory=HostCost)  # getting a batch, taking it to the device, normalizing it
    loss: HostCost = field(default_factory=HostCost)  # forward and backward
    batch_norm: BatchNorm = "sync"
    microbatch: int = 0  # samples of each, where that matters to batch norm; 0 for one microbatch a pass
    on_cpu: bool = True
    sizes: Sizes | None = None  # of the messages with gradients; by default the engine's for the device
    per_parameter: float = 0.0  # the engine's, in an update for each parameter whose gradient is added over ranks
    # how many times as long as in `times` each rank computes (more is slower); empty for equal ranks
    slowdowns: tuple[float, ...] = ()
    host_per_parameter: float = 0.0  # `per_parameter` of the host, where that is not the device
    recorded: bool = False  # passes without stages are replayed as CUDA graphs, which cost the host nothing

    _times: dict[LocalOp, Times] = field(default_factory=dict, init=False, repr=False, compare=False)
    _links: dict[tuple[Mesh, Axes], Link] = field(default_factory=dict, init=False, repr=False, compare=False)

    def time(self, local_op: LocalOp) -> Times:
        """`times`, asked once for equal operations."""
        if local_op not in self._times:
            self._times[local_op] = self.times(local_op)
        return self._times[local_op]

    def link(self, mesh: Mesh, axes: Axes) -> Link:
        """The link of the groups over some axes, asked once for them."""
        if (mesh, axes) not in self._links:
            self._links[mesh, axes] = self.links.of(mesh, axes)
        return self._links[mesh, axes]

    @property
    def message_sizes(self) -> Sizes:
        return self.sizes or Sizes.default(torch.device("cpu" if self.on_cpu else "cuda"))
