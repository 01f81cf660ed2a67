"""A file of JSON lines that several processes add to at once, and that is written anew when it holds too much."""

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Line = dict[str, Any]


@dataclass
class StoreFile:
    """One of them. A damaged line, as a full disk or a killed process leaves it, is skipped.

    Attributes:
        path: where; the file need not be there.
    """

    path: Path
    _inode: int = field(default=-1, repr=False)
    _offset: int = field(default=0, repr=False)

    def news(self) -> tuple[bool, list[Line]]:
        """What was added since this was asked before.

        Returns:
            Whether the file is another one than before, or none, so that what was read of it no longer holds; and the
            lines.
        """
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                anew = status.st_ino != self._inode or status.st_size < self._offset
                if anew:
                    self._inode, self._offset = status.st_ino, 0
                if status.st_size == self._offset:
                    return anew, []
                file.seek(self._offset)
                text = file.read()
        except OSError:
            gone = self._inode != -1
            self._inode, self._offset = -1, 0
            return gone, []
        whole = text[: text.rfind(b"\n") + 1]  # somebody may be in the middle of a line
        self._offset += len(whole)
        return anew, list(_parsed(whole))

    def first(self) -> Line:
        """The first line that is sound; empty where there is none."""
        try:
            with self.path.open("rb") as file:
                return next(_parsed(file), {})
        except OSError:
            return {}

    def add(self, lines: Iterable[Line], first: Line) -> bool:
        """Add lines in one write; `first` stands at the beginning of a new file. Whether it is new.

        Raises:
            OSError: it cannot be written.
            ValueError: a line is none that JSON can say.
        """
        text = _text(lines)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked() as handle:
            size = os.fstat(handle).st_size
            if size == 0:
                text = _text([first]) + text
            elif os.pread(handle, 1, size - 1) != b"\n":  # somebody was killed in the middle of a line
                text = b"\n" + text
            rest = memoryview(text)
            while rest:
                rest = rest[os.write(handle, rest) :]
        return size == 0

    def rewrite(self, lines: Callable[[], Iterable[Line]]) -> None:
        """Put other lines in the place of all; they are asked for while nobody can add any.

        Raises:
            OSError: it cannot be written; the file is as it was.
        """
        with self._locked() as before:
            handle, name = tempfile.mkstemp(prefix=self.path.name, suffix=".new", dir=self.path.parent)
            try:
                os.fchmod(handle, os.fstat(before).st_mode & 0o777)
                with os.fdopen(handle, "wb") as file:
                    file.write(_text(lines()))
                Path(name).replace(self.path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise

    def remove(self) -> bool:
        """Delete it; whether it was there.

        Raises:
            OSError: it cannot be deleted.
        """
        if not self.path.exists():
            return False
        with self._locked():
            self.path.unlink(missing_ok=True)
        return True

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, open for adding; others wait until it is left."""
        while True:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                if not self._is_there(handle):  # written anew, or deleted, while this process waited
                    continue
                yield handle
                return
            finally:
                os.close(handle)

    def _is_there(self, handle: int) -> bool:
        try:
            return os.fstat(handle).st_ino == self.path.stat().st_ino
        except OSError:
            return False


def _text(lines: Iterable[Line]) -> bytes:
    return "".join(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n" for line in lines).encode()


def _parsed(lines: bytes | Iterable[bytes]) -> Iterator[Line]:
    for line in lines.split(b"\n") if isinstance(lines, bytes) else lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found
