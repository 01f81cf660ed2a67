"""Memory shared by the ranks of a group: each posts a message, waits for those of the others, and reads them."""

import mmap
import os
import select
import time
from collections.abc import Sequence

import torch
from torch import Tensor

SLOT = 1 << 22
"""Bytes of the largest message: few enough for the caches."""
_FLAG = 64
_SPINS = 200
_YIELD_S = 5e-3
_LOOK_S = 0.1


class Channel:
    """One rank's view of the memory.

    Every rank has a counter of its messages and two slots that it writes in turn. A rank that posts message n has read
    all messages n - 1, and so nobody reads message n - 1's predecessor any more once all have posted n: two slots and
    one round of waiting are enough. The order in which stores become visible is that of x86.

    Args:
        memory: of `size(ranks)` bytes, zero at first, shared by all ranks.
        index: this rank's number in the group.
        watched: for each rank a file descriptor that becomes readable when its process ends (`os.pidfd_open`).
        names: of the ranks, for what is said of them.
        timeout: seconds to wait for the others.
    """

    def __init__(
        self, memory: mmap.mmap, index: int, watched: Sequence[int], names: Sequence[str], timeout: float
    ) -> None:
        self.index = index
        self.ranks = len(watched)
        self._names = tuple(names)
        self._process = os.getpid()
        self._watched = tuple(watched)
        self._timeout = timeout
        self._posted = 0
        words = memoryview(memory)[: self.ranks * _FLAG].cast("q")
        self._counters = words[:: _FLAG // 8]
        self._closed = words[1 :: _FLAG // 8]
        self._tags = (words[2 :: _FLAG // 8], words[3 :: _FLAG // 8])
        with torch.inference_mode(False):  # the views serve training too, whoever asks for them first
            self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}

    @staticmethod
    def size(ranks: int) -> int:
        """Bytes of memory for a group; only those that messages use are ever taken."""
        return _start(ranks) + 2 * ranks * SLOT

    def outgoing(self, dtype: torch.dtype) -> Tensor:
        """Where this rank writes its next message: flat, `SLOT` bytes."""
        return self._view(self.index, (self._posted + 1) % 2, dtype)

    def post(self, tag: int) -> None:
        """Show the message to the others and wait until all have posted theirs.

        Args:
            tag: a number that must be the same on all ranks: what is done with how many bytes.

        Raises:
            RuntimeError: a rank has ended, does not answer, or does something else.
        """
        self._posted += 1
        tags = self._tags[self._posted % 2]
        tags[self.index] = tag
        self._counters[self.index] = self._posted
        for rank in range(self.ranks):
            if self._counters[rank] < self._posted:
                self._await(rank)
            self.expect(rank, tags[rank] == tag)

    def expect(self, rank: int, alike: bool) -> None:
        """Refuse what a rank has posted if it is not `alike`."""
        if not alike:
            raise RuntimeError(
                f"{self._names[self.index]} and {self._names[rank]} exchange different things: all ranks must pass "
                "images of the same size, call the same functions in the same order, and use the same outputs in the "
                "loss"
            )

    def message(self, rank: int, dtype: torch.dtype) -> Tensor:
        """What a rank has posted, until this one posts again."""
        return self._view(rank, self._posted % 2, dtype)

    def close(self) -> None:
        """Tell the others that nothing comes any more."""
        if os.getpid() == self._process:  # and not a child that was forked from it
            self._closed[self.index] = 1
        for watched in self._watched:
            os.close(watched)
        self._watched = ()

    def _view(self, rank: int, slot: int, dtype: torch.dtype) -> Tensor:
        key = rank, slot, dtype
        if key not in self._views:
            start = _start(self.ranks) + (2 * rank + slot) * SLOT
            with torch.inference_mode(False):
                self._views[key] = self._bytes[start : start + SLOT].view(dtype)
        return self._views[key]

    def _await(self, rank: int) -> None:
        """Wait for a rank: at first awake, as it is mostly a matter of microseconds."""
        counters, posted = self._counters, self._posted
        for _ in range(_SPINS):
            if counters[rank] >= posted:
                return
        begin = time.monotonic()
        look = begin + _LOOK_S
        while counters[rank] < posted:
            now = time.monotonic()
            if now - begin < _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(5e-5)
            ended = self._closed[rank] or (now > look and _ended(self._watched[rank]))
            if ended and counters[rank] < posted:
                raise RuntimeError(f"Connection closed by peer: {self._names[rank]} has ended")
            look = now + _LOOK_S if now > look else look
            if now - begin > self._timeout:
                raise RuntimeError(
                    f"{self._names[rank]} did not answer within {self._timeout:g} s, the time-out of its process group"
                )


def _start(ranks: int) -> int:
    """Where the slots begin: after the counters, on a page of their own."""
    return -(-ranks * _FLAG // mmap.PAGESIZE) * mmap.PAGESIZE


def _ended(watched: int) -> bool:
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    return bool(poll.poll(0))
