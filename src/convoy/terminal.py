"""Text from elsewhere on a terminal: names of files and classes must not steer it or turn a line around, and what was
typed is not repeated at length."""

import difflib
import io
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import rich.console
from rich.text import Text

# Control, surrogate, private and unassigned characters, ends of lines and paragraphs.
_UNSEEN = {"Cc", "Cs", "Co", "Cn", "Zl", "Zp"}
# Of the invisible marks ("Cf"), those that join letters belong to words of several scripts, and to emoji.
_JOINERS = "\u200c\u200d"
_LONGEST_WORD, _LONGEST_LINE = 240, 1_500


def printable(text: str, keep: str = "") -> str:
    r"""A text with what cannot be seen escaped, but for the characters of `keep`: ESC becomes `\x1b`."""
    if text.isprintable():
        return text
    return "".join(
        sign.encode("unicode_escape", "backslashreplace").decode() if sign not in keep and _unseen(sign) else sign
        for sign in text
    )


def brief(text: str, length: int = 80) -> str:
    """A text of at most so many characters, with an ellipsis for what lies in the middle of a longer one."""
    if len(text) <= length:
        return text
    end = length // 3
    return f"{text[: length - end - 1]}…{text[-end:]}"


def listed(names: Sequence[str], most: int) -> str:
    """The first names in a sentence, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def did_you_mean(name: str, names: Iterable[str], *, otherwise: str = "check its spelling") -> str:
    """The end of a sentence about an unknown `name`: ": did you mean a, b or c?", or `otherwise` if none is close."""
    by_lower = {candidate.lower(): candidate for candidate in names}
    close = [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=3)]
    if not close:
        return f": {otherwise}"
    return f": did you mean {' or '.join(filter(None, [', '.join(close[:-1]), close[-1]]))}?"


def pip_install(extra: str) -> str:
    """How to install an extra of Convoy's, which is on no package index."""
    return f"pip install -e '.[{extra}]' where Convoy's pyproject.toml lies"


def shortened(message: str) -> str:
    """A message to a person, in which nobody need scroll past what was typed: neither words nor lines without end.

    Names and paths of usual lengths stay whole. Use `brief` for what was mistyped.
    """
    if len(message) <= _LONGEST_WORD:
        return message
    words = re.compile(rf"\S{{{_LONGEST_WORD + 1},}}")
    lines = (words.sub(lambda word: brief(word[0], _LONGEST_WORD), line) for line in message.split("\n"))
    return "\n".join(brief(line, _LONGEST_LINE) for line in lines)


def _unseen(sign: str) -> bool:
    category = unicodedata.category(sign)
    return category in _UNSEEN or (category == "Cf" and sign not in _JOINERS)


LOST: dict[str, OSError] = {}  # why `stdout` or `stderr` could not be written to, the last time


class _Standard(io.FileIO):
    """Standard output or error: what it cannot take any more is dropped, as no work is to end with its log.

    A full disk may have room again, so that every write is tried anew.
    """

    def __init__(self, fd: int, stream: str) -> None:
        super().__init__(fd, "w", closefd=False)
        self._stream = stream

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            LOST[self._stream] = error
            return memoryview(content).nbytes


def losses() -> list[str]:
    """A sentence on each standard stream that could not be written to."""
    names = {"stdout": "standard output", "stderr": "standard error"}
    return [f"{names[name]} could not be written ({error.strerror})" for name, error in LOST.items()]


def write_to_any() -> None:
    """From now on, what the encoding of standard output or error lacks is written by its number, and a stream that its
    starter has closed, whose reader has gone or whose disk is full takes what it is given."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper and type(getattr(stream.buffer, "raw", stream.buffer)) is io.FileIO:
            stream.flush()
            lines = stream.line_buffering or stream.write_through
            buffer = io.BufferedWriter(_Standard(stream.fileno(), name))
            stream = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=lines)
            setattr(sys, name, stream)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class Console(rich.console.Console):
    """rich's console, which lets through no control characters but its own, and does not end what nobody watches."""

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(printable(text, keep="\n\t"), **settings)


def waiting_for(what: str) -> AbstractContextManager[object]:
    """Show a terminal what takes long ("loading PyTorch") until it is over. Ranks leave it to their starter."""
    return nullcontext() if "RANK" in os.environ else Console(stderr=True).status(f"{what} …")
