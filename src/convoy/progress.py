"""How a run shows itself while it works: a live bar on a terminal, plain lines in a log file."""

import time
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from convoy.terminal import Console


class Reporter:
    """What the loop tells whoever watches. This one tells nobody: that of ranks other than 0."""

    def say(self, text: str) -> None:
        """One sentence or line that stays."""

    def prepare(self, what: str, done: int, total: int) -> None:
        """Long work before the training, such as decoding pictures into memory: `done` of `total` are done."""

    def begin(self, done: int, total: int) -> None:
        """Training begins after `done` of `total` updates."""

    def advance(self, done: int, text: str | None = None) -> None:
        """`done` updates are done; `text` has the newest figures."""

    def end(self) -> None:
        """Training has ended or stopped."""


LINE_EVERY_S = 5.0


class ConsoleReporter(Reporter):
    """Shows a run on a console: a bar where it is a terminal, a line now and then where it is not."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._bar: Progress | None = None
        self._line_at = time.monotonic()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def prepare(self, what: str, done: int, total: int) -> None:
        if not self.console.is_terminal:
            self.advance(done, f"{what} ({done} of {total})" if total > 1 else what)
        elif done >= total:
            self.end()
        elif self._bar is None:
            self._show(done, total, what)
        else:
            self._bar.update(self._task, description=what, completed=done, total=total)

    def begin(self, done: int, total: int) -> None:
        self.end()
        if self.console.is_terminal:
            self._show(done, total, "updates")
        else:
            self._line_at = -LINE_EVERY_S

    def _show(self, done: int, total: int, text: str) -> None:
        columns = BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}")
        times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
        self._bar = Progress(*columns, *times, console=self.console, transient=True)
        self._bar.start()
        self._task = self._bar.add_task(text, total=total, completed=done)

    def advance(self, done: int, text: str | None = None) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=text)
        elif text is not None and time.monotonic() - self._line_at >= LINE_EVERY_S:
            self._line_at = time.monotonic()
            self.say(text)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.end()
