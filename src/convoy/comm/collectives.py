"""The collectives, the only place that calls torch.distributed's, and how long a thread waits in them.

Plain functions of tensors and a group; a group of None is one rank alone. All ranks of a group must call the same
function with shapes and dtypes that fit together, and wait for pending results in the same order. None has a gradient:
`comm/redistribution.py` adds those.

CPU tensors go through memory that the ranks share where all are on one host. Over gloo everything but the sum of a
large tensor goes straight from every rank to every other (`_start_over_gloo`). gloo gets tensors of other devices by
way of the CPU. None of them is ever compiled: what a program compiles lies between them.
"""

import functools
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from convoy.comm import shared_memory
from convoy.comm.position import current, ledger
from convoy.comm.shared_memory import Channel


class Watch(Protocol):
    """Is told of every wait in this process; waits may lie in each other."""

    def enter(self) -> None:
        """A wait begins."""

    def leave(self) -> None:
        """It is over."""


_watch: Watch | None = None


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Tell `watch` of every wait, while entered."""
    global _watch
    before, _watch = _watch, watch
    try:
        yield
    finally:
        _watch = before


@contextmanager
def waiting(name: str) -> Iterator[None]:
    """While entered, this rank does nothing but wait for others, in what people call `name`; as a decorator, a function
    that does so. It is noted in this process's position."""
    if current.collective:
        yield
        return
    watch = _watch
    if watch is not None:
        watch.enter()
    began = current.moved = time.monotonic()
    current.collective = name
    try:
        yield
    finally:
        current.collective = ""
        current.moved = time.monotonic()
        current.waited_s += current.moved - began
        if watch is not None:
            watch.leave()


Group = dist.ProcessGroup | None

_SMALL = 1 << 18  # bytes over all ranks up to which gloo adds faster by sending everything to everyone

_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renames it
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# by the group of all ranks, where that carries no CPU tensors: another one that does
_beside: "weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = weakref.WeakKeyDictionary()
_channels: "weakref.WeakKeyDictionary[dist.ProcessGroup, Channel | None]" = weakref.WeakKeyDictionary()


class Pending:
    """A collective that may still run, or that runs when it is waited for; `wait` gives its result, once."""

    def __init__(self, works: Sequence[dist.Work | None], finish: Callable[[], Tensor]) -> None:
        self._works = [work for work in works if work is not None]
        self._finish = finish

    @property
    def done(self) -> bool:
        """Whether it has run."""
        return all(work.is_completed() for work in self._works)

    @property
    def runs_beside(self) -> bool:
        """Whether it runs while this rank computes, not only when it is waited for."""
        return bool(self._works)

    @waiting("wait")
    def wait(self) -> Tensor:
        """Wait for the other ranks; the result."""
        for work in self._works:
            work.wait()
        return self._finish()


def _numbered(name: str, work: dist.Work | None, group: dist.ProcessGroup) -> dist.Work | None:
    """Note what was enqueued through a backend that does not wait."""
    recording = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if work is not None and not recording:  # nothing is sent yet
        members = functools.partial(dist.get_process_group_ranks, group)
        ledger.add(group.group_name, members, name, _done(work))
    return work


def _done(work: dist.Work) -> Callable[[], bool]:
    """Whether a device has finished a collective, asked without CUDA: where one thread holds CUDA's lock, another one
    that asks for an event stands still, with Python's lock. NCCL's group has a thread that asks, and notes it in this
    result, which unlike `work` does not hold the tensors."""
    try:
        done: Callable[[], bool] = work.get_future_result().done  # type: ignore[attr-defined]
    except RuntimeError:  # another backend
        return work.is_completed
    return done


def size(group: Group) -> int:
    """Number of ranks."""
    return 1 if group is None else group.size()


def place(group: Group) -> int:
    """This rank's number in the group."""
    return 0 if group is None else group.rank()


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Add a contiguous `x` over the ranks, in place; the sum has the same bits on every rank."""
    return x if group is None else start_all_reduce(x, group).wait()


def start_all_reduce(x: Tensor, group: Group, beside: bool = False) -> Pending:
    """As `all_reduce`, but without waiting. Through memory that ranks share it runs only once all wait for it, unless
    it is to go on `beside` the computation."""
    if group is None or x.numel() == 0:
        return Pending((), lambda: x)
    assert x.is_contiguous(), "in-place collectives need one piece of memory"
    if not beside and (channel := _channel(x, group)) is not None:
        return Pending((), lambda: shared_memory.all_reduce(x, channel))
    if not _over_gloo(x.device, group):
        return Pending([_numbered("all reduce", dist.all_reduce(x, group=group, async_op=True), group)], lambda: x)
    if size(group) * x.nbytes <= _SMALL:
        received = start_all_gather(x, group, beside)
        return Pending((), lambda: torch.sum(received.wait(), 0, out=x))
    local = x.cpu()
    return Pending([dist.all_reduce(local, group=group, async_op=True)], lambda: x if local is x else x.copy_(local))


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Tensors of one shape from all ranks, stacked: [ranks, *x.shape]."""
    return start_all_gather(x, group).wait()


