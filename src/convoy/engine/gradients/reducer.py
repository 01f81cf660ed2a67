"""Adds the ranks' gradients: during the backward pass, or at its end where they go through shared memory.

Each parameter's gradient is added over the axes on which ranks have only a part of it. Gradients come scaled by the
rank's share of the global batch (`scale_gradient`), so that the sum over all ranks is the gradient of the mean loss.
All ranks start the same collectives in the same order, that of the parameters backwards, whatever becomes ready first.

The end of a backward pass is known to torch's engine alone, which tells it to `queue_callback`, a private function that
DistributedDataParallel rests on too; which pass is running, to another. They are used here and nowhere else.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from convoy.comm.collectives import Group, Pending, largest, start_all_reduce
from convoy.comm.groups import Groups
from convoy.comm.position import current
from convoy.comm.redistribution import first_derivative
from convoy.errors import ConvoyError
from convoy.plans.buckets import Bucket, Item, Sizes, plan_buckets
from convoy.plans.mesh import Axes

_engine = torch.autograd.Variable._execution_engine


def _plainly(function: Callable[[], None]) -> Callable[..., None]:
    """What calls a function for which `.grad` is a plain tensor, also where that is a DividedGradient."""

    def called(*_: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            function()

    return called


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward pass that is running now is done; its errors become those of `backward()`."""
    _engine.queue_callback(_plainly(callback))


def current_backward() -> int:
    """A number for the backward pass that is running in this thread, another one for every pass; -1 for none."""
    return torch._C._current_graph_task_id()


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


class Reducer:
    """Parameters whose gradients are sent in buckets: `_start` is called for one bucket after the other, as soon as all
    gradients of it and of those before have come, or when a backward pass ends (`_start_rest`)."""

    def __init__(
        self, parameters: Sequence[tuple[nn.Parameter, Axes]], groups: Groups, world: Group, sizes: Sizes | None
    ) -> None:
        self.parameters = [parameter for parameter, _ in parameters]
        self._groups, self._world = groups, world  # of other ranks it needs nothing
        numels = largest([parameter.numel() for parameter in self.parameters], world)
        self._items = [Item(axes, p.dtype, p.device, n) for (p, axes), n in zip(parameters, numels, strict=True)]
        sizes = sizes or Sizes.default(self.parameters[0].device if parameters else torch.device("cpu"))
        self.buckets = plan_buckets(self._items, list(reversed(range(len(parameters)))), sizes)
        self._bucket_of = {i: number for number, bucket in enumerate(self.buckets) for i in bucket.members}
        # The nodes must be kept: a parameter itself holds its own only weakly, and the hook would go with it.
        self._nodes = [get_gradient_edge(parameter).node for parameter in self.parameters]
        self._handles: list[Any] = []
        for i, (parameter, node) in enumerate(zip(self.parameters, self._nodes, strict=True)):
            self._handles.append(node.register_prehook(_plainly(partial(self._before, i))))
            self._handles.append(parameter.register_post_accumulate_grad_hook(_plainly(partial(self._after, i))))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._nodes = []

    def _before(self, i: int) -> None:
        """A gradient is about to be added to that of a parameter."""
        raise NotImplementedError

    def _after(self, i: int) -> None:
        """It has been added."""
        raise NotImplementedError

    def _start(self, bucket: Bucket) -> None:
        """The gradients of a bucket have come."""
        raise NotImplementedError

    def _begin_pass(self) -> None:
        self._missing = [len(bucket.members) for bucket in self.buckets]
        self._next = 0

    def _ready(self, i: int) -> None:
        self._missing[self._bucket_of[i]] -= 1
        while self._next < len(self.buckets) and not self._missing[self._next]:
            self._next += 1
            self._start(self.buckets[self._next - 1])

    def _start_rest(self) -> None:
        while self._next < len(self.buckets):
            self._next += 1
            self._start(self.buckets[self._next - 1])

    def _message(self, bucket: Bucket, gradients: Sequence[Tensor | None], missing: float, counts: int = 0) -> Tensor:
        """The gradients of a bucket, flat, with a number in place of those that are missing, and room for counts."""
        if bucket.alone and gradients[0] is not None:
            return flat(laid_out(gradients[0], self.parameters[bucket.members[0]]))
        total = sum(self.parameters[i].numel() for i in bucket.members) + counts
        like = self._items[(bucket.members or bucket.tally)[0]]
        message = torch.empty(total, dtype=like.dtype, device=like.device)
        if any(gradient is None for gradient in gradients):
            message.fill_(missing)
        pairs = [(view, x) for view, x in zip(self._views(bucket, message), gradients, strict=True) if x is not None]
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
        return message

    def _views(self, bucket: Bucket, message: Tensor) -> list[Tensor]:
        """The gradients of a bucket, as they lie in its message."""
        parameters = [self.parameters[i] for i in bucket.members]
        numels = [parameter.numel() for parameter in parameters]
        pieces = message[: sum(numels)].split(numels)
        return [shaped(elements, parameter) for elements, parameter in zip(pieces, parameters, strict=True)]

    def _give(self, bucket: Bucket, message: Tensor, is_used: Sequence[bool]) -> None:
        """Let what has come back be the gradients, in its memory, but of parameters that no rank has used."""
        for i, total in zip(bucket.members, self._views(bucket, message), strict=True):
            if is_used[i]:
                self.parameters[i].grad = total


