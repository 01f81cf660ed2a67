"""Adds the ranks' gradients: during the backward pass, or at its end where they go through shared memory.

Each parameter's gradient is added over the axes on which ranks have only a part of it. Gradients come scaled by the
rank's share of the global batch, so that the sum over all ranks is the gradient of the mean loss. All ranks start the
same collectives in the same order, whatever becomes ready first (`MessageQueue`).

The end of a backward pass is known to torch's engine alone, which tells it to `queue_callback`, a private function that
DistributedDataParallel rests on too; which pass is running, to another. They are used here and nowhere else.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from convoy.comm.collectives import Group, Pending, gather_ints, start_all_reduce
from convoy.comm.groups import Groups
from convoy.comm.position import current
from convoy.errors import ConvoyError
from convoy.plans.buckets import Bucket, Item, Sizes, plan_buckets
from convoy.plans.mesh import Axes

_engine = torch.autograd.Variable._execution_engine


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward pass that is running now is done; its errors become those of `backward()`."""

    def called() -> None:
        with torch._C.DisableTorchFunctionSubclass():  # `.grad` may be a DividedGradient
            callback()

    _engine.queue_callback(called)


def current_backward() -> int:
    """A number for the backward pass that is running in this thread, another one for every pass; -1 for none."""
    return torch._C._current_graph_task_id()


