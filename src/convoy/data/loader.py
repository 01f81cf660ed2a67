"""Batches in the order of the run, made in this process, by a thread or by worker processes: the same ones either way.

Worker processes write pictures straight into the buffers of batches, in memory that all of them share. A batch is cut
into pieces, and whichever worker is free takes the next one; what goes between the processes are the numbers of
samples. A buffer is written to again when nobody has its batch any more.
"""

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from convoy.comm.position import current
from convoy.data.batch import Batch, BatchMaker
from convoy.data.config import DataConfig
from convoy.data.dataset import DataSet
from convoy.data.order import Order
from convoy.data.processes import Pool, SharedArray, Task
from convoy.data.sources import Source
from convoy.data.transforms import Geometry
from convoy.errors import ConvoyError
from convoy.resources import own_share

_MAX_AUTOMATIC = 32
# Batches that are made before they are asked for; workers make so many samples at least.
_AHEAD, _SAMPLES_AHEAD = 3, 512
_LEAST_PIECE, _LARGEST_PIECE = 16, 128
# Batches that have been handed out: one is asked for while the one before is used, and, on a GPU, the copies of earlier
# ones may still be on their way.
_IN_USE, _ON_THEIR_WAY = 2, 2
_NO_EPOCH = -1


@dataclass(frozen=True)
class Request:
    """A batch to make."""

    samples: NDArray[np.int64]  # int64 [n]
    epoch: int | None = None  # for which they are augmented; None for an evaluation


def training_batches(
    data: DataSet,
    config: DataConfig,
    order: Order,
    *,
    first_update: int,
    num_updates: int,
    seed: int,
    positions: range | None = None,
    pin_memory: bool = False,
) -> Generator[Batch, None, None]:
    """The batches of some updates of the run, across its epochs: batch k depends on (seed, k) alone. `positions` are
    those of this rank in every batch, None all. Close the generator to end the worker processes. Raises ConvoyError for
    a picture that cannot be read, MachineError where a worker died."""
    maker = batch_maker(data, config, data.train, seed)
    part = slice(None) if positions is None else slice(positions.start, positions.stop)

    updates = map(order.update, range(first_update, first_update + num_updates))
    requests = (Request(samples[part], epoch) for epoch, samples in updates)
    largest = len(range(order.batch)[part])
    workers = min(num_workers(data, config)[0], num_updates)
    return _run(maker, requests, largest, workers, pin_memory)


