"""When a training has its pace: worker processes run and the batches that lay ready are used up, kernels are chosen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

_ENOUGH = 4  # windows whose two halves are to agree
_WITHIN = 0.05  # how near the halves have to be, as a part of the slower one
_NEAR = 0.1  # how near to the pace earlier windows have to be to count as well
_WAITING = 0.01  # part of a window from which on batches were waited for, so that none lay ready
# Batches, as a multiple of those that may lie ready, after which these hide no loader that is a tenth too slow.
_TIMES_READY = 10


@dataclass(frozen=True)
class Window:
    """Some updates in a row: how many, and the seconds that they took and waited for their batches, on any rank."""

    updates: int
    seconds: float
    waited: float

    @property
    def each(self) -> float:
        """Seconds of an update."""
        return self.seconds / self.updates


@dataclass
class Pace:
    """The updates of a training so far, in windows.

    The first window holds what happens once (kernels are tried out, memory grows), and the first batch, for which
    worker processes start. Others may start while batches are waited for, and take as long until they have made one.
    """

    ready: float  # batches that may lie ready before they are asked for
    windows: list[Window] = field(default_factory=list)  # all of them but the first
    _start_s: float | None = None
    _since: int = 0
    _starting_s: float = 0.0

    def add(self, window: Window, grew: bool = False) -> None:
        """A window has ended, in which other worker processes may have started."""
        if self._start_s is None:
            self._start_s = window.waited
            return
        self.windows.append(window)
        self._starting_s = self._start_s if grew else self._starting_s - window.seconds
        if grew or self._starting_s > 0:
            self._since = len(self.windows)

    def is_steady(self, late: bool = False) -> bool:
        """Whether the last windows have the pace that the training keeps. It is `late` where there is no time to see
        whether batches that lie ready hide a loader that is a little too slow.
        """
        alike = self.windows[self._since :]
        last = alike[-_ENOUGH:]
        if len(last) < _ENOUGH:
            return False
        halves = sorted(_mean(half) for half in (last[: _ENOUGH // 2], last[_ENOUGH // 2 :]))
        if halves[0] < (1 - _WITHIN) * halves[1]:
            return False
        waits = all(one.waited > _WAITING * one.seconds for one in last)
        return waits or late or sum(one.updates for one in alike) >= _TIMES_READY * self.ready

    def counted(self) -> Sequence[Window]:
        """The windows that tell the pace: the last ones and all before them that are as fast, or, as long as there is
        none, the later half of those since workers started."""
        alike = self.windows[self._since :] or self.windows[-1:]
        if not self.is_steady(late=True):
            return alike[len(alike) // 2 :]
        pace = _mean(alike[-_ENOUGH:])
        before = takewhile(lambda one: abs(one.each - pace) <= _NEAR * pace, reversed(alike[:-_ENOUGH]))
        return alike[-_ENOUGH - len(list(before)) :]


def updates_for(seconds: float, before: Window, left_s: float) -> int:
    """Updates of the next window, so that it takes some seconds, or as many as are left: no more than four times as
    many as in the one before, which may have been faster than usual."""
    number = math.ceil(min(seconds, left_s) / max(before.each, 1e-9))
    return max(1, min(number, 4 * before.updates))


def _mean(windows: Sequence[Window]) -> float:
    return sum(one.seconds for one in windows) / sum(one.updates for one in windows)
