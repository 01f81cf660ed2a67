"""Worker processes: a pool of them, how they end, and memory that they share: pictures and names that are read, buffers
that batches are written to."""

import mmap
import multiprocessing
import os
import pickle
import select
import struct
import tempfile
import threading
import traceback
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing import connection, forkserver, reduction, util
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from convoy.errors import ConvoyError, MachineError
from convoy.launch.rank import end_with_parent

Task = tuple[int, int, int, int, int]
_TASK = struct.Struct("5q")
_IDLE = -1
_STATES = {"T": ", which is stopped,", "D": ", which waits for a file system,"}  # of processes in `/proc/PID/stat`


class Pool:
    """Processes that do tasks of five numbers, the first of them not below 0, in any order.

    Whichever is free reads the next task from the one pipe that all have. It holds whole tasks only, and what is as
    short is written and read at once: no lock is needed, which a worker that dies could keep, and no semaphore, which
    would lie in /dev/shm. Workers are killed at the end, not asked: they have nothing to put in order.
    """

    # Tasks that are on their way: as many as the smallest pipe takes, so that sending never waits for a worker.
    MOST_SENT = 64

    def __init__(self, work: str, mend: str, most: int, begin: Callable[..., Callable[..., Any]], *state: Any) -> None:
        """`begin` gets the state in the worker, once, and returns the function that does a task. In sentences a worker
        is "a process that" and `work`; `mend` is what helps where memory is short."""
        self._words = work, mend
        self._context = _forkserver(begin.__module__)
        self._taken, self._tasks = self._context.Pipe(duplex=False)
        self._held = SharedArray.of(np.full((most, 5), _IDLE))  # the task of each process
        self._arguments = self._words, begin, state, self._taken, self._held
        self._processes: list[BaseProcess] = []
        # One poll object for all waits: those of multiprocessing set up a selector each time.
        self._poll, self._speakers = select.poll(), dict[int, tuple[connection.Connection, BaseProcess]]()
        self.num_sent = 0

    def __len__(self) -> int:
        return len(self._processes)

    def start(self, number: int) -> None:
        try:
            for _ in range(number):
                answers, sender = self._context.Pipe(duplex=False)
                arguments = *self._arguments, sender, len(self)
                process = self._context.Process(target=_work, args=arguments, name="convoy-pictures", daemon=True)
                process.start()
                sender.close()
                self._processes.append(process)
                for speaker in (answers.fileno(), process.sentinel):
                    self._speakers[speaker] = answers, process
                    self._poll.register(speaker, select.POLLIN)
        except (OSError, EOFError) as error:
            raise self._died(error) from error

    def send(self, tasks: Iterable[Task]) -> None:
        """Hand out tasks, no more than `MOST_SENT` with those that are on their way."""
        if content := b"".join(_TASK.pack(*task) for task in tasks):
            self.num_sent += len(content) // _TASK.size
            os.write(self._tasks.fileno(), content)

    def receive(self) -> Iterator[tuple[Task, Any]]:
        """Wait for a worker; all tasks that are done, with what became of them: a result or an exception."""
        ready = self._poll.poll()
        while ready:
            for speaker, _ in ready:
                answers, process = self._speakers[speaker]
                if speaker == process.sentinel:
                    process.join()
                    raise self._died(f"exit status {process.exitcode}")
                try:
                    answer = answers.recv()
                except (EOFError, OSError) as error:
                    raise self._died(error) from error
                self.num_sent -= 1
                yield answer
            ready = self._poll.poll(0)

    def held(self) -> Iterator[tuple[str, list[int] | None]]:
        """The processes that have a task or are stopped, by a beginning of a sentence, with their tasks."""
        for process, task in zip(self._processes, self._held.array.tolist(), strict=False):
            with suppress(OSError):
                stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
                state = _STATES.get(stat.rpartition(") ")[2][:1], "")
                if state or task[0] != _IDLE:
                    yield f"process {process.pid}{state}", task if task[0] != _IDLE else None

    def close(self) -> None:
        processes, self._processes, self._poll = self._processes, [], select.poll()
        for process in processes:
            process.kill()  # SIGTERM may be ignored
        for process in processes:
            answers, _ = self._speakers[process.sentinel]
            process.join()
            process.close()
            answers.close()
        self._taken.close()
        self._tasks.close()

    def _died(self, why: object) -> MachineError:
        work, mend = self._words
        return MachineError(
            f"a process that {work} died ({str(why) or type(why).__name__}): it may have run out of memory, so {mend}; "
            "a script of your own that starts it needs `if __name__ == '__main__':`"
        )


