"""Gradients added in one fixed binary tree over the microbatches: the reproducible mode.

Floating-point sums depend on their order. Here the order depends on the number of microbatches alone, so that the
weights are bit for bit the same on any number of ranks and with any shares. The tree of n leaves has the tree of the
first 2^m leaves on the left, 2^m being the largest power of two below n, and that of the others on the right.

Over several ranks each adds what it can of its own consecutive microbatches, sends pieces of these sums to the pieces'
owners, who add them in the order of the tree, and the sums are gathered. Where the shares are parts of the tree, these
are as many bytes as in a ring all-reduce.
"""

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from convoy.comm.collectives import Group, Pending, all_gather, largest, place, size, start_exchange_into
from convoy.comm.groups import Groups
from convoy.comm.position import current
from convoy.engine.gradients.reducer import Reducer, at_end_of_backward
from convoy.plans.buckets import Bucket, Sizes
from convoy.plans.mesh import Axes

Span = tuple[int, int]
T = TypeVar("T")
_NEUTRAL = -0.0  # leaves every sum as it is, bit for bit, as 0 + −0 is 0


def tree(span: Span) -> set[Span]:
    """All parts of the tree over some leaves, down to these."""
    first, last = span
    if last - first < 2:
        return {span} if first < last else set()
    half = first + (1 << (last - first - 1).bit_length() - 1)
    return {span} | tree((first, half)) | tree((half, last))


def subtrees(leaves: range, total: int) -> list[Span]:
    """The largest parts of the tree over `total` leaves that consist of the given consecutive leaves, in order."""
    spans: list[Span] = []
    for first, last in sorted(tree((0, total)), key=lambda span: (span[0], -span[1])):
        if leaves.start <= first and last <= leaves.stop and (not spans or first >= spans[-1][1]):
            spans.append((first, last))
    return spans


class TreeSum(Generic[T]):
    """Adds parts of the tree over `total` leaves, coming from left to right, as soon as neighbours belong together."""

    def __init__(self, total: int, add: Callable[[T, T], T]) -> None:
        self._tree = tree((0, total))
        self._add = add
        self._parts: list[tuple[Span, T]] = []

    def put(self, span: Span, value: T) -> None:
        # two parts beside each other are the halves of a third one if that is a part of the tree
        while self._parts and self._parts[-1][0][1] == span[0] and (self._parts[-1][0][0], span[1]) in self._tree:
            left, partial = self._parts.pop()
            span, value = (left[0], span[1]), self._add(partial, value)
        self._parts.append((span, value))

    def take(self) -> list[tuple[Span, T]]:
        """The sums that could be made, from left to right: one where all leaves are there. Begins anew."""
        parts, self._parts = self._parts, []
        return parts


class TreeExchange:
    """Begins to send the pieces of this rank's partial sums to the pieces' owners. `parts` are this rank's sums, flat
    and of one length, and are overwritten; `spans` says which parts of the tree each rank of the group has; `out` is
    flat, for the sum, and may be the first of `parts`. Microbatches are divided over `group`, and the sum is added over
    `then` afterwards, in the order of the ranks."""

    def __init__(
        self, parts: Sequence[Tensor], spans: Sequence[Sequence[Span]], out: Tensor, group: Group, then: Group
    ) -> None:
        ranks, own_place = size(group), place(group)
        assert len(parts) == len(spans[own_place]), "not the parts of the tree that were agreed"
        self._group = group
        self._then = then
        self._out = out
        self._pieces = list(out.tensor_split(ranks))  # of each rank, as even as can be
        self._piece = self._pieces[own_place]
        own_pieces = [list(part.tensor_split(ranks)) for part in parts]
        self._terms: list[tuple[Span, Tensor]] = []
        self._pending: list[Pending] = []
        sums: dict[Span, Tensor] = {
            span: views[own_place] for span, views in zip(spans[own_place], own_pieces, strict=True)
        }
        nothing = out.new_empty(0)
        for number in range(max(map(len, spans)) if ranks > 1 else 0):
            send = own_pieces[number] if number < len(own_pieces) else [nothing] * ranks
            receive = [nothing] * ranks
            for rank, rank_spans in enumerate(spans):
                if rank != own_place and number < len(rank_spans):
                    receive[rank] = sums[rank_spans[number]] = out.new_empty(len(self._piece))
            self._pending.append(start_exchange_into(send, receive, group))
        self._terms = sorted(sums.items(), key=lambda term: term[0])

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
            self._piece.copy_(functools.reduce(torch.add, all_gather(self._piece, self._then).unbind(0)))
        self._pending = [start_exchange_into([self._piece] * len(self._pieces), self._pieces, self._group)]

    def wait(self) -> Tensor:
        for work in self._pending:
            work.wait()
        return self._out


