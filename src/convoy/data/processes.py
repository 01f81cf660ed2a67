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
from numpy.typing import DTypeLike, NDArray

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
