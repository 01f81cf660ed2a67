"""Local SGD, which is approximate: ranks train by themselves and average their weights from the first update on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from convoy.comm.collectives import gather_ints, start_all_reduce
from convoy.comm.groups import Groups
from convoy.plans.mesh import Axes


class LocalSgd:
    """Averages weights over `axes` after every `every` updates.

    Lin et al., Don't Use Large Mini-Batches, Use Local SGD, 2018: algorithm 1. Each rank takes steps of its own
    optimizer on the mean gradient of its own samples: its gradients must be reduced over the other axes only. The
    optimizer's momentum stays local. The result is another one than that of the global batch, and depends on the number
    of ranks.

    Every rank makes it at the same time. `tensors` are the weights and the buffers to average with them, and `weight`
    is this rank's in the average: its number of samples.
    """

    def __init__(self, tensors: Sequence[Tensor], groups: Groups, axes: Axes, *, every: int, weight: int = 1) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.is_floating_point()]
        self._group = groups.of(axes)
        self._every = every
        self._share = weight / sum(count for (count,) in gather_ints([weight], self._group))
        self._alike = False

    def step(self, update: int) -> bool:
        """Call it after each update, counted from 0; whether weights were averaged."""
        self._alike = False
        if (update + 1) % self._every:
            return False
        self.average()
        return True

    @torch.no_grad()
    def average(self) -> None:
        """Give all ranks the same weights now, as must be done before they are saved or evaluated."""
        if self._group is None or not self._tensors or self._alike:
            return
        self._alike = True
        messages = [(tensor.detach() * self._share).contiguous() for tensor in self._tensors]
        pending = [start_all_reduce(message, self._group) for message in messages]
        for tensor, work in zip(self._tensors, pending, strict=True):
            tensor.copy_(work.wait())
