"""One clock for the updates of a run: a record of each, and of some when every call of the network began.

Updates are timed from when their data is asked for to their end. A few of the first ones are watched call by call, and
a few others are watched while their gradients wait until the backward pass is done, so that the time of each call is
its own: these teach the profile store. Nothing that is computed changes.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from convoy.comm.position import current
from convoy.data import Batch
from convoy.engine.stages import StagedNetwork
from convoy.engine.watched import DeviceClock, WatchedUpdate
from convoy.launch.host import HostWatch
from convoy.training.session import Session
from convoy.training.step import StepPart, TrainingStep, Update, wait_for

WARM_UP = 3  # updates that are slower than all that follow


class Numbers(NamedTuple):
    """Which updates are watched as they are, and which with gradients sent after the backward pass; after `last` none
    is compared with a prediction any more."""

    watched: tuple[int, ...]
    separate: tuple[int, ...]
    last: int = 64


EARLY = Numbers((12, 28, 44), (20, 36, 52))
RECORDED = Numbers((5, 7, 9), (6, 8, 10))  # where updates are recorded after that: nobody sees the parts of a replay
REMEMBERED = 100  # updates of a run; whoever looks at it does so after so many


class Subscriber(Protocol):
    """Whoever looks at a run, on all ranks at the same time."""

    def look(self) -> None:
        """So many updates are done, or the last one before the run ends or stops."""

    def end(self) -> None:
        """The run ends, and is saved."""


class Recorder:
    """Makes records of one process's updates of a run, by the clock of the session's device; all ranks make the same
    calls. The times of the last `remembered` updates are kept, or of all."""

    def __init__(
        self,
        session: Session,
        numbers: Numbers | None = None,
        remembered: int | None = REMEMBERED,
        clock: DeviceClock | None = None,
    ) -> None:
        self.session = session
        self.numbers = numbers or (RECORDED if session.is_recorded else EARLY)
        self.num = 0  # updates so far
        self.recent = deque[tuple[float, float, float]](maxlen=remembered)  # their waits, own work and seconds
        self.host = HostWatch() if session.profiles is not None else None  # what else the machine does meanwhile
        self.clock = clock or DeviceClock(session.device)
        # Of the first updates, beginning and end of those that were only timed, and those that were watched.
        self.timed: list[tuple[Any, Any]] = []
        self.watched: list[WatchedUpdate] = []
        self.separate: list[WatchedUpdate] = []
        self._count = 0
        self._asked = 0.0
        self._now: WatchedUpdate | None = None
        self._began: Any = None  # by the device's clock; None where the update is not among the first

    @property
    def done(self) -> bool:
        """Whether enough was watched."""
        return self._count > self.numbers.last

    @property
    def has_watched(self) -> bool:
        """Whether from this update on only times are taken."""
        return self._count > max(*self.numbers.watched, *self.numbers.separate)

    def ask(self, update: int, counts: bool = True) -> None:
        """The batch of an update is asked for. One that does not count is not among the first: it is neither watched
        nor compared with a prediction."""
        current.update = update
        current.to("data")
        self._asked = time.perf_counter()
        self._count += counts
        self._now = self._began = None
        if self.done or not counts:
            return
        if self._count in self.numbers.watched or self._count in self.numbers.separate:
            self._now = WatchedUpdate(self.clock)
            self._now.mark("input")
        elif self._count > WARM_UP:
            self._began = self.clock.now()

    def update(self, step: TrainingStep, batch: Batch, number: int, waits: bool = False) -> Update:
        """Do an update whose batch is there; one that `waits` ends when the device has done it."""
        wait_s = time.perf_counter() - self._asked
        began, waited_s = time.perf_counter(), current.waited_s
        with contextlib.nullcontext() if self._now is None else self._watching(step, self._now):
            update = step(batch, number)
        if self.session.device.type == "cpu":
            update.own_s = time.perf_counter() - began - (current.waited_s - waited_s)
        if self._began is not None:
            self.timed.append((self._began, self.clock.now()))
        if waits:
            wait_for(self.session.device)
        update.wait_s = wait_s
        update.unreadable = [(number, sample, reason) for sample, reason in batch.bad]
        update.seconds = time.perf_counter() - self._asked
        self.num += 1
        self.recent.append((update.wait_s, update.own_s, update.seconds))
        return update

    @contextlib.contextmanager
    def _watching(self, step: TrainingStep, watched: WatchedUpdate) -> Iterator[None]:
        engine = step.network.engine if self.session.why_unwatched is None else None
        parameters = list(step.network.model.parameters()) if engine is not None else []
        separate = self._count in self.numbers.separate

        def mark(part: StepPart) -> None:
            current.to(part)
            watched.mark(part)

        step.mark, step.timed = mark, separate and engine is not None
        if engine is not None:
            engine.watch = watched.of_pass
        if isinstance(engine, StagedNetwork):
            engine.watch_wait = watched.wait
        try:
            with watched.parameters(parameters):
                yield
            watched.mark("rest")
        finally:
            step.mark, step.timed = current.to, False
            if engine is not None:
                engine.watch = None
            if isinstance(engine, StagedNetwork):
                engine.watch_wait = contextlib.nullcontext
        (self.separate if separate else self.watched).append(watched)

    def forget(self) -> None:
        """What was seen of the first updates is not needed any more, and none is watched."""
        self.timed, self.watched, self.separate = [], [], []
        self._count = self.numbers.last + 1
