"""Signals that ask a run to stop: all ranks finish the same update, save, and say so, without asking each time."""

import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from convoy.comm.ranks import Ranks

SIGNALS = {number: number.name for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)}
# To a rank that was started by another process: that one hands SIGTERM on as SIGUSR1, and means "end at once" by
# SIGTERM itself.
HANDED_ON = {signal.SIGUSR1: "SIGTERM", signal.SIGINT: "SIGINT", signal.SIGUSR2: "SIGUSR2"}


class Interrupt:
    """While entered, the first signal is noted; a second one acts as it would without this.

    Args:
        names: signals to note, and what to call them.

    Attributes:
        signal: name of the signal that came, or None.
        is_due: other ranks were asked to stop, and this one's signal may still be on its way: it then is noted, once,
            also after the end of this.
    """

    def __init__(self, names: Mapping[signal.Signals, str] = SIGNALS) -> None:
        self.names = names
        self.signal: str | None = None
        self.is_due = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in self.names:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.signal is not None or not self.is_due:
            self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.names[signal.Signals(number)]
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


INTERVAL_S = 0.25
_SIGNALS = ("", "SIGTERM", "SIGINT", "SIGUSR2")
_MAX_UPDATES = 1000


class Stop:
    """Whether the run is asked to stop. All ranks ask at the same time, and know the same.

    Attributes:
        signal: by which; stays when it has come.
    """

    def __init__(self, ranks: Ranks, interrupt: Interrupt) -> None:
        self._ranks = ranks
        self._interrupt = interrupt
        self._updates = Agreement(ranks)
        self.signal: str | None = None

    def after_update(self) -> bool:
        """Whether to stop after this update. All ranks call it after every update."""
        return self._ask(self._updates)

    def in_evaluation(self) -> Callable[[], bool]:
        """What says before each batch of an evaluation whether to stop; batches do not last as long as updates."""
        return partial(self._ask, Agreement(self._ranks))

    def _ask(self, agreement: "Agreement") -> bool:
        self.signal = self.signal or agreement.signal(self._interrupt.signal)
        self._interrupt.is_due = self.signal is not None
        return self.signal is not None


class Agreement:
    """Lets the ranks agree on a signal about four times a second.

    Between two questions lie as many updates as took that long before; rank 0's clock decides.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._wait = 1
        self._left = 1
        self._asked = time.perf_counter()

    def signal(self, own: str | None) -> str | None:
        """Whether to stop after this update, and by which signal. All ranks call it after every update.

        Args:
            own: what this rank was asked.
        """
        if self._ranks.num == 1:
            return own
        self._left -= 1
        if self._left > 0:
            return None
        now = time.perf_counter()
        took = max(now - self._asked, 1e-6)
        wait = max(1, min(_MAX_UPDATES, int(self._wait * INTERVAL_S / took), 2 * self._wait))
        wish = _SIGNALS.index(own or ""), wait if self._ranks.rank == 0 else 0
        with torch.inference_mode(False):  # what ranks exchange by must not become a part of an evaluation
            number, self._wait = self._ranks.largest(*wish)
        self._left, self._asked = self._wait, now
        return _SIGNALS[number] or None