def start_all_gather(x: Tensor, group: Group, beside: bool = False) -> Pending:
    """As `all_gather`, but without waiting; `beside` as there."""
    if group is None:
        return Pending((), lambda: x.unsqueeze(0))
    if not beside and (channel := _channel(x, group)) is not None:
        return Pending((), lambda: shared_memory.all_gather(x, channel))
    ranks = size(group)
    local = _for(group, x).contiguous()
    received = local.new_empty(ranks, *x.shape)
    if _over_gloo(x.device, group):
        received[place(group)] = local
        works = _start_over_gloo([local] * ranks, list(received), group)
        return Pending(works, lambda: received.to(x.device))
    work = _gather_single(received.view(-1), local.view(-1), group=group, async_op=True)
    return Pending([_numbered("all gather", work, group)], lambda: received)


@waiting("exchange")
def exchange(sends: Sequence[Tensor | None], shapes: Sequence[Sequence[int] | None], group: Group) -> list[Tensor]:
    """A tensor of any shape to every rank, one from every rank: contiguous, in the order of ranks, views of one buffer.
    All of `sends` have one dtype, and at least one is a tensor, if only an empty one; in `sends` and `shapes`, those of
    what comes, None is nothing."""
    counts = [0 if shape is None else math.prod(shape) for shape in shapes]
    example = next(x for x in sends if x is not None)
    pieces = example.new_empty(sum(counts)).split(counts)
    parts = [x if shape is None else x.view(shape) for x, shape in zip(pieces, shapes, strict=True)]
    local_part = sends[place(group)]
    start_exchange_into(sends, parts, group).wait()
    if local_part is not None:
        parts[place(group)].copy_(local_part)
    return parts


def start_exchange_into(sends: Sequence[Tensor | None], receives: Sequence[Tensor], group: Group) -> Pending:
    """Send `sends[q]` to rank q, None for nothing, and fill the contiguous `receives[q]` with what comes from it. All
    tensors have one dtype, and may be empty; the entries of this rank are ignored. The result is the tensor received
    from the rank before this one, in the circle."""
    if group is None:
        return Pending((), lambda: receives[0])
    rank = group.rank()
    if (channel := _channel(receives[rank], group)) is not None:
        return Pending((), lambda: shared_memory.exchange_into(sends, receives, channel)[rank - 1])
    outgoing = [None if x is None or q == rank else _for(group, x).contiguous() for q, x in enumerate(sends)]
    if not _over_gloo(receives[rank].device, group):
        nothing = receives[rank].new_empty(0)
        incoming = [nothing if q == rank else x for q, x in enumerate(receives)]
        work = dist.all_to_all(incoming, [nothing if x is None else x for x in outgoing], group=group, async_op=True)
        return Pending([_numbered("exchange", work, group)], lambda: receives[rank - 1])
    buffers = [x if x.is_cpu else torch.empty_like(x, device="cpu") for x in receives]
    works = _start_over_gloo(outgoing, buffers, group)
    return Pending(works, lambda: _arrived(buffers, receives, rank))


def _arrived(buffers: Sequence[Tensor], receives: Sequence[Tensor], rank: int) -> Tensor:
    for q, (buffer, target) in enumerate(zip(buffers, receives, strict=True)):
        if q != rank and buffer is not target:
            target.copy_(buffer)
    return receives[rank - 1]


@waiting("reduce scatter")
def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """[ranks, ...] to [...]: the sum over ranks, in their order, of the row with this rank's number."""
    if group is None:
        return x[0]
    if _over_gloo(x.device, group):
        return functools.reduce(torch.add, exchange(x.unbind(0), [x.shape[1:]] * len(x), group))
    total = x.new_empty(x.shape[1:])
    work = _scatter_single(total.view(-1), x.contiguous().view(-1), group=group, async_op=True)
    return Pending([_numbered("reduce scatter", work, group)], lambda: total).wait()


def _start_over_gloo(
    sends: Sequence[Tensor | None], receives: Sequence[Tensor], group: dist.ProcessGroup
) -> list[dist.Work | None]:
    """Begin to send `sends[q]` to rank q and to fill `receives[q]` from it, for every other rank q of a gloo group; all
    that is returned must be waited for. Tensors are contiguous and on the CPU; None, or a tensor without elements,
    stands for nothing.

    gloo's all-to-all offers a rank's tensor to a neighbour before it says that it is ready for the neighbour's. On the
    one connection between them that word then waits behind the whole tensor, unless both ranks begin in the same
    instant, and the two directions of the link take turns. Receives that are posted first use both at once: twice as
    fast for two hosts, 1.5 times for four (docs/benchmarks/directions.md).
    """
    ranks, rank = group.size(), group.rank()
    works: list[dist.Work | None] = []
    for distance in range(1, ranks):
        sender = (rank - distance) % ranks
        if receives[sender].numel():
            works.append(dist.irecv(receives[sender], group=group, group_src=sender))
    for distance in range(1, ranks):
        receiver = (rank + distance) % ranks
        tensor = sends[receiver]
        if tensor is not None and tensor.numel():
            works.append(dist.isend(tensor, group=group, group_dst=receiver))
    return works


