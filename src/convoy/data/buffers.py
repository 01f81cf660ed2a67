"""The buffers of batches that are made ahead, in one block of memory: worker processes share it, a GPU reads it."""

import weakref
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from convoy.data.memory import SharedMemory

# Batches that have been handed out: one is asked for while the one before is used, and, on a GPU, the copies of earlier
# ones may still be on their way.
_IN_USE, _ON_THEIR_WAY = 2, 2


class Buffers:
    """Memory for batches: a row for each sample, and labels. A buffer is free when nobody has its batch."""

    def __init__(
        self,
        ahead: int,
        largest: int,
        shape: tuple[int, ...],
        dtype: DTypeLike = np.uint8,
        *,
        pin_memory: bool = False,
        memory: SharedMemory | None = None,
    ) -> None:
        num = ahead + _IN_USE + (_ON_THEIR_WAY if pin_memory else 0)
        self._options = ahead, largest, shape, dtype
        self._shape, self._dtype = (largest, *shape), np.dtype(dtype)
        self._rows = int(np.prod(self._shape)) * self._dtype.itemsize
        self._labels = -(-self._rows // 8) * 8
        self._begin, self._size = 8 * num * largest, self._labels + 8 * largest
        self._memory = memory or SharedMemory(self._begin + num * self._size)
        # [buffers, samples]: the samples that a buffer is to get, then those that it got
        self.samples = np.frombuffer(self._memory.bytes, np.int64, num * largest).reshape(num, largest)
        self.free = deque(range(num))
        self._out: dict[int, weakref.ref[NDArray[np.uint8]]] = {}
        self._pin_memory = pin_memory
        self.pinned = pin_memory and memory is None and self._pin()

    def __reduce__(self) -> Any:
        return _of_another_process, (self._options, self._pin_memory, self._memory)

    def _bytes(self, slot: int) -> NDArray[np.uint8]:
        return np.frombuffer(memoryview(self._memory.bytes), np.uint8, self._size, self._begin + slot * self._size)

    def _parts(self, content: NDArray[np.uint8]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        rows = content[: self._rows].view(self._dtype).reshape(self._shape)
        return rows, content[self._labels :].view(np.int64)

    def __getitem__(self, slot: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Rows [samples, ...] and labels [samples] of a buffer."""
        return self._parts(self._bytes(slot))

    def hand_out(self, slot: int, copied: bool) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The same, free again once nothing refers to either, or at once where a copy is handed out."""
        content, free = self._bytes(slot), self.free
        if copied:
            content = content.copy()
            free.append(slot)
        else:
            self._out[slot] = weakref.ref(content, lambda _: free.append(slot))
        return self._parts(content)

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


def _of_another_process(options: Any, pin_memory: bool, memory: SharedMemory) -> Buffers:
    return Buffers(*options, pin_memory=pin_memory, memory=memory)
