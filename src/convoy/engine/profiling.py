"""One rank's part of a placed network: how long every call takes in its place, forward and backward.

Where the other ranks of the mesh are at hand all run together, and what redistributes activations is timed too. Where
they are not nothing is sent: what would come from others is made up, of the right shape. All else is what the engine
runs, in its order, so that a call finds in the caches what it will find there in training: a layer that is timed alone,
over and over, finds its data there.

Measurements are repeated until they are steady: code is loaded when it first runs, memory that the process has never
had comes from the kernel page by page, and the C library needs some rounds until its free blocks fit. A fixed number of
rounds to warm up is either too small or a waste.

Inputs are the network's own where they are at hand, and others like them where they are not. Their contents matter: a
maximum over noise mispredicts branches, and takes twice as long as one over equal numbers.
"""

import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean as mean
from statistics import median_low
from typing import Any, TypeVar

import torch
from torch import Tensor

from convoy.comm.groups import Groups
from convoy.comm.redistribution import Transfer, chained
from convoy.engine.allocation import get_ahead, page_faults
from convoy.engine.program import Program
from convoy.engine.shards import CHANNELS_LAST, cut
from convoy.engine.watched import DeviceClock, WatchedUpdate
from convoy.graph.graph import Value
from convoy.ops.context import StepContext
from convoy.ops.statistics import RunningStatistics
from convoy.plans.mesh import Coordinates
from convoy.plans.place import Placement
from convoy.plans.transfer import Step


def tiled(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What is in a tensor, repeated or cut off along every dimension to another shape of as many dimensions."""
    if not x.numel():
        return x.new_zeros(shape)
    for dim, length in enumerate(shape):
        if length != x.shape[dim]:
            x = x.index_select(dim, torch.arange(length, device=x.device) % x.shape[dim])
    return x


def source(
    value: Value,
    placement: Placement,
    place: Coordinates,
    device: torch.device,
    contents: Mapping[str, Tensor],
    channels_last: bool = False,
) -> Tensor:
    """A rank's part of an input, a parameter or a buffer; `place` is the rank's on the mesh. `contents` has whole
    parameters and buffers, and images of any number, as far as they are at hand. Images lie in memory as
    `channels_last` says; parameters that are at hand stay as they are."""
    layout = placement.layouts[value.name]
    shape = layout.local_shape(value.shape, placement.mesh, place)
    whole = contents.get(value.name)
    if whole is not None and value.origin == "input":
        return contiguous(tiled(whole, shape).to(device), channels_last)
    if whole is not None:
        part = cut(whole.detach(), layout, placement.mesh, place).to(device)
        part = part.clone() if part.data_ptr() == whole.data_ptr() else part
        return part.requires_grad_(value.origin == "parameter" and value.trains)
    if not value.dtype.is_floating_point:
        return torch.zeros(shape, dtype=value.dtype, device=device)
    if value.origin == "buffer":
        return torch.ones(shape, dtype=value.dtype, device=device)
    spread = 1.0 if value.origin == "input" or len(shape) < 2 else 1.0 / math.sqrt(max(1, math.prod(shape[1:])))
    tensor = contiguous(torch.randn(shape, dtype=value.dtype, device=device) * spread, channels_last)
    return tensor.requires_grad_(value.origin == "parameter" and value.trains)


def contiguous(tensor: Tensor, channels_last: bool) -> Tensor:
    """The tensor without gaps, images with the channels innermost in memory if that is how the network has them."""
    formats = CHANNELS_LAST if channels_last else {}
    return tensor.contiguous(memory_format=formats.get(tensor.dim(), torch.contiguous_format))


class StandIn(torch.autograd.Function):
    """What stands for the steps of a transfer: from the rank's part before it to one of the `shape` after it, as if the
    others had what this rank has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...], channels_last: bool) -> Tensor:
        ctx.before, ctx.channels_last = x.shape, channels_last
        return _made_up(x, shape, channels_last)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _made_up(gradient, ctx.before, ctx.channels_last), None, None