class TreeReducer(Reducer):
    """Leaves the sum over all microbatches in `.grad`, when the rank's last backward pass returns.

    Each backward pass is that of one microbatch; those of a rank follow each other, and the ranks of the sample axes
    have consecutive microbatches in the order of the ranks. `finish` must be called by a rank that has no microbatch,
    and may be by the others. Passes beyond a rank's share (which other ranks need where layers are divided otherwise)
    give nothing to parameters that are added over the sample axes.

    Each parameter comes with the axes over which its gradient is added; axes that are not sample axes are added last,
    in the order of the ranks. `shares` are the microbatches of each rank of the sample axes, in order, and `passes` the
    backward passes of every rank in an update.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[nn.Parameter, Axes]],
        groups: Groups,
        *,
        sample_axes: Axes,
        shares: Sequence[int],
        passes: int,
        sizes: Sizes | None = None,
    ) -> None:
        entries = [(parameter, axes) for parameter, axes in parameters if parameter.requires_grad]
        self._sample_axes = frozenset(sample_axes)
        axes_of_all = {axis for _, axes in entries for axis in axes}
        super().__init__(entries, groups, groups.of(axes_of_all | self._sample_axes), sizes)
        self.set_shares(shares, passes)

    def set_shares(self, shares: Sequence[int], passes: int) -> None:
        """Divide the microbatches of the next updates otherwise."""
        place = self._groups.mesh.index(self._groups.coordinates, tuple(sorted(self._sample_axes)))
        assert len(shares) == self._groups.mesh.size(tuple(self._sample_axes)), "one share for each rank"
        self._share = shares[place]
        self._leaves = range(sum(shares[:place]), sum(shares[: place + 1]))
        self._passes = passes
        total = sum(shares)
        ends = [sum(shares[:rank]) for rank in range(len(shares) + 1)]
        self._spans = [subtrees(range(a, b), total) for a, b in pairwise(ends)]
        self._sums = {bucket: self._tree(bucket, total) for bucket in self.buckets if bucket.members}
        self._begin()

    @torch.no_grad()
    def finish(self) -> None:
        """Take part in an update without a microbatch of one's own."""
        if self._passes == 0:
            self._start_rest()
            self._give_all()
        elif self._pass:
            raise RuntimeError(f"only {self._pass} of this rank's {self._passes} microbatches have run")

    def abandon(self) -> None:
        """Forget an update whose passes broke off. All ranks call it."""
        for sums in self._sums.values():
            sums.take()
        self._begin()

    def _sampled(self, bucket: Bucket) -> bool:
        return bool(self._sample_axes.intersection(bucket.axes))

    def _tree(self, bucket: Bucket, total: int) -> TreeSum[Tensor]:
        return TreeSum(total if self._sampled(bucket) else max(self._passes, 1), lambda a, b: a.add_(b))

    def _begin(self) -> None:
        self._pass = 0
        self._running = False
        self._users = [False] * len(self.parameters)
        self._exchanges: list[tuple[Bucket, TreeExchange]] = []
        self._begin_pass()

    def _before(self, i: int) -> None:
        if self.parameters[i].grad is not None:
            raise RuntimeError(
                "gradients are left from the update before: call zero_grad() before the first microbatch of an update"
            )

    def _after(self, i: int) -> None:
        if not self._running:
            self._running = True
            at_end_of_backward(self._end_of_pass)
        self._users[i] = True
        self._ready(i)

    @torch.no_grad()
    def _end_of_pass(self) -> None:
        self._start_rest()
        self._begin_pass()
        self._running = False
        self._pass += 1
        if self._pass >= self._passes:
            self._give_all()

    @torch.no_grad()
    def _start(self, bucket: Bucket) -> None:
        if not bucket.members:  # it would only count users
            return
        leaf = self._leaves.start + self._pass if self._sampled(bucket) else self._pass
        if self._pass < (self._share if self._sampled(bucket) else self._passes):
            gradients = [self.parameters[i].grad for i in bucket.members]
            self._sums[bucket].put((leaf, leaf + 1), self._message(bucket, gradients, _NEUTRAL))
        for i in bucket.members:
            self.parameters[i].grad = None
        if self._pass + 1 >= self._passes:
            self._exchange(bucket)

    def _exchange(self, bucket: Bucket) -> None:
        parts = [value for _, value in self._sums[bucket].take()]
        out = parts[0] if parts else self._message(bucket, [None] * len(bucket.members), _NEUTRAL)
        group = self._groups.of(self._sample_axes.intersection(bucket.axes))
        then = self._groups.of(set(bucket.axes) - self._sample_axes)
        if self._sampled(bucket):
            spans = self._spans
        else:
            parts, spans = [out], [[(0, 1)]]
        self._exchanges.append((bucket, TreeExchange(parts, spans, out, group, then)))

    def _give_all(self) -> None:
        current.to("gradient")
        for _, exchange in self._exchanges:
            exchange.add()
        users = largest([int(user) for user in self._users], self._world)
        for bucket, exchange in self._exchanges:
            self._give(bucket, exchange.wait(), [bool(user) for user in users])
        self._begin()
