"""Sums and exchanges over a channel, in rounds of as many bytes as a slot has."""

from collections.abc import Sequence

import torch
from torch import Tensor

from convoy.engine.shared_memory.channel import SLOT, Channel

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


def all_to_all(x: Tensor, channel: Channel) -> Tensor:
    """[ranks, ...] to [ranks, ...]: row q goes to rank q, row p of the result comes from rank p."""
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    exchange_into(x.unbind(0), received.unbind(0), channel)
    received[channel.index].copy_(x[channel.index])
    return received


def exchange(sends: Sequence[Tensor | None], shapes: Sequence[Sequence[int] | None], channel: Channel) -> list[Tensor]:
    """A tensor of any shape to every rank, one from every rank; None for nothing."""
    some = next(x for x in sends if x is not None)
    received = [some.new_empty((0,) if shape is None else tuple(shape)) for shape in shapes]
    exchange_into(sends, received, channel)
    if (own := sends[channel.index]) is not None:
        received[channel.index].copy_(own)
    return received


@torch.no_grad()
def reduce_scatter(x: Tensor, channel: Channel) -> Tensor:
    """[ranks, ...] to [...]: the sum over ranks, in their order, of the row with this rank's number."""
    rows = x.reshape(channel.ranks, -1)
    found = rows.new_empty(rows.shape[1])
    step = SLOT // x.itemsize // channel.ranks
    for start in range(0, rows.shape[1], step):
        part = rows[:, start : start + step]
        width = part.shape[1]
        channel.outgoing(x.dtype)[: part.numel()].view(part.shape).copy_(part)
        channel.post(_tag(3, x))
        total = found[start : start + step]
        mine = slice(channel.index * width, (channel.index + 1) * width)
        _add([channel.message(rank, x.dtype)[mine] for rank in range(channel.ranks)], total)
    return found.view(x.shape[1:])


@torch.no_grad()
def exchange_into(sends: Sequence[Tensor | None], receives: Sequence[Tensor], channel: Channel) -> Sequence[Tensor]:
    """Send `sends[q]`, of any shape, to rank q, and fill the contiguous `receives[q]` with what comes from it.

    What stands at the own place is left alone. Ranks may send different numbers of bytes: every message begins with how
    many rounds its sender needs, and how many bytes there are for each rank.
    """
    others = [rank for rank in range(channel.ranks) if rank != channel.index]
    begin = _header(channel)
    width = (SLOT - begin) // channel.ranks // 64 * 64
    given = {rank: x for rank in others if (x := sends[rank]) is not None and x.numel()}
    wanted = {rank: x for rank in others if (x := receives[rank]).numel()}
    needed = max((-(-x.nbytes // width) for x in given.values()), default=1)
    if needed > 1:
        given = {rank: x.reshape(-1) for rank, x in given.items()}
    number, rounds = 0, needed
    while number < rounds:
        header = channel.outgoing(torch.int64)
        header[0] = needed
        for rank in others if number == 0 else ():
            header[1 + rank] = given[rank].nbytes if rank in given else 0
        for rank, x in given.items() if number < needed else ():
            part = _part(x, number, width) if needed > 1 else x
            _place(channel.outgoing(x.dtype), begin + rank * width, part).copy_(part)
        channel.post(_EXCHANGE)
        if number == 0:
            for rank in others:
                sent = channel.message(rank, torch.int64)
                rounds = max(rounds, int(sent[0]))
                channel.expect(rank, int(sent[1 + channel.index]) == (wanted[rank].nbytes if rank in wanted else 0))
            if rounds > 1:
                wanted = {rank: x.view(-1) for rank, x in wanted.items()}
        for rank, x in wanted.items():
            part = _part(x, number, width) if rounds > 1 else x
            part.copy_(_place(channel.message(rank, x.dtype), begin + channel.index * width, part))
        number += 1
    return receives


def _tag(kind: int, x: Tensor) -> int:
    """What is done, on numbers of which size, with how many of them."""
    return (x.numel() << 16) + (x.itemsize << 8) + (int(x.is_floating_point()) << 4) + kind


def _part(x: Tensor, number: int, width: int) -> Tensor:
    """What a flat tensor sends in one round."""
    step = width // x.itemsize
    return x[number * step : (number + 1) * step]


def _header(channel: Channel) -> int:
    """Bytes before the parts."""
    return -(-8 * (1 + channel.ranks) // 64) * 64


def _place(slot: Tensor, begin: int, part: Tensor) -> Tensor:
    """Where a message has the part for one receiver, from byte `begin` on."""
    start = begin // part.itemsize
    return slot[start : start + part.numel()].view(part.shape)


def _add_all(x: Tensor, channel: Channel, tag: int) -> None:
    """Every rank adds all."""
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
