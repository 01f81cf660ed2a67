"""The profile store: what was measured on a device, kept for the next time.

A file of JSON lines for each device. What runs have measured counts before what was rehearsed: of a piece, the median
of its last few runs, in which a newer one weighs more, or its last rehearsal where no run had it, or none for long.
Files are written anew when they hold much that no longer counts, the pieces that were measured longest ago go when
there are too many, and so do the files of devices that were not measured for long.

A file of JSON lines that several processes add to at once, and that is written anew when it holds too much.
"""

import contextlib
import fcntl
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from convoy.files import expanded
from convoy.planner.cost.device import Device
from convoy.planner.cost.local_op import Piece
from convoy.planner.cost.times import Times

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


ENVIRONMENT = "CONVOY_CACHE"
_RUNS = 5
"""Runs that the time of a piece is the median of."""
_LONG_S = 30 * 86_400.0
"""Seconds after which a run is old: later measurements count in its place."""
_PIECES, _DEVICES = 10_000, 64
"""Most that are kept of a device, and of devices."""
_WORTHLESS = 4
"""So many times as many lines as count, and a file is written anew."""

Source = Literal["rehearsal", "run"]
"""What measured a piece: the planner by itself, or a training that was watched."""


@dataclass(frozen=True)
class Row:
    """One measured piece.

    Attributes:
        measured: when, in seconds since 1970.
        source: by what.
    """

    piece: Piece
    times: Times
    measured: float
    source: Source = "rehearsal"


