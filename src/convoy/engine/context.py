"""What layers must know of the step in which they run: which samples they see, in which microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from convoy.engine.random import sample_keys


@dataclass
class StepContext:
    """Shared by all layers of one network; set before every forward pass in training mode.

    Attributes:
        seed: the run's seed.
        draws: whether any layer needs the keys.
        sizes: samples in each microbatch of the batch that runs now, in order.
        keys: int32 [samples, 2], the random key of every sample of that batch.
    """

    seed: int = 0
    draws: bool = False
    sizes: tuple[int, ...] = ()
    keys: Tensor = field(default_factory=lambda: torch.empty(0, 2, dtype=torch.int32))

    def enter(self, step: int, first_sample: int, sizes: Sequence[int], device: torch.device) -> None:
        """Announce the next forward pass: microbatches of `sizes`, beginning at `first_sample` of the global batch."""
        self.sizes = tuple(sizes)
        if self.draws:
            samples = range(first_sample, first_sample + sum(sizes))
            self.keys = sample_keys(self.seed, step, samples).to(device, non_blocking=True)
