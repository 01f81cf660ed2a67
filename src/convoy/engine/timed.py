"""Redistributions that note how long they take."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from convoy.engine.groups import Groups
from convoy.engine.transfer import Transfer
from convoy.plans.mesh import Coordinates, Mesh
from convoy.plans.transfer import Step


class TimedTransfer(Transfer):
    """A transfer with a record of its seconds; arguments as for `Transfer`.

    Attributes:
        shape: of the whole tensor.
        dtype: of what was sent last.
        seconds: of each time, forward and backward.
    """

    def __init__(
        self,
        step: Step,
        mesh: Mesh,
        coordinates: Coordinates,
        groups: Groups,
        shape: Sequence[int],
        channels_last: bool = False,
    ) -> None:
        super().__init__(step, mesh, coordinates, groups, shape, channels_last)
        self.shape = tuple(shape)
        self.dtype = torch.float32
        self.seconds: tuple[list[float], list[float]] = [], []

    def forward(self, x: Tensor) -> Tensor:
        """The step without autograd."""
        self.dtype = x.dtype
        return _timed(super().forward, x, self.seconds[0])

    def backward(self, gradient: Tensor) -> Tensor:
        """The conjugate of the step."""
        return _timed(super().backward, gradient, self.seconds[1])


def _timed(run: Callable[[Tensor], Tensor], x: Tensor, record: list[float]) -> Tensor:
    _wait(x)
    start = time.perf_counter()
    found = run(x)
    _wait(found)
    record.append(time.perf_counter() - start)
    return found


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
