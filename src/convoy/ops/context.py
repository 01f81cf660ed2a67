"""What layers must know of the step in which they run: which samples they see, in which microbatches.

A part of a forward pass that is computed again in the backward pass must give the same numbers and do nothing else: it
sees the context of its own pass, notes no statistics, and asks no other rank a second time. Kernels read the context,
so it is here, below the engine, which announces passes to it.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from convoy.errors import ConvoyError
from convoy.ops.gpu import Constants
from convoy.ops.postponed import PostponedGradients
from convoy.ops.random_bits import sample_keys
from convoy.ops.statistics import RunningStatistics

BatchNormMode = Literal["microbatch", "sync", "local"]


@dataclass
class StepContext:
    """Shared by all layers of one network; set before every forward pass in training mode.

    On several devices `sizes`, `starts` and `keys` are those of the samples of all ranks together, in order of rank: a
    layer takes what belongs to the samples that it holds.
    """

    seed: int = 0  # of the run
    draws: bool = False  # whether any layer needs the keys
    # over which samples statistics are taken where the layers are divided over devices
    batch_norm: BatchNormMode = "sync"
    step: int = 0  # number of the weight update
    sizes: tuple[int, ...] = ()  # samples in each microbatch of the current pass, in order
    starts: tuple[int, ...] = ()  # position of each microbatch's first sample in the global batch
    # int32 [samples, 2], the random key of every sample of that pass
    keys: Tensor = field(default_factory=lambda: torch.empty(0, 2, dtype=torch.int32))
    # of batch norm layers and microbatches since the running statistics were last updated
    statistics: RunningStatistics = field(default_factory=RunningStatistics)
    recording: bool = True  # whether layers record statistics: not where they compute again
    # gets the weight gradients of the current passes; None to compute them with the other gradients
    postponed: PostponedGradients | None = None
    # in evaluation every sample rank has a batch of its own, with its own statistics where there are no running ones
    in_turns: bool = False
    # holds the keys of recorded passes; None where they are made for each pass
    tape: "KeyTape | None" = field(default=None, repr=False)
    _samples: Sequence[int] = field(default=(), repr=False)
    _device: torch.device = field(default=torch.device("cpu"), repr=False)

    def enter(self, step: int, samples: int | Sequence[int], sizes: Sequence[int], device: torch.device) -> None:
        """Announce the next forward pass. `samples` are positions in the global batch; a number stands for consecutive
        ones from there on. `sizes` are those of the microbatches, in order, whose samples follow each other in the
        global batch; `device` is where the keys are needed."""
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
        """Whether the passes that run now are to be replayed, so that the host may ask nothing of other ranks."""
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
        """For a part of the current pass that may be computed again after other passes have been announced."""
        return Rerun(self, {name: getattr(self, name) for name in _OF_A_PASS})

    def need_keys(self) -> None:
        """Note that a layer needs the keys, also of a pass that has been announced already."""
        if not self.draws and self._samples:
            self.keys = self._uploaded_keys(self.step, self._samples, self._device)
        self.draws = True

    def keys_of(self, samples: range | Constants, count: int) -> Tensor:
        """Keys of some samples of a pass of `count`, by their positions in the pass: int32 [samples, 2]."""
        if len(self.keys) != count:
            raise ConvoyError(
                f"the network draws random numbers for {count} samples, but {len(self.keys)} were announced: call it "
                "in training mode by itself, or tell its context of the pass first"
            )
        if isinstance(samples, range):
            return self.keys[samples.start : samples.stop]
        return self.keys.index_select(0, samples.like(self.keys, torch.int64))


def uploaded(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device; from pinned memory, as the host would wait for a copy from any other."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class KeyTape:
    """The inputs that the passes of a recorded update need of the host: keys, in buffers that are written before each
    replay, and how many samples other ranks have."""

    def __init__(self) -> None:
        self.is_complete = False  # once all passes of the update are known
        self._passes: list[tuple[int, Sequence[int], Tensor]] = []
        self._samples: list[tuple[int, ...]] = []
        self._next = self._next_samples = self._step = 0

    def rewind(self, step: int) -> None:
        """Begin an update, whose first pass is that of `step`."""
        self._next, self._next_samples, self._step = 0, 0, step

    def keys(self, seed: int, step: int, samples: Sequence[int], device: torch.device) -> Tensor:
        """The keys of the next pass: int32 [samples, 2]. A pass that the update did not have before gets fresh ones:
        their upload is noticed, and refused."""
        if self.is_complete and self._next < len(self._passes):
            _, noted_samples, keys = self._passes[self._next]
            if len(noted_samples) == len(samples):
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
        for offset, samples, keys in self._passes:
            fresh = sample_keys(seed, step + offset, samples)
            keys.copy_(fresh.pin_memory() if keys.is_cuda else fresh, non_blocking=True)


_OF_A_PASS = ("step", "sizes", "starts", "keys", "postponed", "_samples", "_device")


@dataclass
class Rerun:
    """A part of a forward pass that may be computed again."""

    context: StepContext
    announced: dict[str, Any]  # the context of its pass
    # results of the exchanges of statistics inside the part, in order
    exchanged: list[Tensor] = field(default_factory=list)

    def first(self) -> AbstractContextManager[None]:
        return _exchanging(self._noted)

    @contextmanager
    def again(self) -> Iterator[None]:
        context, announced = self.context, {**self.announced, "recording": False}
        current = {name: getattr(context, name) for name in announced}
        results = iter(self.exchanged)
        vars(context).update(announced)
        try:
            with _exchanging(lambda collective, x, group: next(results)):
                yield
        finally:
            vars(context).update(current)

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
    """`collective(x, group)` in a kernel's forward pass, for statistics: where it is computed again, the result of the
    first time."""
    exchange = _exchange.get()
    return collective(x, group) if exchange is None else exchange(collective, x, group)