def evaluation_batches(
    data: DataSet, config: DataConfig, *, batch: int, part: int = 0, num_parts: int = 1, pin_memory: bool = False
) -> Generator[Batch, None, None]:
    """Every sample of the test split exactly once, in order, resized and cut in the center. `num_parts` ranks take
    turns at the batches; all get equally many, so that the last ones may be smaller or empty."""
    if batch < 1:
        raise ConvoyError(f"batch {batch} is not a number of samples: set it to at least 1")
    maker = batch_maker(data, config, data.test, seed=0).at(None)
    num_batches = -(-len(data.test) // (batch * num_parts))
    starts = range(part * batch, num_batches * num_parts * batch, num_parts * batch)
    requests = (Request(np.arange(start, max(start, min(start + batch, len(data.test))))) for start in starts)
    workers = min(num_workers(data, config)[0], num_batches)
    largest = min(batch, len(data.test))
    return _run(maker, requests, largest, workers, pin_memory)


def num_workers(data: DataSet, config: DataConfig) -> tuple[int, str]:
    """The number of worker processes, and why: 0 where a batch is taken from memory at once; else one per core of this
    process's share, up to 32, which is what one GPU can use up."""
    if config.workers is not None:
        return config.workers, "as the recipe says"
    if batch_maker(data, config, data.train, seed=0).vectorised:
        return 0, "pictures in memory need no worker processes"
    share = own_share()
    return min(max(int(share), 1), _MAX_AUTOMATIC), f"min({share:.3g} cores of this process, {_MAX_AUTOMATIC})"


def samples_ahead(batch: int) -> int:
    """Samples that workers make before they are asked for: three batches, and more where these are small."""
    return max(_AHEAD * batch, _SAMPLES_AHEAD)


def batch_maker(data: DataSet, config: DataConfig, source: Source, seed: int) -> BatchMaker:
    """The maker of the batches of one of the splits."""
    geometry = Geometry(data.image_size, data.resize, config.augment, data.evaluation_size, config.progressive)
    skip_bad, decoder = config.bad_images == "skip", config.decoder or "pillow"
    return BatchMaker(source, geometry, data.channels, seed, skip_bad, decoder, config.ignore_index)


def check_augmentation(data: DataSet, config: DataConfig, seed: int) -> None:
    """Refuse an augmentation of the user's that cannot change the first training picture, or does so otherwise each
    time."""
    if config.augment.function is None:
        return
    first = np.zeros(1, np.int64)
    one, other = (batch_maker(data, config, data.train, seed).at(0).make(first, 0).images for _ in range(2))
    if not torch.equal(one, other):
        raise ConvoyError(
            f"the augmentation {config.augment.function} changes a picture otherwise each time: let it draw random "
            "numbers from the generator that it is given, and from nothing else"
        )


def _run(
    maker: BatchMaker, requests: Iterator[Request], largest: int, workers: int, pin_memory: bool
) -> Generator[Batch, None, None]:
    """The batches of some requests, made by worker processes, by a thread beside a GPU, or by this process."""
    if workers and largest:
        with closing(Workers(maker, requests, largest, workers, pin_memory).batches()) as batches:
            yield from batches
    elif pin_memory:
        with closing(_by_thread(maker, requests)) as batches:
            yield from batches
    else:
        for request in requests:
            with current.waiting_for_samples(partial(_reads, maker.source, request)):
                batch = maker.at(request.epoch).make(request.samples, request.epoch)
            yield batch


def _by_thread(maker: BatchMaker, requests: Iterator[Request]) -> Generator[Batch, None, None]:
    """Batches in their order, made ahead by a thread; closing the generator ends it. To gather and pin 256 pictures of
    224 px takes 25 to 38 ms, in which numpy leaves the interpreter to others: a GPU would wait for it each time."""
    pool = ThreadPoolExecutor(1, "convoy-pictures")

    def make(request: Request) -> Batch:
        return maker.at(request.epoch).make(request.samples, request.epoch).pin_memory()

    pending = deque[tuple[Request, Future[Batch]]]()
    try:
        while True:
            coming = islice(requests, _AHEAD - len(pending))
            pending.extend((request, pool.submit(make, request)) for request in coming)
            if not pending:
                return
            request, batch = pending.popleft()
            with current.waiting_for_samples(partial(_reads, maker.source, request)):
                made = batch.result()
            yield made
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a file system that does not answer holds up nobody


def _reads(source: Source, request: Request) -> str:
    return f"this process reads {source.names(request.samples % len(source))}"


class Buffers:
    """Memory for batches that are made ahead, in one block that worker processes share and a GPU reads: a row for each
    sample. A buffer is free when nobody has its batch."""

    def __init__(
        self,
        num: int,
        largest: int,
        shape: tuple[int, ...],
        *,
        pin_memory: bool = False,
        memory: SharedArray | None = None,
    ) -> None:
        self._options, self._shape = (num, largest, shape), (largest, *shape)
        self._begin, self._size = 8 * num * largest, int(np.prod(self._shape))
        self._memory = memory or SharedArray(np.uint8, (self._begin + num * self._size,))
        # [buffers, samples]: the samples that a buffer is to get, then those that it got
        self.samples = np.frombuffer(self._memory.bytes, np.int64, num * largest).reshape(num, largest)
        self.free = deque(range(num))
        self._out: dict[int, weakref.ref[NDArray[np.uint8]]] = {}
        self.pinned = pin_memory and self._pin()

    def __reduce__(self) -> Any:
        return partial(Buffers, memory=self._memory), self._options

    def __getitem__(self, slot: int) -> NDArray[np.uint8]:
        """Rows [samples, ...] of a buffer."""
        block = memoryview(self._memory.bytes)
        return np.frombuffer(block, np.uint8, self._size, self._begin + slot * self._size).reshape(self._shape)

    def hand_out(self, slot: int, copied: bool) -> NDArray[np.uint8]:
        """The same, free again once nothing refers to them, or at once where a copy is handed out."""
        rows, free = self[slot], self.free
        if copied:
            free.append(slot)
            return rows.copy()
        block: Any = rows.base  # which views of the rows refer to
        self._out[slot] = weakref.ref(block, lambda _: free.append(slot))
        return rows

    def _pin(self) -> bool:
        """Pin the memory where that is possible, so that copies to a GPU need not wait."""
        block = np.frombuffer(self._memory.bytes, np.uint8)
        runtime: Any = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(block.ctypes.data, block.nbytes, 0)) != 0:
            with suppress(RuntimeError):  # or the next kernel would be blamed for it
                torch.zeros(1, device="cuda")
            return False
        weakref.finalize(self, runtime.cudaHostUnregister, block.ctypes.data).atexit = False
        return True


