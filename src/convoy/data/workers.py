"""Worker processes that write pictures straight into the buffers of batches, in memory that all of them share.

A batch is cut into pieces, and whichever worker is free takes the next one; what goes between the processes are the
numbers of samples. A buffer is written to again when nobody has its batch any more.
"""

import os
import pickle
import select
import struct
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from convoy.comm.memory import lack_of_memory
from convoy.comm.position import current
from convoy.data.batch import Batch, BatchMaker, Filled
from convoy.data.processes import SharedArray, follow_parent, forkserver
from convoy.errors import ConvoyError, MachineError

_LEAST_PIECE, _LARGEST_PIECE = 16, 128
# Batches and samples that are made ahead, besides those that keep every worker busy.
_AHEAD, _SAMPLES_AHEAD = 3, 512
# A piece: number of the batch, its buffer, first and last place in that (exclusive), and epoch, or -1 for none. The
# workers read from one pipe. It has whole tasks only, as nobody writes or reads anything else, and what is as short is
# written and read at once: no lock is needed, which a worker that dies could keep.
_TASK = struct.Struct("5q")
# Pieces that are on their way: as many as the smallest pipe takes, so that sending never waits for a worker.
_MOST_SENT = 64
# More workers start when this part of the time is spent waiting, which is checked after so many batches.
_WAITED, _LOOK_EVERY = 0.01, 5


# Batches that have been handed out: one is asked for while the one before is used, and, on a GPU, the copies of earlier
# ones may still be on their way.
_IN_USE, _ON_THEIR_WAY = 2, 2


class Buffers:
    """Memory for batches that are made ahead, in one block that worker processes share and a GPU reads: a row for each
    sample. A buffer is free when nobody has its batch."""

    def __init__(
        self,
        ahead: int,
        largest: int,
        shape: tuple[int, ...],
        *,
        pin_memory: bool = False,
        memory: SharedArray | None = None,
    ) -> None:
        num = ahead + _IN_USE + (_ON_THEIR_WAY if pin_memory else 0)
        self._options = ahead, largest, shape
        self._shape = (largest, *shape)
        self._begin, self._size = 8 * num * largest, int(np.prod(self._shape))
        self._memory = memory or SharedArray(np.uint8, (self._begin + num * self._size,))
        # [buffers, samples]: the samples that a buffer is to get, then those that it got
        self.samples = np.frombuffer(self._memory.bytes, np.int64, num * largest).reshape(num, largest)
        self.free = deque(range(num))
        self._out: dict[int, weakref.ref[NDArray[np.uint8]]] = {}
        self._pin_memory = pin_memory
        self.pinned = pin_memory and memory is None and self._pin()

    def __reduce__(self) -> Any:
        return partial(Buffers, pin_memory=self._pin_memory, memory=self._memory), self._options

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


@dataclass(frozen=True)
class Request:
    """A batch to make."""

    samples: NDArray[np.int64]  # int64 [n]
    epoch: int | None = None  # for which they are augmented; None for an evaluation


# The number of pictures of a piece that were written, and those that could not be read; or the error.
_Answer = tuple[int, list[tuple[int, str]]] | Exception


@dataclass
class _Pending:
    """A batch that is being made: its buffer, and the answers on its pieces, by their starts."""

    request: Request
    slot: int
    pieces: dict[int, _Answer | None] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return None not in self.pieces.values()


def samples_ahead(batch: int) -> int:
    """Samples that workers make before they are asked for: three batches, and more where these are small."""
    return max(_AHEAD * batch, _SAMPLES_AHEAD)


