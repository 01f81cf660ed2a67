"""What layers must know of the step in which they run: which samples they see, in which microbatches."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from convoy.errors import ConvoyError
from convoy.ops.constants import Constants
from convoy.ops.random_bits import sample_keys
from convoy.ops.statistics import RunningStatistics
from convoy.plans.layout import Indices

BatchNormMode = Literal["microbatch", "sync", "local"]


@dataclass
class StepContext:
    """Shared by all layers of one network; set before every forward pass in training mode.

    On several devices `sizes`, `starts` and `keys` are those of the samples of all ranks together, in order of rank:
    a layer takes what belongs to the samples that it holds.

    Attributes:
        seed: the run's seed.
        draws: whether any layer needs the keys.
        batch_norm: over which samples statistics are taken where the layers are divided over devices.
        step: number of the weight update.
        sizes: samples in each microbatch of the pass that runs now, in order.
        starts: position of each microbatch's first sample in the global batch.
        keys: int32 [samples, 2], the random key of every sample of that pass.
        kept: what layers keep together, by names of their own.
        statistics: what batch norm layers saw of the microbatches since the running statistics were last brought up
            to date.
    """

    seed: int = 0
    draws: bool = False
    batch_norm: BatchNormMode = "sync"
    step: int = 0
    sizes: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    keys: Tensor = field(default_factory=lambda: torch.empty(0, 2, dtype=torch.int32))
    statistics: RunningStatistics = field(default_factory=RunningStatistics)
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)
    _samples: Sequence[int] = field(default=(), repr=False)
    _device: torch.device = field(default=torch.device("cpu"), repr=False)

    def enter(self, step: int, samples: int | Sequence[int], sizes: Sequence[int], device: torch.device) -> None:
        """Announce the next forward pass.

        Args:
            step: number of the weight update.
            samples: positions in the global batch of the samples of the pass; a number stands for consecutive ones
                from there on.
            sizes: of the pass's microbatches, in order; a microbatch's samples follow each other in the global batch.
            device: where the keys are needed.
        """
        self.step = step
        if isinstance(samples, int):
            samples = range(samples, samples + sum(sizes))
        if samples is not self._samples or self.sizes != tuple(sizes):  # most passes are as the one before
            self.sizes = tuple(sizes)
            assert len(samples) == sum(sizes), f"{len(samples)} samples in microbatches of {self.sizes}"
            ends = itertools.accumulate(self.sizes)
            self.starts = tuple(samples[end - size] if size else -1 for size, end in zip(self.sizes, ends, strict=True))
        self._device = device
        self._samples = samples
        if self.draws:
            self.keys = sample_keys(self.seed, step, samples).to(device, non_blocking=True)

    def need_keys(self) -> None:
        """Note that a layer needs the keys, also of a pass that has been announced already."""
        if not self.draws and self._samples:
            self.keys = sample_keys(self.seed, self.step, self._samples).to(self._device)
        self.draws = True

    def keys_of(self, samples: Indices, count: int) -> Tensor:
        """Keys of some samples of a pass of `count`, by their positions in the pass: int32 [samples, 2]."""
        if len(self.keys) != count:
            raise ConvoyError(
                f"the network draws random numbers for {count} samples, but {len(self.keys)} were announced: call it "
                "in training mode by itself, or tell its context of the pass first"
            )
        if isinstance(samples, range):
            return self.keys[samples.start : samples.stop]
        places = self.kept.get(("places", samples))
        if places is None:
            places = self.kept["places", samples] = Constants(samples)
        return self.keys.index_select(0, places.like(self.keys, torch.int64))