def _made_up(like: Tensor, shape: tuple[int, ...], channels_last: bool) -> Tensor:
    result = contiguous(tiled(like, shape), channels_last)
    return result.clone() if result.data_ptr() == like.data_ptr() else result


T = TypeVar("T")


def steady(
    measure: Callable[[], T],
    seconds: Callable[[T], float],
    agree: Callable[[bool], bool] = lambda done: done,
    *,
    enough: int = 3,
    within: float = 0.03,
    most: int = 10,
    patience_s: float = math.inf,
    settled: Callable[[], bool] = lambda: True,
) -> list[T]:
    """Measure until several measurements are near the fastest; gives those from the first of them on.

    Those before were to warm up; what comes later counts whether it is near or not, as training has slow updates, too.
    It ends with `enough` measurements that are `within` that part of the fastest, itself included, or with `most` in
    all. After `patience_s` seconds two are enough, if the process is `settled`: where each takes long, what disturbs
    one is small. `agree` is told whether this rank is done, and says whether all who measure together are.
    """
    measurements: list[T] = []
    near: list[int] = []
    began = time.perf_counter()
    for _ in range(most):
        measurements.append(measure())
        limit = (1 + within) * min(map(seconds, measurements))
        near = [number for number, measurement in enumerate(measurements) if seconds(measurement) <= limit]
        late = len(measurements) > 1 and settled() and time.perf_counter() - began > patience_s
        if agree(late or len(near) >= enough):
            break
    return measurements[near[0] :]