@dataclass
class _Known:
    """What the lines of a file say.

    Attributes:
        measurements: those that count, by piece, the one that was measured longest ago first: one rehearsal, or runs.
        notes: the last line of each name.
        lines: how many were read.
    """

    measurements: dict[Piece, list[Row]] = field(default_factory=dict)
    notes: dict[str, Line] = field(default_factory=dict)
    lines: int = 0

    def add(self, line: Line) -> None:
        self.lines += 1
        if isinstance(line.get("note"), str) and "value" in line:
            self.notes.pop(line["note"], None)
            self.notes[line["note"]] = line
            return
        row = _row(line)
        if row is None:
            return
        before = self.measurements.pop(row.piece, [])
        lately = [one for one in before if one.source == "run" and row.measured - one.measured <= _LONG_S]
        if row.source == "run":
            before = [*lately, row][-_RUNS:]
        elif not lately:
            before = [row]
        self.measurements[row.piece] = before

    def rows(self) -> list[Row]:
        return [_together(rows) for rows in self.measurements.values()]

    def shortened(self) -> "_Known":
        """What is kept of it: the newest pieces, and notes."""
        newest = list(self.measurements.items())[-_PIECES * 3 // 4 :] if self.is_full else self.measurements.items()
        return _Known(dict(newest), dict(list(self.notes.items())[-_PIECES:]))

    @property
    def is_full(self) -> bool:
        return len(self.measurements) > _PIECES

    @property
    def is_wasteful(self) -> bool:
        counts = sum(map(len, self.measurements.values())) + len(self.notes)
        return self.is_full or self.lines > max(1000, _WORTHLESS * counts)

    def to_lines(self) -> Iterator[Line]:
        yield from self.notes.values()
        for rows in self.measurements.values():
            yield from map(_line, rows)


class ProfileStore:
    """Times of pieces, and other things that are known of a device, by device.

    Args:
        path: folder; by default `$CONVOY_CACHE/profiles`, or `convoy/profiles` in the user's cache folder.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = default_folder() if path is None else Path(path)
        self._files: dict[str, tuple[StoreFile, _Known]] = {}

    def get(self, device: Device, piece: Piece) -> Times | None:
        """Times of one piece, None where it was never measured."""
        rows = self._known(device).measurements.get(piece)
        return _together(rows).times if rows else None

    def times(self, device: Device) -> dict[Piece, Times]:
        """All pieces that were measured on a device."""
        return {row.piece: row.times for row in self.rows(device)}

    def rows(self, device: Device) -> list[Row]:
        """What is known of every piece, the one that was measured longest ago first."""
        return self._known(device).rows()

    def put(self, device: Device, measured: Mapping[Piece, Times], source: Source = "rehearsal") -> None:
        """Add measurements of a rehearsal, or of a run.

        Raises:
            OSError: the folder cannot be written.
        """
        now = time.time()
        self._append(device, [_line(Row(piece, times, now, source)) for piece, times in measured.items()])

    def note(self, device: Device, name: str, value: Any) -> None:
        """Keep something else about a device that JSON can say, such as its links."""
        self._append(device, [{"note": name, "value": value, "measured": time.time()}])

    def noted(self, device: Device, name: str) -> Any:
        """What was noted last under a name, None where nothing was."""
        return self._known(device).notes.get(name, {}).get("value")

    def devices(self) -> list[Device]:
        """Devices of which something is known."""
        found = (_device(StoreFile(file).first()) for file in self._all())
        return [device for device in found if device is not None]

    def clear(self, device: Device | None = None) -> int:
        """Forget a device, or all of them; how many files that were."""
        files = [self._file(device)] if device is not None else self._all()
        self._files.clear()
        return sum(StoreFile(file).remove() for file in files)

    def _all(self) -> list[Path]:
        return sorted(self.path.glob("*.jsonl"))

    def _file(self, device: Device) -> Path:
        return self.path / f"{device.key}.jsonl"

    def _append(self, device: Device, lines: Sequence[Line]) -> None:
        if not lines:
            return
        first = {"device": asdict(device)}
        if StoreFile(self._file(device)).add(lines, first):
            self._forget_devices()
        if self._known(device).is_wasteful:
            file, known = self._files[device.key]

            def rest() -> Iterator[Line]:
                yield first
                yield from _read(file, known).shortened().to_lines()

            file.rewrite(rest)
            del self._files[device.key]

    def _forget_devices(self) -> None:
        """Delete the files to which nothing was added for longest, where there are too many."""
        with contextlib.suppress(OSError):  # somebody else does so too
            for file in sorted(self._all(), key=lambda file: file.stat().st_mtime)[:-_DEVICES]:
                StoreFile(file).remove()

    def _known(self, device: Device) -> _Known:
        """What the file says; only what was added since it was read before is read."""
        file, known = self._files.get(device.key) or (StoreFile(self._file(device)), _Known())
        known = _read(file, known)
        self._files[device.key] = file, known
        return known


def _read(file: StoreFile, known: _Known) -> _Known:
    anew, lines = file.news()
    known = _Known() if anew else known
    for line in lines:
        known.add(line)
    return known


def default_folder() -> Path:
    """`$CONVOY_CACHE/profiles`, else `convoy/profiles` under `$XDG_CACHE_HOME` or `~/.cache`."""
    own = os.environ.get(ENVIRONMENT)
    if own:
        return expanded(own) / "profiles"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else expanded("~") / ".cache") / "convoy" / "profiles"


def _together(rows: Sequence[Row]) -> Row:
    """Several measurements of a piece, the newest last, as one."""
    last = rows[-1]
    if len(rows) == 1:
        return last
    forward, backward = ([getattr(row.times, way) for row in rows] for way in ("forward", "backward"))
    return Row(last.piece, Times(_middle(forward), _middle(backward)), last.measured, last.source)


def _middle(values: Sequence[float]) -> float:
    """The median, where the second value counts twice, the third three times, and so on."""
    weighed = sorted((value, place) for place, value in enumerate(values, 1))
    half = sum(place for _, place in weighed) / 2
    for value, place in weighed:
        half -= place
        if half <= 0:
            return value
    raise AssertionError("half of the weights is less than all of them")


def _line(row: Row) -> Line:
    source = {"source": row.source} if row.source != "rehearsal" else {}
    times = {"forward": row.times.forward, "backward": row.times.backward}
    return {"piece": row.piece.to_dict(), **times, "measured": row.measured, **source}


def _row(line: Line) -> Row | None:
    try:
        piece = Piece.from_dict(line["piece"])
        times = Times(float(line["forward"]), float(line["backward"]))
        measured = float(line["measured"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    sound = all(math.isfinite(seconds) and seconds >= 0 for seconds in (times.forward, times.backward, measured))
    return Row(piece, times, measured, "run" if line.get("source") == "run" else "rehearsal") if sound else None


def _device(line: Line) -> Device | None:
    given = line.get("device")
    if not isinstance(given, dict) or set(given) != {each.name for each in fields(Device)}:
        return None
    sound = all(isinstance(given[each.name], type(getattr(_ANY, each.name))) for each in fields(Device))
    return Device(**given) if sound else None


_ANY = Device("", "", "", 0)