class Workers:
    """Makes batches in their order, by `most` processes, `first` of which begin (None: all) and others start while
    batches are waited for. `told` gets their number whenever more have started."""

    def __init__(
        self,
        maker: BatchMaker,
        requests: Iterator[Request],
        largest: int,
        *,
        most: int,
        first: int | None = None,
        pin_memory: bool = False,
        told: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._maker, self._requests, self._told = maker, requests, told
        self._most, self._begin_with = most, most if first is None else first
        largest = max(largest, 1)
        ahead = samples_ahead(largest)
        self._piece = min(max(-(-ahead // (4 * most)), _LEAST_PIECE), _LARGEST_PIECE)
        self._ahead = -(-(ahead + most * self._piece) // largest)
        self._buffers = Buffers(self._ahead, largest, maker.shape, pin_memory=pin_memory)
        self._pin_memory = pin_memory
        self._pending: deque[_Pending] = deque()
        self._unsent: deque[tuple[int, int]] = deque()  # number of a batch, start of the piece
        self._first = self._last = self._sent = 0
        self._context = forkserver(__name__)
        self._taken, self._tasks = self._context.Pipe(duplex=False)
        self._processes: dict[connection.Connection, BaseProcess] = {}
        # The piece that each process makes: number of the batch, first and last place; all 0 where it has none.
        self._held = SharedArray(np.int64, (most, 3))
        # One poll object for all waits: those of multiprocessing set up a selector each time.
        self._poll, self._speakers = select.poll(), dict[int, tuple[connection.Connection, BaseProcess]]()
        self._asked, self._waits, self._since = 0, 0.0, time.perf_counter()

    @property
    def num(self) -> int:
        return len(self._processes)

    def batches(self) -> Generator[Batch, None, None]:
        """All batches. Closing the generator ends the processes."""
        try:
            with current.waiting_for_samples(self._late):
                self._start(self._begin_with)
            while self._send():
                began = time.perf_counter()
                with current.waiting_for_samples(self._late):
                    while not self._pending[0].is_done:
                        self._receive()
                self._adapt(time.perf_counter() - began)
                self._first += 1
                yield self._finished(self._pending.popleft())
        finally:
            self.close()

    def close(self) -> None:
        processes, self._processes, self._poll = self._processes, {}, select.poll()
        for process in processes.values():
            process.kill()  # there is nothing to clean up, and SIGTERM may be ignored
        for results, process in processes.items():
            process.join()
            process.close()
            results.close()
        self._taken.close()
        self._tasks.close()

    def _start(self, number: int) -> None:
        try:
            for _ in range(number):
                results, sender = self._context.Pipe(duplex=False)
                arguments = self._maker, self._buffers, self._taken, sender, self._held, self.num
                process = self._context.Process(target=_work, args=arguments, name="convoy-pictures", daemon=True)
                process.start()
                sender.close()
                self._processes[results] = process
                for speaker in (results.fileno(), process.sentinel):
                    self._speakers[speaker] = results, process
                    self._poll.register(speaker, select.POLLIN)
        except (OSError, EOFError) as error:
            raise _died(error) from error

    def _send(self) -> bool:
        """Hand out work for the batches to come; returns whether any batch is left."""
        low = len(self._pending) <= self._ahead // 2  # several at once, so that workers are woken up seldom
        while low and len(self._pending) < self._ahead and self._buffers.free:
            request = next(self._requests, None)
            if request is None:
                break
            starts, slot = range(0, len(request.samples), self._piece), self._buffers.free.popleft()
            self._buffers.samples[slot, : len(request.samples)] = request.samples
            self._pending.append(_Pending(request, slot, dict.fromkeys(starts)))
            self._unsent.extend((self._last, start) for start in starts)
            self._last += 1
        tasks = b""
        while self._unsent and self._sent < _MOST_SENT:
            number, start = self._unsent.popleft()
            pending = self._pending[number - self._first]
            end, epoch = min(start + self._piece, len(pending.request.samples)), pending.request.epoch
            tasks += _TASK.pack(number, pending.slot, start, end, -1 if epoch is None else epoch)
            self._sent += 1
        if tasks:
            os.write(self._tasks.fileno(), tasks)
        return bool(self._pending)

    def _receive(self) -> None:
        """Wait for a worker, and take all answers that are there."""
        ready = self._poll.poll()
        while ready:
            for number, _ in ready:
                results, process = self._speakers[number]
                if number == process.sentinel:
                    process.join()
                    raise _died(f"exit status {process.exitcode}")
                try:
                    batch, start, answer = results.recv()
                except (EOFError, OSError) as error:
                    raise _died(error) from error
                self._sent -= 1
                self._pending[batch - self._first].pieces[start] = answer
            ready = self._poll.poll(0)
        current.moved = time.monotonic()
        self._send()

    def _late(self) -> str:
        """A sentence on who holds the batch up, and with which samples."""
        sentences = []
        for process, (number, start, end) in zip(self._processes.values(), self._held.array.tolist(), strict=False):
            state = _STATES.get(_state(process.pid), "")
            if end or state:
                samples = self._pending[number - self._first if end else 0].request.samples[start : end or None]
                lacks = f"has not {'delivered' if end else 'taken'} {self._maker.source.names(samples)}"
                sentences.append(f"process {process.pid}{state} {lacks}")
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
        images = self._buffers.hand_out(slot, copied=not self._buffers.free)
        if len(places) < len(samples):  # an evaluation, some of whose pictures cannot be read
            images, samples = images[places], samples[places]
        filled = Filled(samples, bad)
        batch = self._maker.batch(torch.from_numpy(images), filled, request.epoch)
        if self._pin_memory:
            pinned = batch.images if self._buffers.pinned else batch.images.pin_memory()
            return replace(batch, images=pinned, labels=batch.labels.pin_memory())
        return batch

    def _adapt(self, waited: float) -> None:
        """Start other processes where batches are waited for."""
        self._asked += 1
        if self._asked == 1:  # the first batch is waited for in any case
            self._since = time.perf_counter()
            return
        self._waits += waited
        if self.num >= self._most or self._asked % _LOOK_EVERY:
            return
        elapsed = time.perf_counter() - self._since
        if self._waits > _WAITED * elapsed:
            self._start(min(self.num, self._most - self.num))
            self._told(self.num)
        self._waits, self._since = 0.0, time.perf_counter()


def _died(why: object) -> MachineError:
    return MachineError(
        f"a process that loads pictures died ({str(why) or type(why).__name__}): it may have run out of memory, so "
        "lower data.workers; a script of your own that starts training needs `if __name__ == '__main__':`"
    )


_STATES = {"T": ", which is stopped,", "D": ", which waits for a file system,"}  # of processes in `/proc/PID/stat`


def _state(process: int | None) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2][:1]
    except OSError:
        return ""


def _work(
    maker: BatchMaker,
    buffers: Buffers,
    tasks: connection.Connection,
    results: connection.Connection,
    held: SharedArray,
    place: int,
) -> None:
    follow_parent()
    piece = held.array[place]
    torch.set_num_threads(1)
    with suppress(AttributeError, OSError):  # a worker that wakes up does not take the core from a thread that computes
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with suppress(ImportError):
        import cv2

        cv2.setNumThreads(1)
    with suppress(OSError):  # the training process is gone
        while task := os.read(tasks.fileno(), _TASK.size):
            number, slot, start, end, epoch = _TASK.unpack(task)
            piece[:] = number, start, end
            answer: _Answer
            try:
                samples = buffers.samples[slot, start:end]
                filled = maker.fill(buffers[slot][start:end], samples.copy(), None if epoch < 0 else epoch)
                samples[: len(filled.samples)] = filled.samples
                answer = len(filled.samples), filled.bad
            except Exception as error:
                answer = _portable(error)
            results.send((number, start, answer))
            piece[:] = 0


def _portable(error: Exception) -> Exception:
    """An exception as the training process can raise it."""
    if lack_of_memory(error) is not None:
        return MachineError("a process that loads pictures ran out of memory: lower data.workers")
    if isinstance(error, ConvoyError):
        return error.with_traceback(None)
    trace = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"in a process that loads pictures:\n{trace}")
    return error