class BackwardWatch:
    """Calls `before(i)` and `after(i)` around the addition of a gradient to `parameters[i].grad`."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], before: Callable[[int], None], after: Callable[[int], None]
    ) -> None:
        # The nodes must be kept: a parameter itself holds its own only weakly, and the hook would go with it.
        self._nodes = [get_gradient_edge(parameter).node for parameter in parameters]
        self._handles = [node.register_prehook(_telling(before, i)) for i, node in enumerate(self._nodes)]
        self._handles += [
            parameter.register_post_accumulate_grad_hook(_telling(after, i)) for i, parameter in enumerate(parameters)
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._nodes = []


def _telling(function: Callable[[int], None], i: int) -> Callable[[Any], None]:
    def hook(_: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # `.grad` may be a DividedGradient
            function(i)

    return hook


def largest(numbers: Sequence[int], group: Group) -> list[int]:
    """The largest of each number on any rank."""
    return [max(column) for column in zip(*gather_ints(numbers, group), strict=True)]


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


class MessageQueue:
    """Calls `start(number)` for one bucket after the other."""

    def __init__(self, buckets: Sequence[Bucket], start: Callable[[int], None]) -> None:
        self._buckets = buckets
        self._start = start
        self._bucket_of = {member: number for number, bucket in enumerate(buckets) for member in bucket.members}
        self.begin()

    def begin(self) -> None:
        self._missing = [len(bucket.members) for bucket in self._buckets]
        self._next = 0

    def ready(self, member: int) -> None:
        """Note a gradient and start what can be started."""
        self._missing[self._bucket_of[member]] -= 1
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._next += 1
            self._start(self._next - 1)

    def rest(self) -> None:
        """Start all that is left, ready or not."""
        while self._next < len(self._buckets):
            self._next += 1
            self._start(self._next - 1)


class GradientReducer:
    """Leaves in `.grad`, when `backward()` returns, what every rank's backward pass has given, added up.

    As in a plain run, a backward pass adds to what is in `.grad` already, and several backward passes may follow each
    other. The messages and their order are the same on every rank and in every pass, whatever a rank has to send: a
    gradient that some ranks do not have counts as zero, one that no rank has stays None.

    All ranks make it at the same time, with the same parameters, each with the axes over which its gradient is added
    (none leaves it alone), and run the same number of backward passes. `sizes` are those of the messages; `compress`
    sends gradients in that type, which is approximate: they are rounded before they are sent, and partial sums after
    each addition; in bfloat16, with 8 bits of precision, by about 0.4 % of each element.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[nn.Parameter, Axes]],
        groups: Groups,
        *,
        sizes: Sizes | None = None,
        compress: torch.dtype | None = None,
    ) -> None:
        shared = [(p, axes) for p, axes in parameters if p.requires_grad and groups.of(axes) is not None]
        self._made_with = shared, groups, sizes, compress
        self.parameters = [parameter for parameter, _ in shared]
        self._groups = groups
        self._compress = compress
        self._paused = False
        self._watch: BackwardWatch | None = None
        if not shared:
            return
        self._first = [groups.mesh.index(groups.coordinates, axes) == 0 for _, axes in shared]
        self._sizes = sizes or Sizes.default(self.parameters[0].device)
        self._world = groups.of({axis for _, axes in shared for axis in axes})  # of other ranks it needs nothing
        assert self._world is not None
        numels = largest([parameter.numel() for parameter in self.parameters], self._world)
        self._items = [Item(axes, p.dtype, p.device, n) for (p, axes), n in zip(shared, numels, strict=True)]
        self._order = list(reversed(range(len(shared))))  # until a backward pass has shown a better one
        self._order_seen = False
        self._plan()
        self._fresh = [False] * len(shared)  # has a gradient that was not added over the ranks yet
        self._begin()
        self._watch = BackwardWatch(self.parameters, self._before, self._after)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes in here keep their gradients to this rank; the next one outside adds up all of them."""
        was_paused, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = was_paused

    def reduce(self) -> None:
        """Add what paused backward passes have left, without another one; nothing while they are paused."""
        if self._watch is not None and not self._paused:
            with torch._C.DisableTorchFunctionSubclass():  # `.grad` may be a DividedGradient
                self._finish()

    def abandon(self) -> None:
        """Forget a backward pass that broke off. All ranks call it."""
        if self._watch is not None:
            self._fresh = [False] * len(self._fresh)
            self._begin()

    def adds_any(self, parameters: Iterable[Tensor]) -> bool:
        """Whether it adds up the gradient of any of these."""
        return not set(self.parameters).isdisjoint(parameters)

    def flush(self) -> None:
        """Add what the backward pass that is running has given so far: others begin within it."""
        if self._watch is not None and self._running:
            self._finish()

    def anew(self) -> "GradientReducer":
        """Another one in place of this, for parameters that have been cast or moved. All ranks call it."""
        if any(not parameter.requires_grad for parameter in self.parameters):
            raise ConvoyError(
                "a parameter was frozen after convoy.parallelize, and the network cast or moved: set requires_grad, "
                "cast, then freeze"
            )
        self.remove()
        parameters, groups, sizes, compress = self._made_with
        return GradientReducer(parameters, groups, sizes=sizes, compress=compress)

    def remove(self) -> None:
        if self._watch is not None:
            self._watch.remove()

    def _plan(self) -> None:
        self.buckets = plan_buckets(self._items, self._order, self._sizes)
        self._messages: list[Tensor | None] = [None] * len(self.buckets)
        self._views: dict[int, list[Tensor]] = {}
        self._queue = MessageQueue(self.buckets, self._start)

    def _begin(self) -> None:
        self._running = False
        self._seen: dict[int, None] = {}
        self._pending: list[Pending] = []
        self._queue.begin()

    def _before(self, i: int) -> None:
        """What is in `.grad` already has been added over the ranks: see that it counts once."""
        if not (self._fresh[i] or self._first[i]):
            self.parameters[i].grad = None

    def _after(self, i: int) -> None:
        self._fresh[i] = True
        if self._paused:
            return
        if not self._running:
            self._running = True
            at_end_of_backward(self.flush)
        if i in self._seen:
            raise RuntimeError(
                f"parameter {i} of shape {tuple(self.parameters[i].shape)} got two gradients in one backward pass: an "
                "earlier pass broke off, or reentrant checkpoints share the parameter (use_reentrant=False is needed)"
            )
        self._seen[i] = None
        self._queue.ready(i)

    def _start(self, number: int) -> None:
        bucket = self.buckets[number]
        group = self._groups.of(bucket.axes)
        assert group is not None
        with torch.no_grad():
            message = self._own_message(bucket.members[0]) if bucket.alone else self._copied_message(number)
            self._messages[number] = message
            if self._compress is not None and self._compress.itemsize < message.itemsize:
                rounded = start_all_reduce(message.to(self._compress), group)
                self._pending.append(Pending((), lambda: message.copy_(rounded.wait())))
            else:
                self._pending.append(start_all_reduce(message, group))

    def _own_message(self, i: int) -> Tensor:
        parameter = self.parameters[i]
        if parameter.grad is None or not self._contributes(i):
            return torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        parameter.grad = laid_out(parameter.grad, parameter)
        return flat(parameter.grad)

    def _copied_message(self, number: int) -> Tensor:
        bucket = self.buckets[number]
        message = self._messages[number]
        if message is None:
            total = sum(self.parameters[i].numel() for i in bucket.members) + len(bucket.tally)
            first = self._items[(bucket.members or bucket.tally)[0]]
            message = torch.empty(total, dtype=first.dtype, device=first.device)
            self._views[number] = self._cut(bucket, message)
        gradients = {i: self.parameters[i].grad for i in bucket.members if self._contributes(i)}
        views = dict(zip(bucket.members, self._views[number], strict=True))
        contributions = {i: gradient for i, gradient in gradients.items() if gradient is not None}
        if contributions:
            torch._foreach_copy_([views[i] for i in contributions], list(contributions.values()))
        for i in bucket.members:
            if i not in contributions:
                views[i].zero_()
        if bucket.tally:
            counts = [float(self._fresh[i] and self.parameters[i].grad is not None) for i in bucket.tally]
            tally = message[-len(counts) :]
            tally.fill_(1) if all(counts) else tally.copy_(torch.tensor(counts, dtype=message.dtype))
        return message

    def _contributes(self, i: int) -> bool:
        return self._fresh[i] or self._first[i]

    def _cut(self, bucket: Bucket, message: Tensor) -> list[Tensor]:
        parameters = [self.parameters[i] for i in bucket.members]
        pieces = message[: sum(p.numel() for p in parameters)].split([p.numel() for p in parameters])
        return [shaped(elements, parameter) for elements, parameter in zip(pieces, parameters, strict=True)]

    @torch.no_grad()
    def _finish(self) -> None:
        current.to("gradient")
        self._queue.rest()
        for work in self._pending:
            work.wait()
        has_gradient = [self._fresh[i] and p.grad is not None for i, p in enumerate(self.parameters)]
        is_used = has_gradient if all(has_gradient) else self._used()
        for number, (bucket, message) in enumerate(zip(self.buckets, self._messages, strict=True)):
            assert message is not None
            if bucket.alone:
                self._take(bucket.members[0], shaped(message, self.parameters[bucket.members[0]]), is_used)
            else:
                self._take_copies(bucket, self._views[number], is_used)
        for number, bucket in enumerate(self.buckets):
            if bucket.alone:
                self._messages[number] = None
        self._fresh = [False] * len(self._fresh)
        order = list(self._seen)
        self._begin()
        if not self._order_seen:
            self._learn_order(order)

    def _used(self) -> list[bool]:
        """Which parameters have a gradient on any rank. A GPU must be waited for: only a rank that misses one asks."""
        is_used = [False] * len(self.parameters)
        for bucket, message in zip(self.buckets, self._messages, strict=True):
            if bucket.tally and message is not None:
                for i, count in zip(bucket.tally, message[-len(bucket.tally) :].tolist(), strict=True):
                    is_used[i] = count > 0
        return is_used

    def _take(self, i: int, total: Tensor, is_used: list[bool]) -> None:
        gradient = self.parameters[i].grad
        if is_used[i] and (gradient is None or gradient.data_ptr() != total.data_ptr()):
            self.parameters[i].grad = total

    def _take_copies(self, bucket: Bucket, views: list[Tensor], is_used: list[bool]) -> None:
        gradients, totals = [], []
        for i, total in zip(bucket.members, views, strict=True):
            gradient = self.parameters[i].grad
            if is_used[i] and gradient is None:
                self.parameters[i].grad = total.clone()
            elif is_used[i] and gradient is not None:
                gradients.append(gradient)
                totals.append(total)
        if gradients:
            torch._foreach_copy_(gradients, totals)

    def _learn_order(self, arrivals: Sequence[int]) -> None:
        """Send in the order in which rank 0's gradients have become ready."""
        assert self._world is not None
        arrival_set = set(arrivals)
        order = [*arrivals, *(i for i in self._order if i not in arrival_set)]
        agreed = gather_ints(order, self._world)[0]
        self._order_seen = True
        if agreed != self._order:
            self._order = agreed
            self._plan()
            self._begin()
