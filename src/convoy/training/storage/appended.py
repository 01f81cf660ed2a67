"""A file that grows: what a full disk refuses is kept, and written as soon as there is room."""

from pathlib import Path

from convoy.errors import ConvoyError


class AppendedFile:
    """Appends to a file, at once on the operating system's side of the process.

    Args:
        path: of the file; its folder is made.

    Raises:
        ConvoyError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept = b""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConvoyError(f"cannot write to {path} ({error.strerror}): free what is in its way") from error

    def write(self, content: bytes) -> None:
        """Append, after what is kept from before.

        Raises:
            OSError: not all of it could be written; the rest is kept.
        """
        self._kept += content
        while self._kept:
            self._kept = self._kept[self._file.write(self._kept) :]

    @property
    def kept(self) -> int:
        """Bytes that wait for room."""
        return len(self._kept)

    def close(self) -> None:
        """Write what is kept, if that is possible, and let go of the file.

        Raises:
            OSError: something could not be written, and is lost.
        """
        try:
            self.write(b"")
        finally:
            self._file.close()
