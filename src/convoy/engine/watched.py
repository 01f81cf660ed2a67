"""How long work takes on a device, and on the host that issues it; and a weight update under a watch.

A CPU is its own host: one clock has both. A GPU works through a queue, so the host's clock sees how long it takes to
issue work, and events in the queue see when the GPU comes to it. Where the host is late the GPU waits for it, and the
time between two events is the host's. To know both, work is done twice: once from an empty queue, by the host's clock,
and once behind something long, by events, so that the GPU finds all of it waiting.

Watching an update says when every call of the network, every message and all else of it began. It changes no number:
marks are taken between the calls, and hooks on the backward pass only look at the clock.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import register_optimizer_step_post_hook

from convoy.engine.gradients.reducer import at_end_of_backward
from convoy.plans.place import Placement
from convoy.plans.timeline import Kind as TaskKind
from convoy.plans.timeline import Span, Stream, Task, Timeline

IN_A_ROW = 20  # how often something short is done between two events
# A GPU is kept busy for so many times as long as the host has taken, within these bounds: the first time, in which
# kernels are loaded and tried out, says nothing about the second.
_MARGIN, _LEAST_S, _MOST_S = 1.5, 1e-3, 0.5
_CYCLES_PER_S = 2e9  # of a GPU that does not say


@dataclass(frozen=True)
class Spent:
    """Seconds that the device works on something, and that the host takes to issue it (0 where that is the device)."""

    device: float
    host: float = 0.0


class DeviceClock:
    """The time on a device: of the host for a CPU, of the stream that computes for a GPU, which is not waited for.
    `host` gives the host's seconds; `is_queue` says that the device works through a queue which the host fills."""

    def __init__(self, device: torch.device, host: Callable[[], float] = time.perf_counter) -> None:
        self.is_queue = device.type == "cuda"
        self._device, self.host = device, host

    def of_host(self) -> "DeviceClock":
        return DeviceClock(torch.device("cpu"), self.host)

    def now(self) -> Any:
        if not self.is_queue:
            return self.host()
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one moment to another; a GPU must have come that far."""
        if not self.is_queue:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.is_queue:
            torch.cuda.synchronize(self._device)

    def delay(self, issuing_s: float) -> None:
        """Keep a GPU busy while the host issues what takes it so long, so that the GPU need not wait for it."""
        if self.is_queue:
            rate = 1e3 * getattr(torch.cuda.get_device_properties(self._device), "clock_rate", 0)
            torch.cuda._sleep(int(min(max(_LEAST_S, _MARGIN * issuing_s), _MOST_S) * (rate or _CYCLES_PER_S)))

    def spent(self, run: Callable[[], object], in_a_row: int = IN_A_ROW) -> Spent:
        """The mean time of something short: run once on a CPU, and on a GPU twice `in_a_row` times between events."""
        if not self.is_queue:
            start = self.now()
            run()
            return Spent(self.between(start, self.now()))
        self.wait()
        began = self.host()
        for _ in range(in_a_row):
            run()
        issuing = self.host() - began
        self.wait()
        self.delay(issuing)
        start = self.now()
        for _ in range(in_a_row):
            run()
        return Spent(self.between(start, self.now()) / in_a_row, issuing / in_a_row)


# What began: as in `convoy.plans.timeline`, with `input`, `stage` for what other stages are waited for, and `rest` for
# all that has no name of its own.
Kind = Literal["input", "forward", "backward", "copy", "transfer", "stage", "gradient", "update", "rest"]
_STREAMS: dict[Kind, Stream] = {"transfer": "transfers", "stage": "stages", "gradient": "gradients"}


@dataclass(frozen=True)
class Segment:
    """Time between two marks."""

    kind: Kind
    call: str  # whose it was; for a transfer, the one that asked for it; empty for none
    seconds: float
    run: int = -1  # the pass through the network, from 0; -1 outside of all
    host: float = 0.0  # seconds that the host took meanwhile; 0 where it is the device


class WatchedUpdate:
    """The marks of one update on this rank; `placements` are those of the passes through the network, in order."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._marks: list[tuple[Kind, str, int, Any]] = []
        self._issued: list[float] = []
        self._now: tuple[Kind, str, int] = ("rest", "", -1)
        self._before_adding: tuple[Kind, str, int] = self._now
        self.placements: list[Placement] = []

    def mark(self, kind: Kind, call: str = "", run: int = -1) -> None:
        self._now = (kind, call, run)
        self._marks.append((kind, call, run, self._clock.now()))
        if self._clock.is_queue:
            self._issued.append(self._clock.host())

    def of_pass(self, placement: Placement) -> "_WatchedPass":
        self.placements.append(placement)
        return _WatchedPass(self, len(self.placements) - 1)

    @contextmanager
    def wait(self, value: str) -> Iterator[None]:
        """While entered, this rank waits for a value, or its gradient, from another stage."""
        mark_before = self._now
        self.mark("stage", value)
        try:
            yield
        finally:
            self.mark(*mark_before)

    @contextmanager
    def parameters(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """While entered, what is done when a gradient is there counts as `copy`, and what an optimizer does after its
        own step as `gradient`: it gathers weights."""
        nodes = [get_gradient_edge(parameter).node for parameter in parameters if parameter.requires_grad]
        handles: list[Any] = [node.register_prehook(self._adding) for node in nodes]
        trained = [p for p in parameters if p.requires_grad]
        handles += [p.register_post_accumulate_grad_hook(lambda _: self.mark(*self._before_adding)) for p in trained]
        handles.append(register_optimizer_step_post_hook(lambda *_: self.mark("gradient")))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def segments(self) -> list[Segment]:
        """The update from its first mark to its last; transfers are those of the call that asked for them."""
        segments = []
        for number, (mark, next_mark) in enumerate(itertools.pairwise(self._marks)):
            kind, call, run, start = mark
            if kind == "transfer":
                call = self._asked(number, run, call == "backward")
            host = self._issued[number + 1] - self._issued[number] if self._issued else 0.0
            segments.append(Segment(kind, call, self._clock.between(start, next_mark[3]), run, host))
        return segments

    def timeline(self, rank: int, alone: bool = False) -> Timeline:
        """The update as a timeline, one thing after the other, in the words of a prediction. A message is the time for
        which the rank had nothing to do but to send it, or to wait for it; what is sent beside the computation has no
        marks. A device that is `alone` waits for nobody."""
        calls = [placed.call for member in self.placements for placed in member.calls]
        layers = {name: call.layer for call in calls for name in (*call.outputs, call.name)}

        def what(segment: Segment) -> tuple[Kind, str]:
            kind = segment.kind
            if alone and kind in _STREAMS:
                return "rest", ""
            if self.placements and kind in ("forward", "backward") and not segment.call:
                return "rest", ""  # around the calls of the network: its loss, and the beginnings of its passes
            return kind, segment.call

        spans: list[Span] = []
        start = 0.0
        for (kind, call), group in itertools.groupby(self.segments(), what):
            seconds = sum(member.seconds for member in group)
            layer = layers.get(call, "")
            name = (layer if kind == "transfer" else call) or ("optimizer" if kind == "update" else kind)
            task = cast(TaskKind, "around" if kind in ("input", "rest") else "transfer" if kind == "stage" else kind)
            stream = _STREAMS.get(kind, "compute")
            spans.append(Span(Task(rank, stream, task, layer, name, seconds), start, start, start + seconds))
            start += seconds
        return Timeline(tuple(spans))

    def _asked(self, number: int, run: int, backward: bool) -> str:
        """The call that a transfer is for: forward the one after it, backward the one before."""
        places = range(number, -1, -1) if backward else range(number, len(self._marks))
        direction = "backward" if backward else "forward"
        for place in places:
            kind, call, of_run, _ = self._marks[place]
            if of_run == run and kind == direction and call:
                return call
        return ""

    def _adding(self, gradients: Any) -> None:
        self._before_adding = self._now
        self.mark("copy", self._now[1] if self._now[0] == "backward" else "", self._now[2])


class _WatchedPass:
    """Sees the instructions of a program, and their backward passes."""

    def __init__(self, update: WatchedUpdate, run: int) -> None:
        self._update, self._run = update, run
        self._seen: set[Any] = set()
        self._ends = False

    def before(self, name: str) -> None:
        self._update.mark("forward" if name else "transfer", name, self._run)

    def after(self, name: str, results: Sequence[Any]) -> None:
        self._update.mark("rest", "", self._run)
        for result in results:
            node = result.grad_fn if isinstance(result, Tensor) else None
            if node is not None and node not in self._seen:
                self._seen.add(node)
                node.register_prehook(lambda _: self._backward(name))

    def _backward(self, name: str) -> None:
        if not self._ends:
            self._ends = True
            at_end_of_backward(self._end)
        if name:
            self._update.mark("backward", name, self._run)
        else:
            self._update.mark("transfer", "backward", self._run)

    def _end(self) -> None:
        self._update.mark("gradient")
        # a hook that refers to a node closes a circle through C++ that Python's collector does not see: all of the pass
        # would stay, 1.06 GB for VGG-11
        self._seen.clear()