def _work(
    words: tuple[str, str],
    begin: Callable[..., Callable[..., Any]],
    state: tuple[Any, ...],
    tasks: connection.Connection,
    held: "SharedArray",
    answers: connection.Connection,
    place: int,
) -> None:
    follow_parent()
    with suppress(OSError):  # no signal to the group of the training process is for it
        os.setpgid(0, 0)
    do = begin(*state)
    with suppress(OSError):  # the starting process is gone
        while content := os.read(tasks.fileno(), _TASK.size):
            held.array[place] = task = _TASK.unpack(content)
            try:
                answer = do(*task)
            except Exception as error:
                answer = _portable(error, *words)
            answers.send((task, answer))
            held.array[place] = _IDLE


def _portable(error: Exception, work: str, mend: str) -> Exception:
    """An exception as the starting process can raise it."""
    from convoy.comm.position import lack_of_memory  # with torch, which a folder's listing does not need

    if lack_of_memory(error) is not None:
        return MachineError(f"a process that {work} ran out of memory: {mend}")
    if isinstance(error, ConvoyError):
        return error.with_traceback(None)
    trace = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"in a process that {work}:\n{trace}")
    return error


def _forkserver(module: str) -> ForkServerContext:
    """A server process without threads that forks workers: forking this one, which has some, could deadlock. The server
    imports `module`, so that workers begin in milliseconds and share its memory. It begins here, without being waited
    for, and ends with this thread."""
    # A socket's path has 107 characters at most, its 32 below the temporary directory. Python asks for that once, and
    # makes a folder there for this user alone.
    if len(os.fsencode(directory := tempfile.gettempdir())) > 107 - 32:
        tempfile.tempdir = "/tmp"
        util.get_temp_dir()
        tempfile.tempdir = directory
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["convoy.data.worker_server", module])
    forkserver.ensure_running()
    return context


def follow_parent() -> None:
    """In a process that a server forked: end with the process that asked for it, however that ended. The server stays
    as long as it has such children, so its end is none of theirs."""
    end_with_parent()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


class SharedArray:
    """An array; handing it to a worker process hands over the memory itself. That lies in an anonymous file (memfd): it
    has no name, ends with its last process, takes up only what was written to, and is not bound by the size of
    /dev/shm, which containers keep small."""

    def __init__(self, dtype: DTypeLike, shape: tuple[int, ...], pieces: Iterable[Any] | None = None) -> None:
        """`pieces` are its bytes, one after the other; zeros without them."""
        fd = _anonymous_file()
        weakref.finalize(self, os.close, fd)  # first, as reading the pieces may fail
        if pieces is None:
            os.ftruncate(fd, int(np.prod(shape)) * np.dtype(dtype).itemsize)
        else:
            with os.fdopen(os.dup(fd), "wb", buffering=2**20) as file:
                file.writelines(pieces)
        self._map(fd, np.dtype(dtype), shape)

    @classmethod
    def of(cls, array: NDArray[Any]) -> "SharedArray":
        return cls(array.dtype, array.shape, [np.ascontiguousarray(array).reshape(-1).view(np.uint8)])

    def _map(self, fd: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._state, size = (fd, dtype, shape), os.fstat(fd).st_size
        self.bytes: mmap.mmap | bytearray = mmap.mmap(fd, size) if size else bytearray()
        self.array: NDArray[Any] = np.frombuffer(self.bytes, dtype).reshape(shape)

    def __getstate__(self) -> Any:
        fd, *form = self._state
        return reduction.DupFd(fd), form

    def __setstate__(self, state: Any) -> None:
        fd, form = state[0].detach(), state[1]
        weakref.finalize(self, os.close, fd)
        self._map(fd, *form)


class SharedBytes:
    """Pieces of bytes; handing them to a worker process hands over the memory itself. So a million names take no memory
    of a worker."""

    def __init__(self, pieces: Iterable[bytes], ends: NDArray[np.int64] | None = None) -> None:
        """`ends` [n] are those of the pieces where they come in one block."""
        lengths = [0]

        def counted() -> Iterable[bytes]:
            for piece in pieces:
                lengths.append(len(piece))
                yield piece

        self._memory = SharedArray(np.uint8, (-1,), counted())
        self._ends = SharedArray.of(np.cumsum(lengths) if ends is None else np.append(0, ends))

    def checksum(self) -> int:
        return zlib.crc32(self._ends.array.data, zlib.crc32(self._memory.bytes))

    def __len__(self) -> int:
        return len(self._ends.array) - 1

    def __getitem__(self, place: int) -> bytes:
        start, end = self._ends.array[place : place + 2].tolist()
        return bytes(self._memory.bytes[start:end])


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("convoy-pictures")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
