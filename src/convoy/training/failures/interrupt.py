"""Signals that ask a run to stop: it finishes its step, saves, and says so."""

import signal
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any, Self

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
