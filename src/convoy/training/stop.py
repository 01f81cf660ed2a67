"""A clean end of a run whenever a signal asks for it: all ranks stop after the same update, mostly without asking."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Self

import torch

from convoy.comm.collectives import start_gather_ints
from convoy.comm.ranks import Ranks
from convoy.launch.rank import HANDED_ON, outlives

_SIGNALS = ("", *HANDED_ON.values())


class Interrupt:
    """While entered, the first of the signals is noted; a second one acts as it would without this. `handed_on`: they
    come from the process that started this one.

    `tell` takes the name of the first one at once, in another thread: the main thread may be in a long computation.
    """

    def __init__(self, handed_on: bool = False, tell: Callable[[str], None] = lambda name: None) -> None:
        names = {number if handed_on else signal.Signals[name]: name for number, name in HANDED_ON.items()}
        self.names = {number: name for number, name in names.items() if not outlives(number)}
        self.signal: str | None = None  # name of the signal that came
        # By which all ranks stop; where this one's is still on its way, it is noted, once, also after the end of this.
        self.agreed: str | None = None
        self._tell = tell
        self._as_before = ExitStack()

    def __enter__(self) -> Self:
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(read_end, before), daemon=True, name="convoy-signals").start()
        self._as_before.callback(os.close, write_end)
        self._as_before.callback(signal.set_wakeup_fd, before, warn_on_full_buffer=False)
        for number in self.names:
            self._as_before.callback(signal.signal, number, signal.signal(number, self._note))
        return self

    def __exit__(self, *reason: object) -> None:
        if self.signal is not None or self.agreed is None:
            self._as_before.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.names[number]
        self._as_before.close()

    def _listen(self, pipe: int, before: int) -> None:
        """Tell of the first signal; all others are for who listened before (`convoy.launch.rank`)."""
        told = False
        while number := os.read(pipe, 1):
            name = self.names.get(number[0])
            if name is not None and not told:
                told = True
                self._tell(name)
            elif before >= 0:
                os.write(before, number)
        os.close(pipe)


INTERVAL_S = 1.0  # between two meetings of all ranks; in between, the stages of a network may be in different updates
_MAX_UPDATES = 1000


class Asking:
    """The question after each update, or before each batch of one evaluation, whether to stop; all ranks ask at the
    same time, and know the same.

    They agree about once a second: between two meetings lie as many questions as took that long before, by the
    clock of rank 0. Batches do not last as long as updates, so that every evaluation has a count of its own. Where
    ranks go on while others are late, the answer is heard `lag` questions later.
    """

    lag = 0

    def __init__(self, ranks: Ranks, interrupt: Interrupt) -> None:
        self._ranks, self._interrupt = ranks, interrupt
        self._wait = self._left = 1
        self._asked = time.perf_counter()
        self._answer: Callable[[], list[list[int]]] | None = None

    def __call__(self) -> bool:
        self._left -= 1
        if self._interrupt.agreed is None and self._left <= 0:
            if self._answer is None:
                self._ask()
            if self._left <= -self.lag:
                self.hear()
        return self._interrupt.agreed is not None

    def _ask(self) -> None:
        now, ranks = time.perf_counter(), self._ranks
        took = max(now - self._asked, 1e-6)
        wait = max(1, min(_MAX_UPDATES, int(self._wait * INTERVAL_S / took), 2 * self._wait))
        wish = _SIGNALS.index(self._interrupt.signal or ""), wait if ranks.rank == 0 else 0
        with torch.inference_mode(False):  # what ranks exchange by must not become a part of an evaluation
            self._answer = start_gather_ints(wish, ranks.group, beside_work=self.lag > 0)
        self._asked = now

    def hear(self) -> None:
        """Wait for the answer to a question that was asked, if there is one."""
        if self._answer is not None:
            with torch.inference_mode(False):
                number, self._wait = map(max, zip(*self._answer(), strict=True))
            self._answer, self._left = None, self._wait if self._ranks.num > 1 else 1
            self._interrupt.agreed = _SIGNALS[number] or None
