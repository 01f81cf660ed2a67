"""Gradients added over the ranks in one fixed tree over the microbatches: the reproducible mode.

Floating-point sums depend on their order. Here the order is that of the microbatches (`tree`), so that the weights are
bit for bit the same on any number of ranks and with any shares. Each rank adds what it can of its own consecutive
microbatches, sends pieces of these sums to the pieces' owners, who add them in the order of the tree, and the sums are
gathered. Where the shares are parts of the tree, these are as many bytes as in a ring all-reduce.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from convoy.engine.gradients.backward import BackwardWatch, at_end_of_backward
from convoy.engine.gradients.buckets import Bucket, Item, Sizes, copy_all, flat, laid_out, plan_buckets, shaped
from convoy.engine.gradients.order import largest
from convoy.engine.gradients.queue import MessageQueue
from convoy.engine.gradients.tree import TreeSum, subtrees
from convoy.engine.gradients.tree_exchange import TreeExchange
from convoy.engine.groups import Groups
from convoy.engine.position import here
from convoy.plans.mesh import Axes


class TreeReducer:
    """Leaves the sum over all microbatches in `.grad`, when the rank's last backward pass returns.

    Each backward pass is that of one microbatch; those of a rank follow each other, and the ranks of the sample axes
    have consecutive microbatches in the order of the ranks. `finish` must be called by a rank that has no microbatch,
    and may be by the others. Passes beyond a rank's share (which other ranks need where layers are divided otherwise)
    give nothing to parameters that are added over the sample axes.

    Over other axes gradients are added last, in the order of the ranks.

    Args:
        parameters: each with the axes over which its gradient is added.
        groups: of this rank.
        sample_axes: over which microbatches are divided.
        shares: microbatches of each rank of the sample axes, in order.
        passes: backward passes of every rank in an update, if not those of its share.
        sizes: of the messages.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[nn.Parameter, Axes]],
        groups: Groups,
        *,
        sample_axes: Axes,
        shares: Sequence[int],
        passes: int | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        used = [(parameter, axes) for parameter, axes in parameters if parameter.requires_grad]
        self.parameters = [parameter for parameter, _ in used]
        self._groups = groups
        self._sample_axes = frozenset(sample_axes)
        device = self.parameters[0].device
        self._world = groups.of(groups.mesh.axes)
        numels = [parameter.numel() for parameter in self.parameters]
        numels = numels if self._world is None else largest(numels, self._world, device)
        items = [Item(axes, p.dtype, p.device, n) for (p, axes), n in zip(used, numels, strict=True)]
        planned = plan_buckets(items, list(reversed(range(len(items)))), sizes or Sizes.default(device))
        self.buckets = [bucket for bucket in planned if bucket.members]
        self._queue = MessageQueue(self.buckets, self._complete)
        self.set_shares(shares, passes)
        self._watch = BackwardWatch(self.parameters, self._before, self._after)

    def set_shares(self, shares: Sequence[int], passes: int | None = None) -> None:
        """Divide the microbatches of the next updates otherwise."""
        place = self._groups.mesh.index(self._groups.coordinates, tuple(sorted(self._sample_axes)))
        assert len(shares) == self._groups.mesh.size(tuple(self._sample_axes)), "one share for each rank"
        self._share = shares[place]
        self._leaves = range(sum(shares[:place]), sum(shares[: place + 1]))
        self._passes = self._share if passes is None else passes
        total = sum(shares)
        ends = [sum(shares[:rank]) for rank in range(len(shares) + 1)]
        self._spans = [subtrees(range(a, b), total) for a, b in pairwise(ends)]
        self._sums = [self._tree(bucket, total) for bucket in self.buckets]
        self._begin()

    @torch.no_grad()
    def finish(self) -> None:
        """Take part in an update without a microbatch of one's own."""
        if self._passes == 0:
            self._queue.rest()
            self._give()
        elif self._pass:
            raise RuntimeError(f"only {self._pass} of this rank's {self._passes} microbatches have run")

    def remove(self) -> None:
        """Leave the parameters alone from now on."""
        self._watch.remove()

    def _sampled(self, bucket: Bucket) -> bool:
        return bool(self._sample_axes.intersection(bucket.axes))

    def _tree(self, bucket: Bucket, total: int) -> TreeSum[Tensor]:
        return TreeSum(total if self._sampled(bucket) else max(self._passes, 1), lambda a, b: a.add_(b))

    def _begin(self) -> None:
        self._pass = 0
        self._running = False
        self._users = [False] * len(self.parameters)
        self._exchanges: list[TreeExchange] = []
        self._queue.begin()

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
        self._queue.ready(i)

    @torch.no_grad()
    def _end_of_pass(self) -> None:
        self._queue.rest()
        self._queue.begin()
        self._running = False
        self._pass += 1
        if self._pass >= self._passes:
            self._give()

    @torch.no_grad()
    def _complete(self, number: int) -> None:
        """All gradients of a bucket are there for this microbatch, or will not come."""
        bucket = self.buckets[number]
        leaf = self._leaves.start + self._pass if self._sampled(bucket) else self._pass
        if self._pass < (self._share if self._sampled(bucket) else self._passes):
            self._sums[number].put((leaf, leaf + 1), self._message(bucket))
        for i in bucket.members:
            self.parameters[i].grad = None
        if self._pass + 1 >= self._passes:
            self._exchange(number)

    def _exchange(self, number: int) -> None:
        """Send the sums of this rank's microbatches."""
        bucket = self.buckets[number]
        parts = [value for _, value in self._sums[number].take()]
        out = parts[0] if parts else self._neutral(bucket)
        group = self._groups.of(self._sample_axes.intersection(bucket.axes))
        then = self._groups.of(set(bucket.axes) - self._sample_axes)
        if self._sampled(bucket):
            spans = self._spans
        else:
            parts, spans = [out], [[(0, 1)]]
        self._exchanges.append(TreeExchange(parts, spans, out, group, then))

    def _give(self) -> None:
        """Put the sums into `.grad`."""
        here.to("gradient")
        for exchange in self._exchanges:
            exchange.add()
        users = [int(user) for user in self._users]
        if self._world is not None:
            users = largest(users, self._world, self.parameters[0].device)
        for bucket, exchange in zip(self.buckets, self._exchanges, strict=True):
            for i, total in zip(bucket.members, self._views(bucket, exchange.wait()), strict=True):
                if users[i]:
                    self.parameters[i].grad = total
        self._begin()

    def _message(self, bucket: Bucket) -> Tensor:
        parameters = [self.parameters[i] for i in bucket.members]
        gradients = [parameter.grad for parameter in parameters]
        if bucket.alone and gradients[0] is not None:
            return flat(laid_out(gradients[0], parameters[0]))
        message = self._neutral(bucket)
        views = self._views(bucket, message)
        present = [(view, gradient) for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
        copy_all([view for view, _ in present], [gradient for _, gradient in present])
        return message

    def _neutral(self, bucket: Bucket) -> Tensor:
        """What leaves every sum as it is, bit for bit: −0, as 0 + −0 is 0."""
        parameter = self.parameters[bucket.members[0]]
        total = sum(self.parameters[i].numel() for i in bucket.members)
        return torch.full((total,), -0.0, dtype=parameter.dtype, device=parameter.device)

    def _views(self, bucket: Bucket, message: Tensor) -> list[Tensor]:
        parameters = [self.parameters[i] for i in bucket.members]
        pieces = message.split([parameter.numel() for parameter in parameters])
        return [shaped(elements, parameter) for elements, parameter in zip(pieces, parameters, strict=True)]