class GradientReducer(Reducer):
    """Leaves in `.grad`, when `backward()` returns, what every rank's backward pass has given, added up.

    As in a plain run, a backward pass adds to what is in `.grad` already, and several backward passes may follow each
    other. The messages and their order are the same on every rank and in every pass, whatever a rank has to send: a
    gradient that some ranks do not have counts as zero, one that no rank has stays None.

    All ranks make it at the same time, with the same parameters, each with the axes over which its gradient is added
    (none leaves it alone), and run the same number of backward passes. `sizes` are those of the messages.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[nn.Parameter, Axes]],
        groups: Groups,
        *,
        sizes: Sizes | None = None,
    ) -> None:
        shared = [(p, axes) for p, axes in parameters if p.requires_grad and groups.of(axes) is not None]
        self._made_with = shared, groups, sizes
        self._paused = False
        self._first = [groups.mesh.index(groups.coordinates, axes) == 0 for _, axes in shared]
        super().__init__(shared, groups, groups.of({axis for _, axes in shared for axis in axes}), sizes)
        self.abandon()

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
        if self.parameters and not self._paused:
            _plainly(self._finish)()

    def abandon(self) -> None:
        """Forget a backward pass that broke off. All ranks call it."""
        self._fresh = [False] * len(self.parameters)  # has a gradient that was not added over the ranks yet
        self._running = False
        self._seen: set[int] = set()
        self._pending: list[Pending] = []
        self._begin_pass()

    def has_own(self) -> bool:
        """Whether there are gradients that this rank has for itself: of passes in `paused`, none of them dropped."""
        return any(self._fresh[i] and p.grad is not None for i, p in enumerate(self.parameters))

    def adds_any(self, parameters: Iterable[Tensor]) -> bool:
        """Whether it adds up the gradient of any of these."""
        return not set(self.parameters).isdisjoint(parameters)

    def flush(self) -> None:
        """Add what the backward pass that is running has given so far: others begin within it."""
        if self._running:
            self._finish()

    def anew(self) -> "GradientReducer":
        """Another one in place of this, for parameters that have been cast or moved. All ranks call it."""
        if any(not parameter.requires_grad for parameter in self.parameters):
            raise ConvoyError(
                "a parameter was frozen after convoy.parallelize, and the network cast or moved: set requires_grad, "
                "cast, then freeze"
            )
        self.remove()
        parameters, groups, sizes = self._made_with
        return GradientReducer(parameters, groups, sizes=sizes)

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
        self._seen.add(i)
        self._ready(i)

    @torch.no_grad()
    def _start(self, bucket: Bucket) -> None:
        group = self._groups.of(bucket.axes)
        counts = [float(self._fresh[i] and self.parameters[i].grad is not None) for i in bucket.tally]
        gradients = [self.parameters[i].grad if self._fresh[i] or self._first[i] else None for i in bucket.members]
        message = self._message(bucket, gradients, missing=0.0, counts=len(counts))
        if counts:
            tally = message[-len(counts) :]
            tally.fill_(1) if all(counts) else tally.copy_(torch.tensor(counts, dtype=message.dtype))
        self._pending.append(start_all_reduce(message, group))

    @torch.no_grad()
    def _finish(self) -> None:
        current.to("gradient")
        self._start_rest()
        messages = [work.wait() for work in self._pending]
        is_used = [self._fresh[i] and p.grad is not None for i, p in enumerate(self.parameters)]
        if not all(is_used):  # a GPU must be waited for: only a rank that misses one looks
            for bucket, message in zip(self.buckets, messages, strict=True):
                counts = message[-len(bucket.tally) :].tolist() if bucket.tally else ()
                for i, count in zip(bucket.tally, counts, strict=True):
                    is_used[i] = count > 0
        for bucket, message in zip(self.buckets, messages, strict=True):
            self._give(bucket, message, is_used)
        self.abandon()


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """The tensor itself, with a gradient multiplied by `factor`. A rank's loss is the mean over its own n samples of N;
    times n / N, the ranks' gradients add up to that of the mean over all N, however unevenly they are divided."""
    return _ScaleGradient.apply(x, factor)  # type: ignore[no-any-return]


class _UndoScale(_ScaleGradient):
    """The inverse, which `gradient_scale` does not take for a network's output."""


def undo_scale(x: Tensor, factor: float) -> Tensor:
    """The tensor itself, with a gradient divided by `factor` if the output of a network on several ranks went into it.
    One network's output may be another's input. The gradient that comes back there has been multiplied by the rank's
    share of the samples at the second one's output, and would be again at that of the first."""
    if x.grad_fn is None or factor == 0 or not any(gradient_scale(node) is not None for node in graph_of([x.grad_fn])):
        return x
    return _UndoScale.apply(x, 1 / factor)  # type: ignore[no-any-return]


def writable(x: Tensor) -> Tensor:
    """The tensor itself, or a copy of a view: autograd does not let users change in place what a function of ours
    gives as a view, though they may with what a plain layer gives."""
    return x.clone() if x.requires_grad and x._is_view() else x


def graph_of(roots: Sequence[Node]) -> list[Node]:
    """The nodes of autograd's graph from `roots` to the outputs of networks on several ranks."""
    nodes = dict.fromkeys(roots)
    queue = list(roots)
    while queue:
        node = queue.pop()
        if gradient_scale(node) is not None:
            continue
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in nodes:
                nodes[next_node] = None
                queue.append(next_node)
    return list(nodes)


def gradient_scale(node: Node) -> float | None:
    """The factor, where a node of autograd's graph is that of `scale_gradient`; None for any other."""
    is_scale = getattr(type(node), "_forward_cls", None) is _ScaleGradient
    return node.factor if is_scale else None  # type: ignore[attr-defined]
