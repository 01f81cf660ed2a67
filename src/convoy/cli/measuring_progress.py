"""How commands that measure show that they are at work."""

import time

from convoy.terminal import Console
from convoy.training.progress import ConsoleReporter

_LINE_EVERY_S = 5.0


class Progress:
    """Shows what is measured: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._reporter = ConsoleReporter(console)
        self._console = console
        self._line_at = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` are done."""
        self._reporter.prepare(what, done, total)
        if not self._console.is_terminal and time.monotonic() - self._line_at >= _LINE_EVERY_S:
            self._line_at = time.monotonic()
            self._reporter.say(f"{what} ({done} of {total})")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self._reporter.end()
