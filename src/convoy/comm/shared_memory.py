"""Collectives of CPU tensors between ranks of one host, through memory that all of them map.

Gloo sends every byte through the network stack, also on one host: on a device of one core that costs as much time as
some layers take. Here ranks agree on one piece of memory (`meet`); each copies what it has into its slot of the
`Channel`, waits for the others' and reads them from there, in rounds of as many bytes as a slot has.
"""

import mmap
import os
import platform
import select
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

SLOT = 1 << 22  # bytes of the largest message: few enough for the caches
_FLAG = 64
_SPINS = 200
_YIELD_S = 5e-3
_LOOK_S = 0.1


class Channel:
    """One rank's view of memory that all ranks of a group share: `size(ranks)` bytes, zero at first.

    Every rank has a counter of its messages and two slots that it writes in turn. A rank that posts message n has read
    all messages n - 1, and so nobody reads message n - 1's predecessor any more once all have posted n: two slots and
    one round of waiting are enough. The order in which stores become visible is that of x86.

    `watched` has for each rank a file descriptor that becomes readable when its process ends (`os.pidfd_open`), and
    `names` are for error messages. A rank waits `timeout` seconds for another one.
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
        """Show the message to the other ranks and wait until all have posted theirs; an error where a rank has ended,
        does not answer, or does something else: `tag` says what is done with how many bytes."""
        self._posted += 1
        tags = self._tags[self._posted % 2]
        tags[self.index] = tag
        self._counters[self.index] = self._posted
        for rank in range(self.ranks):
            if self._counters[rank] < self._posted:
                self._await(rank)
            self.expect(rank, tags[rank] == tag)

    def expect(self, rank: int, is_same: bool) -> None:
        """Raise an error unless a rank has posted the same as this one."""
        if not is_same:
            raise RuntimeError(
                f"{self._names[self.index]} and {self._names[rank]} exchange different things: all ranks must pass "
                "images of the same size, call the same functions in the same order, backward() too where a loss is 0 "
                "or NaN, and use the same outputs in the loss"
            )

    def message(self, rank: int, dtype: torch.dtype) -> Tensor:
        """The message of a rank, until this one posts again."""
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


SWITCH = "CONVOY_SHARED_MEMORY"  # environment variable; 0 sends everything through gloo

Gather = Callable[[Sequence[int]], list[list[int]]]


def meet(index: int, names: Sequence[str], timeout: float, gather: Gather) -> Channel | None:
    """The memory that the ranks of a group share, or None on every rank where one of them cannot; all ranks call it. It
    has no name in any file system, so that nothing is left behind when processes are killed. `gather` gives every rank
    the same number of whole numbers from each; the other arguments are those of `Channel`."""
    memory = _create(Channel.size(len(names))) if index == 0 else None
    rows = gather([*_host(), os.getpid(), -1 if memory is None else memory])
    channel = None
    is_shared = all(row[:-2] == rows[0][:-2] for row in rows) and rows[0][0] == 1 and rows[0][-1] >= 0
    if is_shared:
        channel = _open(index, [row[-2] for row in rows], rows[0][-1], names, timeout)
    opened = gather([int(channel is not None)])
    if memory is not None:
        os.close(memory)
    if channel is not None and not all(row == [1] for row in opened):
        channel.close()
        return None
    return channel


def _host() -> list[int]:
    """Whether this process can share memory, and numbers that are equal for processes that can share it. Processes in
    other network namespaces are on other hosts: that is how clusters are emulated."""
    is_able = (
        os.environ.get(SWITCH, "1") != "0"
        and platform.machine() in ("x86_64", "AMD64")
        and all(hasattr(os, name) for name in ("memfd_create", "pidfd_open", "sched_yield"))
    )
    try:
        boot = zlib.crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes())
        namespaces = [Path(f"/proc/self/ns/{name}").stat().st_ino for name in ("net", "pid")]
    except OSError:
        return [0, 0, 0, 0]
    return [int(is_able), boot, *namespaces]


def _create(size: int) -> int | None:
    try:
        memory = os.memfd_create("convoy", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        return None
    try:
        os.ftruncate(memory, size)
    except OSError:
        os.close(memory)
        return None
    return memory


def _open(index: int, processes: Sequence[int], number: int, names: Sequence[str], timeout: float) -> Channel | None:
    """Map the memory that the first process has under a file number; None where this process may not."""
    descriptors: list[int] = []
    try:
        for process in processes:
            descriptors.append(os.pidfd_open(process))
        with Path(f"/proc/{processes[0]}/fd/{number}").open("r+b") as file:
            memory = mmap.mmap(file.fileno(), Channel.size(len(processes)))
    except OSError:
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    return Channel(memory, index, descriptors, names, timeout)


_CHUNK = 1 << 20
_SMALL = 1 << 16
_EXCHANGE = 4


@torch.no_grad()
def all_reduce(x: Tensor, channel: Channel) -> Tensor:
    """Add a contiguous `x` over the ranks, in place; the sum has the same bits on every rank."""
    add = _add_all if channel.ranks == 2 or x.nbytes <= _SMALL else _add_pieces
    tag = _tag(1, x)
    for part in x.view(-1).split(_CHUNK // x.itemsize):
        add(part, channel, tag)
    return x


@torch.no_grad()
def all_gather(x: Tensor, channel: Channel) -> Tensor:
    """Tensors of one shape from all ranks, stacked: [ranks, *x.shape]."""
    flat = x.reshape(-1)
    out = x.new_empty(channel.ranks, len(flat))
    step = SLOT // x.itemsize
    for start in range(0, len(flat), step):
        part = flat[start : start + step]
        channel.outgoing(x.dtype)[: len(part)].copy_(part)
        channel.post(_tag(2, x))
        for rank, row in enumerate(out[:, start : start + step]):
            row.copy_(part if rank == channel.index else channel.message(rank, x.dtype)[: len(part)])
    return out.view(channel.ranks, *x.shape)


@torch.no_grad()
def exchange_into(sends: Sequence[Tensor | None], receives: Sequence[Tensor], channel: Channel) -> Sequence[Tensor]:
    """Send `sends[q]`, of any shape, to rank q, and fill the contiguous `receives[q]` with what comes from it; the
    entries of this rank are ignored. Ranks may send different numbers of bytes: every message begins with how many
    rounds its sender needs, and how many bytes there are for each rank."""
    peers = [rank for rank in range(channel.ranks) if rank != channel.index]
    begin = -(-8 * (1 + channel.ranks) // 64) * 64  # bytes before the parts
    width = (SLOT - begin) // channel.ranks // 64 * 64
    outgoing = {rank: x for rank in peers if (x := sends[rank]) is not None and x.numel()}
    incoming = {rank: x for rank in peers if (x := receives[rank]).numel()}
    needed = max((-(-x.nbytes // width) for x in outgoing.values()), default=1)
    if needed > 1:
        outgoing = {rank: x.reshape(-1) for rank, x in outgoing.items()}
    number, rounds = 0, needed
    while number < rounds:
        header = channel.outgoing(torch.int64)
        header[0] = needed
        for rank in peers if number == 0 else ():
            header[1 + rank] = outgoing[rank].nbytes if rank in outgoing else 0
        for rank, x in outgoing.items() if number < needed else ():
            part = _chunk(x, number, width) if needed > 1 else x
            _slot_view(channel.outgoing(x.dtype), begin + rank * width, part).copy_(part)
        channel.post(_EXCHANGE)
        if number == 0:
            for rank in peers:
                peer_header = channel.message(rank, torch.int64)
                rounds = max(rounds, int(peer_header[0]))
                channel.expect(
                    rank, int(peer_header[1 + channel.index]) == (incoming[rank].nbytes if rank in incoming else 0)
                )
            if rounds > 1:
                incoming = {rank: x.view(-1) for rank, x in incoming.items()}
        for rank, x in incoming.items():
            part = _chunk(x, number, width) if rounds > 1 else x
            part.copy_(_slot_view(channel.message(rank, x.dtype), begin + channel.index * width, part))
        number += 1
    return receives


def _tag(kind: int, x: Tensor) -> int:
    """One number for the collective, the size of its elements, and their count."""
    return (x.numel() << 16) + (x.itemsize << 8) + (int(x.is_floating_point()) << 4) + kind


def _chunk(x: Tensor, number: int, width: int) -> Tensor:
    step = width // x.itemsize
    return x[number * step : (number + 1) * step]


def _slot_view(slot: Tensor, begin: int, part: Tensor) -> Tensor:
    """Where a message has the part for one receiver, from byte `begin` on."""
    start = begin // part.itemsize
    return slot[start : start + part.numel()].view(part.shape)


def _add_all(x: Tensor, channel: Channel, tag: int) -> None:
    channel.outgoing(x.dtype)[: len(x)].copy_(x)
    channel.post(tag)
    if channel.ranks == 2:
        x.add_(channel.message(1 - channel.index, x.dtype)[: len(x)])
    else:
        _add([channel.message(rank, x.dtype)[: len(x)] for rank in range(channel.ranks)], x)


def _add_pieces(x: Tensor, channel: Channel, tag: int) -> None:
    """Every rank adds a piece, then they exchange the pieces."""
    channel.outgoing(x.dtype)[: len(x)].copy_(x)
    channel.post(tag)
    pieces = x.tensor_split(channel.ranks)
    mine = pieces[channel.index]
    terms = [channel.message(rank, x.dtype)[: len(x)].tensor_split(channel.ranks) for rank in range(channel.ranks)]
    _add([term[channel.index] for term in terms], mine)
    channel.outgoing(x.dtype)[: len(mine)].copy_(mine)
    channel.post(tag)
    for rank, piece in enumerate(pieces):
        if rank != channel.index:
            piece.copy_(channel.message(rank, x.dtype)[: len(piece)])


def _add(terms: Sequence[Tensor], total: Tensor) -> None:
    """The sum in the order of the ranks; `total` is none of the terms."""
    torch.add(terms[0], terms[1], out=total)
    for term in terms[2:]:
        total.add_(term)
