"""What layers must know of the step in which they run: which samples they see, in which microbatches.

Where a part of a forward pass is computed again in the backward pass, it is to give the same numbers and to do nothing
else: it sees the context of its own pass, notes no statistics, and asks no other rank a second time.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from convoy.errors import ConvoyError
from convoy.ops.constants import Constants
from convoy.ops.postponed import PostponedGradients
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
        recording: whether layers note what they see: not where they compute again.
        kept: what layers keep together, by names of their own.
        postponed: the weight gradients of the passes that run now are left to it; None to compute them with the others.
        statistics: what batch norm layers saw of the microbatches since the running statistics were last brought up
            to date.
        in_turns: in evaluation every sample rank has a batch of its own, with statistics of its own where there are no
            running ones.
        tape: where the keys of passes are kept that are recorded; None where they are made for each.
    """

    seed: int = 0
    draws: bool = False
    batch_norm: BatchNormMode = "sync"
    step: int = 0
    sizes: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    keys: Tensor = field(default_factory=lambda: torch.empty(0, 2, dtype=torch.int32))
    statistics: RunningStatistics = field(default_factory=RunningStatistics)
    recording: bool = True
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)
    postponed: PostponedGradients | None = None
    in_turns: bool = False
    tape: "KeyTape | None" = field(default=None, repr=False)
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
            self.keys = self._uploaded_keys(step, samples, device)

    def _uploaded_keys(self, step: int, samples: Sequence[int], device: torch.device) -> Tensor:
        if self.tape is not None:
            return self.tape.keys(self.seed, step, samples, device)
        return uploaded(sample_keys(self.seed, step, samples), device)

    @property
    def replays(self) -> bool:
        """Whether the passes that run now are to be replayed: nothing may be asked of other ranks by the host."""
        return self.tape is not None and self.tape.is_complete

    @contextmanager
    def taped(self, tape: "KeyTape", step: int) -> Iterator[None]:
        """While entered, the keys of passes are those on a tape, from its beginning, which is that of a step."""
        tape.rewind(step)
        self.tape = tape
        try:
            yield
        finally:
            self.tape = None

    def rerun(self) -> "Rerun":
        """For a part of the pass that runs now which may be computed again, when other passes have been announced."""
        return Rerun(self, {name: getattr(self, name) for name in _OF_A_PASS})

    def need_keys(self) -> None:
        """Note that a layer needs the keys, also of a pass that has been announced already."""
        if not self.draws and self._samples:
            self.keys = self._uploaded_keys(self.step, self._samples, self._device)
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


def uploaded(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device; from pinned memory, as the host would wait for a copy from any other."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class KeyTape:
    """What the passes of an update that is recorded need of the host: keys, in buffers that are written before each
    replay, and how many samples other ranks have.

    Attributes:
        is_complete: all passes of the update are known.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._passes: list[tuple[int, Sequence[int], Tensor]] = []
        self._samples: list[tuple[int, ...]] = []
        self._next = self._next_samples = self._step = 0

    def rewind(self, step: int) -> None:
        """An update begins; this is the step of its first pass."""
        self._next, self._next_samples, self._step = 0, 0, step

    def keys(self, seed: int, step: int, samples: Sequence[int], device: torch.device) -> Tensor:
        """Those of the next pass: int32 [samples, 2].

        A pass that the update did not have before gets fresh ones: their upload is noticed, and refused.
        """
        if self.is_complete and self._next < len(self._passes):
            _, known, keys = self._passes[self._next]
            if len(known) == len(samples):
                self._next += 1
                return keys
        keys = uploaded(sample_keys(seed, step, samples), device)
        if not self.is_complete:
            self._passes.append((step - self._step, samples, keys))
        return keys

    def samples(self, ask: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """How many samples every sample rank has in the next pass: as noted, or asked of the other ranks."""
        if self.is_complete and self._next_samples < len(self._samples):
            self._next_samples += 1
            return self._samples[self._next_samples - 1]
        samples = ask()
        if not self.is_complete:
            self._samples.append(samples)
        return samples

    def write(self, seed: int, step: int) -> None:
        """Write the keys of an update."""
        for offset, samples, keys in self._passes:
            fresh = sample_keys(seed, step + offset, samples)
            keys.copy_(fresh.pin_memory() if keys.is_cuda else fresh, non_blocking=True)


_OF_A_PASS = ("step", "sizes", "starts", "keys", "postponed", "_samples", "_device")


@dataclass
class Rerun:
    """A part of a forward pass that may be computed again.

    Attributes:
        context: of the step.
        announced: what it said of the pass.
        exchanged: what came of the exchanges of statistics inside the part, in order.
    """

    context: StepContext
    announced: dict[str, Any]
    exchanged: list[Tensor] = field(default_factory=list)

    @contextmanager
    def first(self) -> Iterator[None]:
        """While entered, the part runs for the first time."""
        with _exchanging(self._noted):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """While entered, it runs again."""
        context, announced = self.context, {**self.announced, "recording": False}
        now = {name: getattr(context, name) for name in announced}
        found = iter(self.exchanged)
        vars(context).update(announced)
        try:
            with _exchanging(lambda collective, x, group: next(found)):
                yield
        finally:
            vars(context).update(now)

    def _noted(self, collective: "Collective", x: Tensor, group: ProcessGroup) -> Tensor:
        self.exchanged.append(collective(x, group))
        return self.exchanged[-1]


Collective = Callable[[Tensor, ProcessGroup], Tensor]
_exchange: ContextVar[Callable[[Collective, Tensor, ProcessGroup], Tensor] | None] = ContextVar(
    "exchange", default=None
)


@contextmanager
def _exchanging(exchange: Callable[[Collective, Tensor, ProcessGroup], Tensor]) -> Iterator[None]:
    before = _exchange.set(exchange)
    try:
        yield
    finally:
        _exchange.reset(before)


def exchanged(collective: Collective, x: Tensor, group: ProcessGroup) -> Tensor:
    """`collective(x, group)` in a kernel's forward pass, for statistics: where it is computed again, what came of it
    the first time."""
    exchange = _exchange.get()
    return collective(x, group) if exchange is None else exchange(collective, x, group)
