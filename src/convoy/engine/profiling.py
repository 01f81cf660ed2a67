"""One rank's part of a placed network: how long every call takes in its place, forward and backward.

Where the other ranks of the mesh are at hand all run together, and what redistributes activations is timed too. Where
they are not nothing is sent: what would come from others is made up, of the right shape. All else is what the engine
runs, in its order, so that a call finds in the caches what it will find there in training.

Measurements are repeated until they are steady: code is loaded when it first runs, memory that the process has never
had comes from the kernel page by page, and the C library needs some rounds until its free blocks fit. A fixed number of
rounds to warm up is either too small or a waste.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from convoy.comm.groups import Groups
from convoy.comm.redistribution import Redistribution, Transfer
from convoy.engine.allocation import get_ahead, page_faults
from convoy.engine.fake_inputs import NoTransfer, source
from convoy.engine.program import Program
from convoy.ops.context import StepContext
from convoy.ops.statistics import RunningStatistics
from convoy.plans.mesh import Mesh
from convoy.plans.place import Placement
from convoy.plans.transfer import Step

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
    """Measure until several measurements are near the fastest.

    Args:
        measure: takes one measurement.
        seconds: of a measurement.
        agree: whether all who measure together are done, when told whether this one is.
        enough: measurements near the fastest, itself included, that make an end.
        within: how near, as a part of the fastest.
        most: measurements after which it ends in any case.
        patience_s: seconds after which two measurements are enough: where each takes long, what disturbs one is small.
        settled: whether the last measurement was of a process that has what it needs; without that, two are not enough.

    Returns:
        The measurements near the fastest.
    """
    found: list[T] = []
    near: list[T] = []
    began = time.monotonic()
    for _ in range(most):
        found.append(measure())
        limit = (1 + within) * min(map(seconds, found))
        near = [one for one in found if seconds(one) <= limit]
        late = len(found) > 1 and settled() and time.monotonic() - began > patience_s
        if agree(late or len(near) >= enough):
            break
    return near


class TimedTransfer(Transfer):
    """A transfer with a record of its seconds; arguments as for `Transfer`.

    Attributes:
        dtype: of what was sent last.
        seconds: of each time, forward and backward.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.dtype = torch.float32
        self.seconds: tuple[list[float], list[float]] = [], []

    def forward(self, x: Tensor) -> Tensor:
        """The step without autograd."""
        self.dtype = x.dtype
        return _timed(super().forward, x, self.seconds[0])

    def backward(self, gradient: Tensor) -> Tensor:
        """The conjugate of the step."""
        return _timed(super().backward, gradient, self.seconds[1])


def _timed(run: Callable[[Tensor], Tensor], x: Tensor, record: list[float]) -> Tensor:
    _wait(x)
    start = time.perf_counter()
    found = run(x)
    _wait(found)
    record.append(time.perf_counter() - start)
    return found


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


OUTSIDE = ""
"""The name of the time that belongs to no call."""
_MADE_UP = "made up"
"""That of transfers, of what stands in for them, and of their gradients."""
_GROWS = 1000
"""Pages, from which on a pass is slower for them."""
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class CallTimes:
    """Seconds of one call.

    Attributes:
        forward, backward: medians over the passes that were near the fastest, which add up to those of whole passes.
    """

    forward: float
    backward: float


