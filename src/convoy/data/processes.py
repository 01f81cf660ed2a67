"""Worker processes: where they come from, how they end, and memory that they share: pictures and names that are read,
buffers that batches are written to."""

import mmap
import multiprocessing
import os
import tempfile
import threading
import weakref
import zlib
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import reduction, util
from multiprocessing.context import ForkServerContext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convoy.launch.rank import end_with_parent


def forkserver(module: str) -> ForkServerContext:
    """A server process without threads that forks workers: forking this one, which has some, could deadlock. The server
    imports `module`, so that workers begin at once and share its memory."""
    # A socket's path has 107 characters at most, its 32 below the temporary directory. Python asks for that once, and
    # makes a folder there for this user alone.
    if len(os.fsencode(directory := tempfile.gettempdir())) > 107 - 32:
        tempfile.tempdir = "/tmp"
        util.get_temp_dir()
        tempfile.tempdir = directory
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["convoy.data.worker_server", module])
    return context


def follow_parent() -> None:
    """In a worker: end with the process that asked for it, however that ended, and not by a signal to its group. The
    process that workers are forked from has left the group, unless another library had started it before."""
    end_with_parent()
    parent = multiprocessing.parent_process()
    assert parent is not None
    with suppress(OSError):
        os.setpgid(0, 0)

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


class SharedMemory:
    """A block of memory, zero to begin with; handing it to a worker process hands over the memory itself. It lies in an
    anonymous file (memfd): it has no name, ends with its last process, takes up only what was written to, and is not
    bound by the size of /dev/shm, which containers keep small."""

    def __init__(self, num_bytes: int) -> None:
        self._own(_anonymous_file())
        os.ftruncate(self._fd, num_bytes)
        self._map()

    @classmethod
    def of(cls, pieces: Iterable[Any]) -> "SharedMemory":
        """A block of these pieces, one after the other."""
        block = cls.__new__(cls)
        block._own(_anonymous_file())  # first, as reading the pieces may fail
        with os.fdopen(os.dup(block._fd), "wb", buffering=2**20) as file:
            file.writelines(pieces)
        block._map()
        return block

    def _own(self, fd: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)

    def _map(self) -> None:
        size = os.fstat(self._fd).st_size
        self.bytes: mmap.mmap | bytearray = mmap.mmap(self._fd, size) if size else bytearray()

    def __getstate__(self) -> Any:
        return reduction.DupFd(self._fd)

    def __setstate__(self, state: Any) -> None:
        self._own(state.detach())
        self._map()


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

        self._memory = SharedMemory.of(counted())
        self._ends = SharedNumbers(np.cumsum(lengths) if ends is None else np.append(0, ends))

    def checksum(self) -> int:
        return zlib.crc32(self._ends.array.data, zlib.crc32(self._memory.bytes))

    def __len__(self) -> int:
        return len(self._ends.array) - 1

    def __getitem__(self, place: int) -> bytes:
        start, end = self._ends.array[place : place + 2].tolist()
        return bytes(self._memory.bytes[start:end])


class SharedNumbers:
    """An array; handing it to a worker process hands over the memory itself."""

    def __init__(self, numbers: NDArray[Any]) -> None:
        self._memory = SharedMemory.of([np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)])
        self._form = numbers.dtype, numbers.shape
        self.array: NDArray[Any] = np.frombuffer(self._memory.bytes, numbers.dtype).reshape(numbers.shape)

    def __getstate__(self) -> Any:
        return self._memory, self._form

    def __setstate__(self, state: Any) -> None:
        self._memory, self._form = state
        dtype, shape = self._form
        self.array = np.frombuffer(self._memory.bytes, dtype).reshape(shape)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("convoy-pictures")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
