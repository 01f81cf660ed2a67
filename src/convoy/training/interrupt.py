"""Signals that ask a run to stop: all ranks finish the same update, save, and say so, without asking each time."""

import signal
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Self

import torch

from convoy.comm.ranks import Ranks
from convoy.launch.place import STOP

SIGNALS = {number: number.name for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)}
# To a rank that was started by another process: that one hands SIGTERM on as STOP, and means "end at once" by SIGTERM
# itself.
HANDED_ON = {STOP: "SIGTERM", signal.SIGINT: "SIGINT", signal.SIGUSR2: "SIGUSR2"}


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

    def __exit__(self, *reason: object) -> None:
        if self.signal is not None or not self.is_due:
            self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.names[signal.Signals(number)]
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


INTERVAL_S = 1.0
"""Seconds between two meetings of all ranks; in between, the stages of a network may be in different updates."""
_SIGNALS = ("", "SIGTERM", "SIGINT", "SIGUSR2")
_MAX_UPDATES = 1000


class Stop:
    """Whether the run is asked to stop. All ranks ask at the same time, and know the same.

    Attributes:
        signal: by which; stays when it has come.
        after_update: says whether to stop after this update. All ranks call it after every update.
    """

    def __init__(self, ranks: Ranks, interrupt: Interrupt) -> None:
        self.signal: str | None = None
        self._ranks, self._interrupt = ranks, interrupt
        self.after_update = self.asking()

    def asking(self) -> Callable[[], bool]:
        """What says after each update, or before each batch of one evaluation, whether to stop.

        The ranks agree about once a second: between two questions lie as many calls as took that long before, by
        the clock of rank 0. Batches do not last as long as updates, so that every evaluation has a count of its own.
        """
        wait = left = 1
        asked = time.perf_counter()

        def signal_of_any() -> str | None:
            nonlocal wait, left, asked
            own = self._interrupt.signal
            if self._ranks.num == 1:
                return own
            left -= 1
            if left > 0:
                return None
            now = time.perf_counter()
            took = max(now - asked, 1e-6)
            wait = max(1, min(_MAX_UPDATES, int(wait * INTERVAL_S / took), 2 * wait))
            wish = _SIGNALS.index(own or ""), wait if self._ranks.rank == 0 else 0
            with torch.inference_mode(False):  # what ranks exchange by must not become a part of an evaluation
                number, wait = self._ranks.largest(*wish)
            left, asked = wait, now
            return _SIGNALS[number] or None

        def is_asked() -> bool:
            self.signal = self.signal or signal_of_any()
            self._interrupt.is_due = self.signal is not None
            return self.signal is not None

        return is_asked