@waiting("broadcast")
def broadcast(x: Tensor, group: Group, source: int = 0) -> Tensor:
    """Overwrite a contiguous `x` by that of the rank numbered `source` in the group."""
    if group is None or x.numel() == 0:
        return x
    assert x.is_contiguous(), "in-place collectives need one piece of memory"
    local = _for(group, x)
    if _over_gloo(local.device, group):
        dist.broadcast(local, group=group, group_src=source)
        return x if local is x else x.copy_(local)
    work = dist.broadcast(local, group=group, group_src=source, async_op=True)
    return Pending([_numbered("broadcast", work, group)], lambda: x).wait()


def start_send(x: Tensor, target: int, group: dist.ProcessGroup, tag: int = 0) -> Pending:
    """Begin to send a contiguous `x` to one rank of the group, which receives tensors in the order of these calls; over
    gloo every tag has an order of its own, and NCCL ignores tags."""
    local = _for(group, x)
    return Pending([dist.isend(local, group=group, tag=tag, group_dst=target)], lambda: local)


def start_receive(x: Tensor, source: int, group: dist.ProcessGroup, tag: int = 0) -> Pending:
    """Begin to fill a contiguous `x` with what one rank of the group sends under a tag."""
    local = _for(group, x)
    work = dist.irecv(local, group=group, tag=tag, group_src=source)
    return Pending([work], lambda: x if local is x else x.copy_(local))


def gather_ints(numbers: Sequence[int], group: Group) -> list[list[int]]:
    """Equally many whole numbers from every rank of a group."""
    return [list(numbers)] if group is None else start_gather_ints(numbers, group)()


def largest(numbers: Sequence[int], group: Group) -> list[int]:
    """The largest of each number on any rank."""
    return [max(column) for column in zip(*gather_ints(numbers, group), strict=True)]


def start_gather_ints(numbers: Sequence[int], group: Group, beside_work: bool = False) -> Callable[[], list[list[int]]]:
    """As `gather_ints`, but without waiting: what is given waits. They travel between CPUs: a GPU would have to finish
    all that it was asked before. Where a user has joined all ranks by NCCL alone, they go through the group `beside`
    that one; groups of fewer ranks are made for tensors of both."""
    if group is not None and "cpu:" not in dist.get_backend_config(group):
        group = beside(group)
    pending = start_all_gather(torch.tensor(list(numbers), dtype=torch.int64), group, beside_work)
    return lambda: cast(list[list[int]], pending.wait().tolist())


def beside(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """All ranks over gloo, with the time limit of the group that they have joined; made once. All of them call it."""
    assert world is dist.group.WORLD, "groups of fewer ranks carry tensors of the CPU too"
    if world not in _beside:
        _beside[world] = dist.new_group(backend="gloo", timeout=time_limit(world))
    return _beside[world]


def time_limit(group: dist.ProcessGroup) -> timedelta:
    """How long a rank waits for the others of a group."""
    device = dist.get_backend_config(group).partition(":")[0]
    options = group._get_backend(torch.device(device)).options  # some backends have none
    limit: timedelta = getattr(options, "_timeout", dist.default_pg_timeout)
    return limit


def close(group: dist.ProcessGroup) -> None:
    """Say that nothing more comes from this rank through the memory that it shares with the group: who waits there
    fails."""
    ledger.forget(group.group_name)
    channel = _channels.pop(group, None)
    if channel is not None:
        channel.close()


def by_way_of_host(device: torch.device, group: Group) -> bool:
    """Whether tensors of a device that is no CPU reach the other ranks through one."""
    return group is not None and device.type != "cpu" and _over_gloo(device, group)


def _over_gloo(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether gloo carries tensors of this device."""
    return f"{device.type}:gloo" in dist.get_backend_config(group).split(",")


def _for(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """The tensor where the group can send it from."""
    return x.cpu() if not x.is_cpu and _over_gloo(x.device, group) else x


def _channel(x: Tensor, group: dist.ProcessGroup) -> Channel | None:
    """The memory that the group's ranks share, if they do and `x` can go through it; made at the first call."""
    if not x.is_cpu:
        return None
    if group not in _channels:
        _channels[group] = _meet(group) if _over_gloo(x.device, group) else None
    return _channels[group]


def _meet(group: dist.ProcessGroup) -> Channel | None:
    names = [f"rank {rank}" for rank in dist.get_process_group_ranks(group)]
    # no function of this one's variables: a traceback would keep it, and the group's connections open
    channel = shared_memory.meet(
        group.rank(), names, time_limit(group).total_seconds(), functools.partial(_gather_over, group)
    )
    if channel is not None:
        weakref.finalize(group, channel.close)
    return channel


def _gather_over(group: dist.ProcessGroup, numbers: Sequence[int]) -> list[list[int]]:
    row = torch.tensor(list(numbers), dtype=torch.int64)
    rows = row.new_empty(group.size(), len(row))
    _gather_single(rows.view(-1), row, group=group)
    return cast(list[list[int]], rows.tolist())
