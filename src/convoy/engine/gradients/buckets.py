"""Messages of gradients in memory: flat copies of small ones, views of large ones, and pieces that ranks own.

In a `ReduceScatter` each rank owns a piece of the sum: exchange, add in one fixed order, gather. A ring all-reduce is
the same two halves, but the order of its additions depends on the backend, the number of ranks and the place of an
element.
"""

import torch
from torch import Tensor

from convoy.comm.collectives import Group, Pending, place, size, start_exchange_into
from convoy.plans.layout import balanced


def pieces_of(elements: Tensor, group: Group) -> list[Tensor]:
    """Views of flat elements, the piece of each rank, as even as can be."""
    return list(elements.split([len(part) for part in balanced(len(elements), size(group))]))


def own_piece(elements: Tensor, group: Group) -> Tensor:
    """The view of flat elements that this rank owns."""
    return pieces_of(elements, group)[place(group)]


def start_gather(elements: Tensor, group: Group) -> Pending:
    """Begin to fill in the pieces that other ranks own, in place."""
    pieces = pieces_of(elements, group)
    return start_exchange_into([pieces[place(group)]] * size(group), pieces, group)


class ReduceScatter:
    """Begins to add flat elements over a group, in order of the ranks, into each rank's own piece, in place."""

    def __init__(self, elements: Tensor, group: Group) -> None:
        pieces = pieces_of(elements, group)
        self._mine = pieces[place(group)]
        self._terms = [piece if piece is self._mine else self._mine.new_empty(len(self._mine)) for piece in pieces]
        self._work = start_exchange_into(pieces, self._terms, group)

    def wait(self) -> Tensor:
        """The own piece of the sum."""
        self._work.wait()
        total = self._terms[0]
        for term in self._terms[1:]:
            total = total.add_(term) if total is self._mine else term.add_(total)
        self._terms = []
        return total if total is self._mine else self._mine.copy_(total)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie without gap or overlap in memory, in whatever order of dimensions."""
    next_stride = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent == 1:
            continue
        if stride != next_stride:
            return False
        next_stride *= extent
    return True


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of memory, without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,))


def shaped(elements: Tensor, like: Tensor) -> Tensor:
    """Flat elements in the shape and the order of dimensions of another tensor, without a copy."""
    stride = like.stride() if is_dense(like) else torch.empty(like.shape, device="meta").stride()
    return elements.as_strided(like.shape, stride, elements.storage_offset())


def laid_out(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient with its elements in memory as `shaped` expects them: itself, as autograd gives it, or a copy."""
    if gradient.stride() == like.stride() and is_dense(like):
        return gradient
    target = shaped(torch.empty(like.numel(), dtype=gradient.dtype, device=gradient.device), like)
    return gradient if gradient.stride() == target.stride() else target.copy_(gradient)
