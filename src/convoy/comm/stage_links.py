"""Values that the stages of a network send each other, and gradients back, beside the computation.

A value arrives with the strides that it had, as on others a kernel may add in another order. How it lies is said once,
before the first value of a kind: only the rank that has computed it knows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from convoy.comm.collectives import Pending, broadcast, gather_ints, start_receive, start_send, waiting
from convoy.comm.groups import Groups
from convoy.comm.position import current
from convoy.errors import ConvoyError
from convoy.plans.stages import DTYPES, MOST_DIMS, Crossing

# in place of a kind: a gradient that there is not, as the loss does not depend on the value
_NOTHING = [-1] * (MOST_DIMS + 3)
_TAG = 2**20  # above the tags of collectives, which are 0, and those of other senders through the same group


@dataclass(frozen=True)
class Kind:
    """How a tensor lies in memory, which a graph does not say, as autocast and kernels decide it."""

    dtype: torch.dtype
    needs_gradient: bool
    strides: tuple[int, ...]

    @staticmethod
    def of(x: Tensor) -> "Kind":
        return Kind(x.dtype, x.requires_grad, x.stride())

    def numbers(self) -> list[int]:
        """Equally many numbers for every kind."""
        padding = [0] * (MOST_DIMS - len(self.strides))
        return [DTYPES.index(self.dtype), int(self.needs_gradient), len(self.strides), *self.strides, *padding]

    @staticmethod
    def read(numbers: Sequence[int]) -> "Kind":
        dtype, needs_gradient, dims, *strides = numbers
        return Kind(DTYPES[dtype], bool(needs_gradient), tuple(strides[:dims]))

    def to_send(self, x: Tensor) -> Tensor:
        """The numbers of a tensor as they are sent: flat, in the order in which they lie."""
        held = self._held(x.shape)
        if held is None:
            return x.to(self.dtype).contiguous().flatten()
        if x.stride() != self.strides or x.dtype != self.dtype:
            x = x.new_empty(held, dtype=self.dtype).as_strided(x.shape, self.strides).copy_(x)
        return x.as_strided((held,), (1,))

    def to_receive(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Memory to receive them in."""
        return torch.empty(self._held(shape) or math.prod(shape), dtype=self.dtype, device=device)

    def received(self, numbers: Tensor, shape: Sequence[int]) -> Tensor:
        """The tensor of a shape that these numbers are."""
        if self._held(shape) is not None:
            return numbers.as_strided(shape, self.strides)
        return torch.empty_strided(shape, self.strides, dtype=self.dtype, device=numbers.device).copy_(
            numbers.view(shape)
        )

    def _held(self, shape: Sequence[int]) -> int | None:
        """How many numbers a tensor of this shape has in memory, fewer than elements where it was expanded; None if
        numbers of other tensors lie between them."""
        dims = [(size, stride) for size, stride in zip(shape, self.strides, strict=True) if stride]
        extent = 1 + sum((size - 1) * stride for size, stride in dims)
        return extent if extent == math.prod(size for size, _ in dims) else None


@dataclass
class Arriving:
    """A value that may still be on its way to this rank."""

    kind: Kind
    shape: Sequence[int]  # of this rank's part
    numbers: Tensor  # the memory into which it is received
    pending: Pending | None  # None for a value without elements, which nobody sends
    layer: str  # that gives the value, or whose output a gradient belongs to

    def wait(self) -> Tensor:
        current.at(self.layer)
        with waiting("value of another stage"):
            if self.pending is not None:
                self.pending.wait()
        return self.kind.received(self.numbers, self.shape)


@dataclass(frozen=True)
class Sent:
    """A value that may still be on its way to another rank."""

    to: int  # the stage that receives it
    part: int  # as the sender counts the batch's parts
    back: bool  # whether it is a gradient
    pending: Pending