def rows_of(buffer: NDArray[np.uint8], shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Rows [samples, *shape] in the memory of a buffer, whose own may be larger."""
    return buffer.reshape(-1)[: len(buffer) * int(np.prod(shape))].reshape(-1, *shape)


@dataclass
class _Pending:
    """A batch that is being made, in a buffer. `pieces` are the answers by their starts: the number of pictures that
    were written, and those that could not be read; or the error."""

    request: Request
    slot: int
    pieces: dict[int, tuple[int, list[tuple[int, str]]] | Exception | None] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return None not in self.pieces.values()


class Workers:
    """Makes batches in their order, by some processes.

    torch's `DataLoader` has workers that make a whole batch each, copy it to new shared memory and hand that over, and
    a thread that pins it. Threads of this process in their place would take the interpreter's lock, for a quarter of
    the time of a raw picture, from the loop that issues the network's work.
    """

    def __init__(
        self, maker: BatchMaker, requests: Iterator[Request], largest: int, processes: int, pin_memory: bool = False
    ) -> None:
        self._maker, self._requests, self._num, self._pin_memory = maker, requests, processes, pin_memory
        ahead = samples_ahead(largest)
        self._piece = min(max(-(-ahead // (4 * processes)), _LEAST_PIECE), _LARGEST_PIECE)
        self._ahead = -(-(ahead + processes * self._piece) // largest)
        num = self._ahead + _IN_USE + (_ON_THEIR_WAY if pin_memory else 0)
        self._buffers = Buffers(num, largest, maker.shape, pin_memory=pin_memory)
        self._pool = Pool("loads pictures", "lower data.workers", processes, _filler, maker, self._buffers)
        self._pending: deque[_Pending] = deque()
        self._unsent: deque[Task] = deque()
        self._first = self._last = 0  # numbers of the first batch that is pending, and of the one after the last
        self._fill, self._begun = partial(_fill, maker, self._buffers), False

    def batches(self) -> Generator[Batch, None, None]:
        """All batches. Closing the generator ends the processes."""
        with closing(self._pool), ThreadPoolExecutor(1, "convoy-pictures") as thread:
            start = thread.submit(self._pool.start, self._num)
            while self._send(start):
                with current.waiting_for_samples(self._late):
                    while not self._pending[0].is_done:
                        for (batch, _, begin, *_), answer in self._made():
                            self._pending[batch - self._first].pieces[begin] = answer
                        current.moved = time.monotonic()
                        self._send(start)
                self._first += 1
                yield self._finished(self._pending.popleft())

    def _made(self) -> Iterator[tuple[Task, Any]]:
        """Pieces that are done. This process makes them while the others begin: the first import what they need."""
        if self._begun:
            yield from self._pool.receive()
            return
        task = self._unsent.popleft()
        try:
            yield task, self._fill(*task)
        except Exception as error:
            yield task, error

    def _send(self, start: Future[None]) -> bool:
        """Hand out work for the batches to come, once the processes have begun; returns whether any batch is left."""
        low = len(self._pending) <= self._ahead // 2  # several at once, so that workers are woken up seldom
        while low and len(self._pending) < self._ahead and self._buffers.free:
            request = next(self._requests, None)
            if request is None:
                break
            num, slot = len(request.samples), self._buffers.free.popleft()
            epoch = _NO_EPOCH if request.epoch is None else request.epoch
            starts = range(0, num, self._piece)
            self._buffers.samples[slot, :num] = request.samples
            self._pending.append(_Pending(request, slot, dict.fromkeys(starts)))
            self._unsent.extend((self._last, slot, start, min(start + self._piece, num), epoch) for start in starts)
            self._last += 1
        if not self._begun and start.done():
            start.result()
            self._begun = True
        room = min(len(self._unsent), Pool.MOST_SENT - self._pool.num_sent) if self._begun else 0
        self._pool.send([self._unsent.popleft() for _ in range(room)])
        return bool(self._pending)

    def _late(self) -> str:
        """A sentence on who holds the batch up, and with which samples."""
        if not self._begun:
            return _reads(self._maker.source, self._pending[0].request)
        sentences = []
        for process, task in self._pool.held() if self._pending else ():
            number, _, start, end, _ = task or (self._first, 0, 0, None, 0)
            source, samples = self._maker.source, self._pending[number - self._first].request.samples[start:end]
            names = source.names(samples % len(source))
            sentences.append(f"{process} has not {'delivered' if task else 'taken'} {names}")
        return "; ".join(sentences)

    def _finished(self, pending: _Pending) -> Batch:
        """The batch in its buffer, or in a copy where the last free buffer would go; errors come with their batch."""
        places: list[int] = []
        bad: list[tuple[int, str]] = []
        for start, answer in pending.pieces.items():
            assert answer is not None
            if isinstance(answer, Exception):
                raise answer
            places += range(start, start + answer[0])
            bad += answer[1]
        request, slot = pending.request, pending.slot
        samples = self._buffers.samples[slot, : len(request.samples)].copy()
        buffer = self._buffers.hand_out(slot, copied=not self._buffers.free)
        images = rows_of(buffer, self._maker.at(request.epoch).shape)
        if len(places) < len(samples):  # an evaluation, some of whose pictures cannot be read
            images, samples = images[places], samples[places]
        batch = self._maker.batch(torch.from_numpy(images), samples, bad, request.epoch)
        if not self._pin_memory:
            return batch
        return replace(batch, targets=batch.targets.pin_memory()) if self._buffers.pinned else batch.pin_memory()


def _filler(maker: BatchMaker, buffers: Buffers) -> Callable[..., tuple[int, list[tuple[int, str]]]]:
    """In a worker: the function that makes a piece."""
    torch.set_num_threads(1)
    with suppress(AttributeError, OSError):  # a worker that wakes up does not take the core from a thread that computes
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with suppress(ImportError):
        import cv2

        cv2.setNumThreads(1)
    return partial(_fill, maker, buffers)


def _fill(
    maker: BatchMaker, buffers: Buffers, batch: int, slot: int, start: int, end: int, epoch: int
) -> tuple[int, list[tuple[int, str]]]:
    """Write the pictures of a piece to their buffer."""
    samples, epoch_or_none = buffers.samples[slot, start:end], None if epoch == _NO_EPOCH else epoch
    maker_of_size = maker.at(epoch_or_none)
    rows = rows_of(buffers[slot], maker_of_size.shape)
    used, bad = maker_of_size.fill(rows[start:end], samples.copy(), epoch_or_none)
    samples[: len(used)] = used
    return len(used), bad
