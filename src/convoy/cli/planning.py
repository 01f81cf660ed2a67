"""What the verbs of the planner share: sizes, files, and how long work shows itself."""

import re
import time
from pathlib import Path

from convoy.errors import ConvoyError
from convoy.terminal import Console
from convoy.training.files import unwritable, write_text
from convoy.training.progress import ConsoleReporter

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(b|kb|mb|gb|tb|kib|mib|gib)?", re.IGNORECASE)
_UNITS = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
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


def bytes_of(text: str, option: str) -> float:
    """A size such as `8GB` or `512MiB` in bytes; a number alone is bytes.

    Raises:
        ConvoyError: it is none, or nothing.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise ConvoyError(f"{option} {text} is no size: write e.g. 8GB or 512MiB")
    return float(match[1]) * _UNITS[(match[2] or "b").lower()]


def check_writable(option: str, path: Path) -> None:
    """Refuse a file that could not be written, before the work for it is done.

    Raises:
        ConvoyError: it is a folder, or its folder is missing or closed.
    """
    folder = path.parent
    if path.is_dir():
        raise ConvoyError(f"{option} {path} is a folder: name a file in it")
    if not folder.is_dir():
        raise ConvoyError(f"{option} {path} cannot be written: there is no folder {folder}")
    reason = unwritable(folder)
    if reason is not None:
        raise ConvoyError(f"{option} {path} cannot be written ({reason}): choose a folder that is yours to write in")


def written(option: str, path: Path, text: str) -> None:
    """Write a file as a whole or not at all.

    Raises:
        ConvoyError: it cannot be written.
    """
    try:
        write_text(path, text)
    except OSError as error:
        raise ConvoyError(f"{option} {path} cannot be written ({error.strerror}): choose another place") from error