class StageLinks:
    """Sends and receives for this rank, to and from ranks of other stages at its place on the other axes.

    Both sides give values in the order of the graph's crossings, under the same key: whatever decides, beside the
    network, how values lie in memory. Which of them have a gradient the loss decides, anew in every update unless
    `finish` is told otherwise. Sends wait for nobody.

    Over gloo nothing is sent before the receiver has asked for it, so it had better ask early, in the order in which
    the values are sent.
    """

    def __init__(self, groups: Groups) -> None:
        axis = groups.mesh.stage_axis
        assert axis is not None
        self.stage, self._number = groups.coordinates[axis], groups.mesh.sizes[axis]
        self.group = groups.of((axis,))
        self._back = groups.back
        self._sent: dict[bool, dict[Any, dict[str, Kind | None]]] = {False: {}, True: {}}  # by `back` and key
        self._received: dict[bool, dict[Any, dict[str, Kind | None]]] = {False: {}, True: {}}
        self._sending: list[Sent] = []

    def send(self, key: Any, values: Sequence[tuple[Crossing, Tensor | None]], part: int, back: bool = False) -> None:
        """Send values of a part of the batch to later stages, or gradients back to earlier ones; None for a gradient
        that there is not, a ConvoyError where another part of the batch had it."""
        kinds = self._sent[back].get(key)
        if kinds is None:
            kinds = {crossing.value: None if x is None else Kind.of(x) for crossing, x in values}
            self._sent[back][key] = kinds
            for to in dict.fromkeys(_receiver(crossing, back) for crossing, _ in values):
                kinds_sent = (kinds[crossing.value] for crossing, _ in values if _receiver(crossing, back) == to)
                rows = torch.tensor([_NOTHING if kind is None else kind.numbers() for kind in kinds_sent])
                self._send(rows, to, part, back)
        for crossing, x in values:
            kind = kinds[crossing.value]
            if (x is None) is not (kind is None):
                where = f"layer {crossing.layer}" if crossing.layer else "the network itself"
                raise ConvoyError(
                    f"the loss depends on a value of {where} for one part of a batch and not for another: let it use "
                    "the same outputs for all samples, or pass microbatches=1 to convoy.parallelize"
                )
            if x is not None and kind is not None and x.numel():
                self._send(kind.to_send(x.detach()), _receiver(crossing, back), part, back)

    def release(self, is_received: Callable[[Sent], bool]) -> None:
        """Drop the tensors that other ranks have received, which gloo does not do of its own accord."""
        received = [sent for sent in self._sending if is_received(sent)]
        for sent in received:
            sent.pending.wait()
        self._sending = [sent for sent in self._sending if sent not in received]

    def knows(self, key: Any, back: bool = False) -> bool:
        """Whether the senders have said how their values lie in memory."""
        return key in self._received[back]

    def receive(
        self,
        key: Any,
        values: Sequence[tuple[Crossing, Sequence[int]]],
        device: torch.device,
        back: bool = False,
    ) -> list[Arriving | None]:
        """Begin to receive values of earlier stages, or gradients of later ones, on `device`; `values` come with the
        shapes of this rank's parts, and the result is None for a gradient that there is not."""
        kinds = self._received[back].get(key)
        if kinds is None:
            kinds = self._received[back][key] = {}
            for sender in dict.fromkeys(_sender(crossing, back) for crossing, _ in values):
                names = [crossing.value for crossing, _ in values if _sender(crossing, back) == sender]
                rows = torch.empty(len(names), MOST_DIMS + 3, dtype=torch.int64)
                start_receive(rows, sender, self._way(back), _TAG).wait()
                kinds |= zip(names, (None if row == _NOTHING else Kind.read(row) for row in rows.tolist()), strict=True)
        arriving: list[Arriving | None] = []
        for crossing, shape in values:
            kind = kinds[crossing.value]
            if kind is None:
                arriving.append(None)
                continue
            numbers = kind.to_receive(shape, device)
            sender, way = _sender(crossing, back), self._way(back)
            pending = start_receive(numbers, sender, way, _TAG) if math.prod(shape) else None
            arriving.append(Arriving(kind, shape, numbers, pending, crossing.layer))
        return arriving

    def from_last(self, x: Tensor | None, shape: Sequence[int], device: torch.device) -> tuple[Tensor, bool]:
        """The value of the last stage, on all ranks, and whether it has a gradient there; other stages pass None and
        its shape."""
        last = self._number - 1
        numbers = Kind.of(x).numbers() if x is not None else [0] * (MOST_DIMS + 3)
        kind = Kind.read(gather_ints(numbers, self.group)[last])
        if x is not None:
            broadcast(kind.to_send(x.detach()), self.group, last)
            return x.detach(), kind.needs_gradient
        return kind.received(broadcast(kind.to_receive(shape, device), self.group, last), shape), kind.needs_gradient

    def finish(self, same_loss: bool) -> None:
        """Wait until all is sent, at the end of a backward pass. With `same_loss` the next pass has gradients of the
        same values, on all ranks; otherwise that is exchanged anew."""
        self.release(lambda _: True)
        if not same_loss:
            self._sent[True].clear()
            self._received[True].clear()

    def _send(self, x: Tensor, to: int, part: int, back: bool) -> None:
        self._sending = [sent for sent in self._sending if not sent.pending.done]
        self._sending.append(Sent(to, part, back, start_send(x, to, self._way(back), _TAG)))

    def _way(self, back: bool) -> ProcessGroup:
        group = self._back if back else self.group
        assert group is not None
        return group


def _sender(crossing: Crossing, back: bool) -> int:
    return crossing.target if back else crossing.source


def _receiver(crossing: Crossing, back: bool) -> int:
    return crossing.source if back else crossing.target
