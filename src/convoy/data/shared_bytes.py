"""Encoded pictures in memory that worker processes see without a copy.

The bytes lie in an anonymous file (memfd): it has no name, ends with its last process, and is not bound by the size
of /dev/shm, which containers keep small.
"""

import mmap
import os
import weakref
from collections.abc import Iterable
from multiprocessing import reduction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convoy.data.sources import EncodedSource

_SHARE_OF_MEMORY = 8
_MAX_BYTES = 4 * 2**30


class SharedBytes:
    """Pieces of bytes; handing them to a worker process hands over the memory itself."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        fd = os.memfd_create("convoy-pictures")
        ends = [0]
        with os.fdopen(os.dup(fd), "wb", buffering=2**20) as file:
            for piece in pieces:
                file.write(piece)
                ends.append(ends[-1] + len(piece))
        self._attach(fd, np.array(ends, np.int64))

    def _attach(self, fd: int, ends: NDArray[np.int64]) -> None:
        self._fd, self._ends = fd, ends
        self._map = mmap.mmap(fd, int(ends[-1]), access=mmap.ACCESS_READ) if ends[-1] else b""
        weakref.finalize(self, os.close, fd)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, place: int) -> bytes:
        return self._map[int(self._ends[place]) : int(self._ends[place + 1])]

    def __getstate__(self) -> Any:
        return reduction.DupFd(self._fd), self._ends

    def __setstate__(self, state: Any) -> None:
        self._attach(state[0].detach(), state[1])


class MemorySource(EncodedSource):
    """The pictures of another source, still encoded, in memory."""

    def __init__(self, source: EncodedSource, pieces: Iterable[bytes]) -> None:
        self._source = source
        self._pieces = SharedBytes(pieces)
        self.labels = source.labels

    def name(self, sample: int) -> str:
        """As the other source names it."""
        return self._source.name(sample)

    def read(self, sample: int) -> bytes:
        """The picture's bytes."""
        return self._pieces[sample]


def fits_in_memory(num_bytes: int) -> bool:
    """Whether that many bytes may be kept: an eighth of the machine's memory for all its ranks, 4 GiB at most."""
    if not hasattr(os, "memfd_create"):
        return False
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE") or 1), 1)
    return num_bytes <= min(memory // _SHARE_OF_MEMORY, _MAX_BYTES) // ranks