class Alone(Groups):
    """A rank of a mesh whose other ranks are not there."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        super().__init__(mesh, rank)

    def of(self, axes: Iterable[int]) -> None:
        """Nobody."""


class Profiler:
    """Runs a rank's part of a placement.

    Args:
        placement: the network, in training, at the batch of one pass.
        rank: whose part.
        device: where.
        channels_last: whether images lie with the channels innermost in memory.
        batch_norm: over which samples its statistics are taken.
        microbatches: samples of each microbatch of the pass; by default all are one.
        contents: whole parameters and buffers by name, and images, as far as they are at hand.
        groups: the other ranks of the mesh, which do the same at the same time; None if they are not there.
    """

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
        self._context = StepContext(batch_norm=batch_norm)  # type: ignore[arg-type]
        self._sizes = tuple(microbatches) or (placement.batch.num_samples,)
        mesh, values = placement.mesh, placement.graph.values
        place = mesh.coordinates(rank)

        self._timed: list[TimedTransfer] = []
        self._ahead = 4
        self._grew = False

        def stand_in(steps: tuple[Step, ...], shape: tuple[int, ...]) -> NoTransfer:
            return NoTransfer(steps, shape, placement, place, channels_last)

        def timed(steps: tuple[Step, ...], shape: tuple[int, ...]) -> Redistribution:
            assert groups is not None
            found = [TimedTransfer(step, mesh, place, groups, shape, channels_last) for step in steps]
            self._timed += found
            return Redistribution(found)

        others = groups or Alone(mesh, rank)
        transfer = timed if groups else stand_in
        self._program = Program(placement, others, self._context, channels_last, transfer=transfer)
        self._tensors = [
            source(values[name], placement, place, device, contents or {}, channels_last)
            for name in self._program.sources
        ]

    def run(self, agree: Callable[[bool], bool] = lambda done: done, enough: int = 3) -> dict[str, CallTimes]:
        """Time every call, in passes that are repeated until they are steady.

        Args:
            agree: called after every pass with whether this rank is done; whether all who measure at the same time are.
            enough: passes that must be near the fastest.

        Returns:
            Times by the name of the call; `OUTSIDE` has what the pass took beside the calls.
        """
        found = steady(
            self._measured,
            _seconds,
            agree,
            enough=enough,
            patience_s=_PATIENCE_S,
            settled=lambda: not self._grew,
        )
        forward, backward = (_typical([both[way] for both in found]) for way in (0, 1))
        names = dict.fromkeys([*forward, *backward])
        return {name: CallTimes(forward.get(name, 0.0), backward.get(name, 0.0)) for name in names}

    @property
    def transfers(self) -> list[tuple[Step, tuple[int, ...], torch.dtype, CallTimes]]:
        """After a run with others: the steps, shapes of the whole tensors, types, and times of redistributions.

        A rank that comes first to one waits for the others: that is part of the time.
        """
        return [(each.step, each.shape, each.dtype, CallTimes(*map(_usual, each.seconds))) for each in self._timed]

    def _measured(self) -> tuple[dict[str, float], dict[str, float]]:
        """A pass; where memory still grew in it, it need not grow in the next ones."""
        before = page_faults()
        times = self._pass()
        grown = page_faults() - before
        self._grew = self._device.type == "cpu" and self._ahead > 0 and grown > _GROWS
        if self._grew:
            self._ahead -= 1
            get_ahead(4 * grown)
        return times

    def _pass(self) -> tuple[dict[str, float], dict[str, float]]:
        self._context.statistics = RunningStatistics()
        self._context.enter(0, 0, self._sizes, self._device)
        for tensor in self._tensors:
            tensor.grad = None
        forward, backward = _Stopwatch(self._device), _Stopwatch(self._device)
        outputs = self._program(self._tensors, _Marks(forward, backward))
        forward.mark(OUTSIDE)
        differentiable = [output for output in outputs if output.requires_grad]
        if differentiable:
            gradients = [torch.full_like(output, 1.0 / max(1, output.numel())) for output in differentiable]
            backward.mark(OUTSIDE)
            torch.autograd.backward(differentiable, gradients)
            backward.mark(OUTSIDE)
        return forward.spans(), backward.spans()


def _typical(passes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each call the median, in proportion to the median of whole passes.

    A device that is held up now and then (a share of a core is: it runs at full speed, and then waits) is so within one
    call or another: the medians alone would never see it.
    """
    names = dict.fromkeys(name for times in passes for name in times if name != _MADE_UP)
    medians = {name: statistics.median(times.get(name, 0.0) for times in passes) for name in names}
    whole = statistics.median(sum(seconds for name, seconds in times.items() if name != _MADE_UP) for times in passes)
    scale = whole / total if (total := sum(medians.values())) else 1.0
    return {name: scale * seconds for name, seconds in medians.items()}


def _usual(seconds: Sequence[float]) -> float:
    """The median, without the first: that one found cold memory."""
    return statistics.median(seconds[1:] or seconds) if seconds else 0.0


def _seconds(times: tuple[dict[str, float], dict[str, float]]) -> float:
    return sum(seconds for way in times for name, seconds in way.items() if name != _MADE_UP)


class _Stopwatch:
    """Marks on the device's time; each names what begins there."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def mark(self, name: str) -> None:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((name, event))
        else:
            self._marks.append((name, time.perf_counter()))

    def spans(self) -> dict[str, float]:
        """Seconds from each mark to the next, added up by name."""
        if self._is_cuda:
            torch.cuda.synchronize()
        found: dict[str, float] = {}
        for (name, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            seconds = start.elapsed_time(end) / 1e3 if self._is_cuda else end - start
            found[name] = found.get(name, 0.0) + seconds
        return found


class _Marks:
    """Sees every instruction of a program: marks where it begins, and where its backward pass will."""

    def __init__(self, forward: _Stopwatch, backward: _Stopwatch) -> None:
        self._forward, self._backward = forward, backward
        self._seen: set[Any] = set()

    def before(self, name: str) -> None:
        self._forward.mark(name or _MADE_UP)

    def after(self, name: str, results: Sequence[Any]) -> None:
        self._forward.mark(OUTSIDE)
        for tensor in results:
            node = tensor.grad_fn if isinstance(tensor, Tensor) else None
            if node is not None and node not in self._seen:
                self._seen.add(node)
                node.register_prehook(lambda _: self._backward.mark(name or _MADE_UP))
