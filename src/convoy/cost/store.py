"""The profile store: what was measured on a device, kept for the next time.

A file of JSON lines for each device. What runs have measured counts before what was rehearsed: of a piece, the median
of its last few runs, in which a newer one weighs more, or its last rehearsal where no run had it, or none for long.
Files are written anew when they hold much that no longer counts, the pieces that were measured longest ago go when
there are too many, and so do the files of devices that were not measured for long.
"""

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from convoy.cost.device import Device
from convoy.cost.piece import Piece
from convoy.cost.store_file import Line, StoreFile
from convoy.cost.times import Times
from convoy.files import expanded

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
