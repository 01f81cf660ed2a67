"""One sum over the ranks in the order of the tree over the microbatches."""

from collections.abc import Sequence

from torch import Tensor

from convoy.engine.collectives import Group, Pending, place, size, start_exchange_into
from convoy.engine.gradients.pieces import ReduceScatter, own_piece, pieces_of, start_gather
from convoy.engine.gradients.tree import Span, TreeSum


class TreeExchange:
    """Begins to send the pieces of this rank's partial sums to the pieces' owners.

    Args:
        parts: what this rank has of the tree; the tensors, flat and of one length, are overwritten.
        spans: what each rank of the group has of it.
        out: flat, for the sum; may be the first of `parts`.
        group: over which the microbatches are divided.
        then: over which the sum is added afterwards, in the order of the ranks.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        spans: Sequence[Sequence[Span]],
        out: Tensor,
        group: Group,
        then: Group,
    ) -> None:
        ranks, here = size(group), place(group)
        assert len(parts) == len(spans[here]), "not the parts of the tree that were agreed"
        self._group = group
        self._then = then
        self._out = out
        self._piece = own_piece(out, group)
        mine = [pieces_of(part, group) for part in parts]
        self._terms: list[tuple[Span, Tensor]] = []
        self._pending: list[Pending] = []
        received: dict[Span, Tensor] = {span: views[here] for span, views in zip(spans[here], mine, strict=True)}
        nothing = out.new_empty(0)
        for number in range(max(map(len, spans)) if ranks > 1 else 0):
            send = mine[number] if number < len(mine) else [nothing] * ranks
            receive = [nothing] * ranks
            for rank, theirs in enumerate(spans):
                if rank != here and number < len(theirs):
                    receive[rank] = received[theirs[number]] = out.new_empty(len(self._piece))
            self._pending.append(start_exchange_into(send, receive, group))
        self._terms = sorted(received.items(), key=lambda term: term[0])

    def add(self) -> None:
        """Add the own piece and begin to gather the others'."""
        for work in self._pending:
            work.wait()
        total = TreeSum[Tensor](self._terms[-1][0][1], lambda left, right: left.add_(right))
        for span, value in self._terms:
            total.put(span, value)
        ((_, result),) = total.take()
        self._terms = []
        if result.data_ptr() != self._piece.data_ptr():
            self._piece.copy_(result)
        if self._then is not None:
            ReduceScatter(self._piece, self._then).wait()
            start_gather(self._piece, self._then).wait()
        self._pending = [start_gather(self._out, self._group)]

    def wait(self) -> Tensor:
        """The sum."""
        for work in self._pending:
            work.wait()
        return self._out