class TimedTransfer(Transfer):
    """A transfer with a record of its time; `args` are as for `Transfer`, `dtype` is that of what was sent last."""

    def __init__(self, clock: DeviceClock, *args: Any) -> None:
        super().__init__(*args)
        self.dtype = torch.float32
        self._clock = clock
        self._ways: list[tuple[Any, Any, float]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.dtype = x.dtype
        self._ways = []
        return self._timed(super().forward, x)

    def backward(self, gradient: Tensor) -> Tensor:
        return self._timed(super().backward, gradient)

    def _timed(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        start, began = self._clock.now(), self._clock.host()
        result = run(x)
        issuing = self._clock.host() - began
        self._ways.append((start, self._clock.now(), issuing))
        return result

    def seconds(self) -> tuple[float, float, float, float]:
        """Of the last time, forward and backward: all of them, and those of the host."""
        (forward, forward_host), (backward, backward_host), *_ = (
            *((self._clock.between(start, end), issuing) for start, end, issuing in self._ways),
            (0.0, 0.0),
            (0.0, 0.0),
        )
        return forward, backward, forward_host, backward_host


OUTSIDE = ""  # the name of the time that belongs to no call
_MADE_UP = "made up"  # the name of the time of transfers, of what stands in for them, and of their gradients
_GROWS = 1000  # more pages than this make a pass slower
_PATIENCE_S = 10.0

Ways = tuple[dict[str, float], dict[str, float]]  # seconds by the names of calls, forward and backward


@dataclass(frozen=True)
class Times:
    """Seconds of one forward and one backward pass."""

    forward: float = 0.0  # of the device; likewise `backward`
    backward: float = 0.0
    host_forward: float = 0.0  # of the host that issues them; 0 where the host is the device
    host_backward: float = 0.0

    def __add__(self, other: "Times") -> "Times":
        return Times(*map(operator.add, self.numbers, other.numbers))

    def __mul__(self, factor: float) -> "Times":
        """Scale the device's seconds; the host takes as long as before."""
        return replace(self, forward=self.forward * factor, backward=self.backward * factor)

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        return self.forward, self.backward, self.host_forward, self.host_backward

    @property
    def total(self) -> float:
        return self.forward + self.backward

    @property
    def host(self) -> float:
        return self.host_forward + self.host_backward


@dataclass(frozen=True)
class Profile:
    """What this rank takes for a pass: `seconds` in all, and by call; `OUTSIDE` has what no call takes.

    Times of the device are means over the passes that `middle_half` leaves, so that they add up to a pass. Those of the
    host are shares of a pass in which it reads no clock, and add up to the median of such passes: its first one may
    take seconds, in which kernels are loaded, and of what disturbs it now and then every call has its part.

    With other ranks, `transfers` has the steps, shapes of the whole tensors, types and times of redistributions. A rank
    that comes first to one waits for the others: that is part of the time. `slowest` is of the rank that took longest
    for the pass, in the mean over the passes. Where no two passes take equally long, now one rank is the slowest and
    now another, and all wait for it at their next exchange.
    """

    calls: dict[str, Times]
    transfers: list[tuple[Step, tuple[int, ...], torch.dtype, Times]]
    seconds: float
    slowest: float


class Profiler:
    """Runs a rank's part of a placement: the network, in training, at the batch of one pass. `microbatches` has the
    samples of each of its microbatches, by default one for all; `contents` whole parameters and buffers by name, and
    images, as far as they are at hand; `groups` the other ranks, which do the same at the same time, None if they are
    not there."""

    def __init__(
        self,
        placement: Placement,
        rank: int,
        device: torch.device,
        *,
        channels_last: bool = False,
        batch_norm: str = "sync",
        microbatches: Sequence[int] = (),
        contents: Mapping[str, Tensor] | None = None,
        groups: Groups | None = None,
    ) -> None:
        self._device = device
        self._clock = DeviceClock(device)
        self._context = StepContext(batch_norm=batch_norm)  # type: ignore[arg-type]
        self._sizes = tuple(microbatches) or (placement.batch.num_samples,)
        values = placement.graph.values
        ranks = groups or Groups(placement.mesh, rank)
        place = ranks.coordinates
        self._placement = placement
        self._timed: list[TimedTransfer] = []
        self._ahead = 4
        self._grew = False

        def stand_in(steps: tuple[Step, ...], shape: tuple[int, ...]) -> Callable[[Tensor], Any]:
            part = steps[-1].target.local_shape(shape, placement.mesh, place)
            return lambda x: StandIn.apply(x, part, channels_last)

        def timed(steps: tuple[Step, ...], shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
            transfers = [TimedTransfer(self._clock, step, ranks, shape, channels_last) for step in steps]
            self._timed += transfers
            return chained(transfers)

        transfer = timed if groups else stand_in
        self._program = Program(placement, ranks, self._context, channels_last, transfer=transfer)
        self._tensors = [
            source(values[name], placement, place, device, contents or {}, channels_last)
            for name in self._program.sources
        ]

    def try_out(self) -> None:
        """One pass, of which nothing is kept; torch.OutOfMemoryError where it does not fit."""
        self._pass(self._clock)

    def run(
        self,
        agree: Callable[[bool], bool] = lambda done: done,
        slowest: Callable[[float], float] = lambda seconds: seconds,
        enough: int = 3,
    ) -> Profile:
        """Time every call, in passes that are repeated until `enough` of them are near the fastest. After every pass,
        `agree` is told whether this rank is done and says whether all who measure at the same time are, and `slowest`
        takes this rank's seconds and gives those of the slowest of them."""
        passes = steady(
            partial(self._measured, slowest),  # no lambda: a traceback would keep it, and the groups
            lambda measured_pass: measured_pass.slowest,
            agree,
            enough=enough,
            patience_s=_PATIENCE_S,
            settled=lambda: not self._grew,
        )
        passes = middle_half(passes, lambda measured_pass: measured_pass.slowest)
        names = dict.fromkeys(name for member in passes for way in member.ways[:2] for name in way)
        times = {name: _middle([[way.get(name, 0.0) for way in member.ways] for member in passes]) for name in names}
        marked_s = [
            sum(getattr(seconds, way) for seconds in times.values()) or 1.0 for way in ("host_forward", "host_backward")
        ]
        part = [median_low(member.whole[way] for member in passes) / marked_s[way] for way in (0, 1)]
        calls = {
            name: replace(call, host_forward=part[0] * call.host_forward, host_backward=part[1] * call.host_backward)
            for name, call in times.items()
            if name != _MADE_UP
        }
        transfer_times = map(_middle, zip(*(member.transfers for member in passes), strict=True))
        transfers = [
            (move.step, move.shape, move.dtype, times) for move, times in zip(self._timed, transfer_times, strict=True)
        ]
        return Profile(
            calls, transfers, mean(member.seconds for member in passes), mean(member.slowest for member in passes)
        )

    def _measured(self, slowest: Callable[[float], float]) -> "_Pass":
        """A pass; where memory still grew in it, it need not grow in the next ones."""
        host: Ways = ({}, {})
        issuing = [(0.0, 0.0)] * len(self._timed)
        whole: tuple[float, ...] = 0.0, 0.0
        if self._clock.is_queue:  # first what the host takes, then what the device does where the host is ahead
            host_clock = self._clock.of_host()
            self._clock.wait()
            whole = tuple(sum(way.values()) for way in self._pass(host_clock, marks=False))
            self._clock.wait()
            host = self._pass(host_clock)
            issuing = [timed_transfer.seconds()[2:] for timed_transfer in self._timed]
            self._clock.wait()
            self._clock.delay(sum(sum(way.values()) for way in host))
        faults = page_faults()
        device = self._pass(self._clock)
        new_pages = page_faults() - faults
        self._grew = self._device.type == "cpu" and self._ahead > 0 and new_pages > _GROWS
        if self._grew:
            self._ahead -= 1
            get_ahead(4 * new_pages)
        transfer_s = [timed_transfer.seconds()[:2] for timed_transfer in self._timed]
        seconds = sum(sum(way.values()) - way.get(_MADE_UP, 0.0) for way in device) + sum(map(sum, transfer_s))
        transfers = [(*both, *issuing_s) for both, issuing_s in zip(transfer_s, issuing, strict=True)]
        return _Pass((*device, *host), whole, transfers, seconds, slowest(seconds))

    def _pass(self, clock: DeviceClock, marks: bool = True) -> Ways:
        """The seconds of one forward and one backward pass by a clock: of each call, or in all."""
        self._context.statistics = RunningStatistics()
        self._context.enter(0, 0, self._sizes, self._device)
        torch.clear_autocast_cache()  # an update in training begins without weights that are cast already
        for tensor in self._tensors:
            tensor.grad = None
        watched = WatchedUpdate(clock)
        watched.mark("rest")
        outputs = self._program(self._tensors, watched.of_pass(self._placement) if marks else None)
        watched.mark("input")  # what comes from the loss counts for neither way
        differentiable = [output for output in outputs if output.requires_grad]
        if differentiable:
            gradients = [torch.full_like(output, 1.0 / max(1, output.numel())) for output in differentiable]
            watched.mark("backward")
            torch.autograd.backward(differentiable, gradients)
            watched.mark("input")
        ways: Ways = ({}, {})
        is_back = False
        for segment in watched.segments():
            is_back |= segment.kind == "backward"
            name = _MADE_UP if segment.kind == "transfer" else segment.call
            if segment.kind != "input":
                ways[is_back][name] = ways[is_back].get(name, 0.0) + segment.seconds
        return ways


@dataclass(frozen=True)
class _Pass:
    """Seconds of a pass on this rank, by call and by transfer, and those of the rank that took longest for it; `whole`
    are the host's, forward and backward, while it reads no clock."""

    ways: tuple[Mapping[str, float], ...]  # forward and backward, on the device and of the host
    whole: tuple[float, ...]
    transfers: Sequence[tuple[float, float, float, float]]
    seconds: float
    slowest: float


def _middle(passes: Sequence[Sequence[float]]) -> Times:
    forward, backward, *host = zip(*passes, strict=True)
    return Times(mean(forward), mean(backward), *map(median_low, host))


def middle_half(measurements: Sequence[T], seconds: Callable[[T], float]) -> list[T]:
    """All but the fastest and the slowest quarter.

    The mean of these is about as robust as a median, and it adds up: the calls of a pass to the pass, where the sum of
    their medians leaves out whatever disturbs now one call and now another.

    >>> middle_half([9.0, 1.0, 3.0, 2.0], float)
    [2.0, 3.0]
    """
    quarter = len(measurements) // 4
    return sorted(measurements, key=seconds)[quarter : len(measurements) - quarter]
