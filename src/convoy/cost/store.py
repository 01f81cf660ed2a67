"""The profile store: what was measured on a device, kept for the next time.

A file of JSON lines for each device. Lines are only ever added, each in one write under a lock, so that several
processes may add at once. What runs have measured counts before what was rehearsed: of a piece, the median of its last
few runs, or its last rehearsal where no run had it. A damaged line, as a full disk or a killed process leaves it, is
skipped.
"""

import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from convoy.cost.device import Device
from convoy.cost.piece import Piece
from convoy.cost.times import Times

ENVIRONMENT = "CONVOY_CACHE"
_RUNS = 5
"""Runs that the time of a piece is the median of."""

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


class ProfileStore:
    """Times of pieces, and other things that are known of a device, by device.

    Args:
        path: folder; by default `$CONVOY_CACHE/profiles`, or `convoy/profiles` in the user's cache folder.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = default_folder() if path is None else Path(path)
        self._read: dict[str, tuple[tuple[int, int], list[dict[str, Any]]]] = {}

    def get(self, device: Device, piece: Piece) -> Times | None:
        """Times of one piece, None where it was never measured."""
        return self.times(device).get(piece)

    def times(self, device: Device) -> dict[Piece, Times]:
        """All pieces that were measured on a device."""
        return {row.piece: row.times for row in self.rows(device)}

    def rows(self, device: Device) -> list[Row]:
        """What is known of every piece, the one that was measured longest ago first."""
        found: dict[Piece, Row] = {}
        runs: dict[Piece, list[Times]] = {}
        for line in self._lines(device):
            row = _row(line)
            if row is None or (row.source == "rehearsal" and row.piece in runs):
                continue
            if row.source == "run":
                last = runs[row.piece] = [*runs.get(row.piece, ()), row.times][-_RUNS:]
                times = Times(median(one.forward for one in last), median(one.backward for one in last))
                row = replace(row, times=times)
            found.pop(row.piece, None)
            found[row.piece] = row
        return list(found.values())

    def put(self, device: Device, measured: Mapping[Piece, Times], source: Source = "rehearsal") -> None:
        """Add measurements of a rehearsal, or of a run.

        Raises:
            OSError: the folder cannot be written.
        """
        about = {"measured": time.time(), **({"source": source} if source != "rehearsal" else {})}
        self._append(
            device,
            [
                {"piece": piece.to_dict(), "forward": times.forward, "backward": times.backward, **about}
                for piece, times in measured.items()
            ],
        )

    def note(self, device: Device, name: str, value: Any) -> None:
        """Keep something else about a device that JSON can say, such as its links."""
        self._append(device, [{"note": name, "value": value, "measured": time.time()}])

    def noted(self, device: Device, name: str) -> Any:
        """What was noted last under a name, None where nothing was."""
        found = None
        for line in self._lines(device):
            if line.get("note") == name and "value" in line:
                found = line["value"]
        return found

    def devices(self) -> list[Device]:
        """Devices of which something is known."""
        found = (_device(first) for first in (self._first(file) for file in sorted(self.path.glob("*.jsonl"))))
        return [device for device in found if device is not None]

    def clear(self, device: Device | None = None) -> int:
        """Forget a device, or all of them; how many files that were."""
        files = [self._file(device)] if device is not None else sorted(self.path.glob("*.jsonl"))
        present = [file for file in files if file.exists()]
        for file in present:
            file.unlink(missing_ok=True)
        self._read.clear()
        return len(present)

    def _file(self, device: Device) -> Path:
        return self.path / f"{device.key}.jsonl"

    def _append(self, device: Device, lines: list[dict[str, Any]]) -> None:
        if not lines:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n" for line in lines)
        handle = os.open(self._file(device), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            size = os.fstat(handle).st_size
            if size == 0:
                text = json.dumps({"device": asdict(device)}, separators=(",", ":")) + "\n" + text
            elif os.pread(handle, 1, size - 1) != b"\n":  # somebody was killed in the middle of a line
                text = "\n" + text
            rest = memoryview(text.encode())
            while rest:
                rest = rest[os.write(handle, rest) :]
        finally:
            os.close(handle)

    def _lines(self, device: Device) -> list[dict[str, Any]]:
        """What the file says, read again only if it has changed."""
        file = self._file(device)
        try:
            status = file.stat()
            stamp = status.st_mtime_ns, status.st_size
            if self._read.get(file.name, (None,))[0] != stamp:
                self._read[file.name] = stamp, list(_parsed(file))
        except OSError:
            return []
        return self._read[file.name][1]

    def _first(self, file: Path) -> dict[str, Any]:
        try:
            return next((line for line in _parsed(file) if "device" in line), {})
        except OSError:
            return {}


def default_folder() -> Path:
    """`$CONVOY_CACHE/profiles`, else `convoy/profiles` under `$XDG_CACHE_HOME` or `~/.cache`."""
    own = os.environ.get(ENVIRONMENT)
    if own:
        return Path(own).expanduser() / "profiles"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "convoy" / "profiles"


def _parsed(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_bytes().split(b"\n"):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


def _row(line: dict[str, Any]) -> Row | None:
    try:
        piece = Piece.from_dict(line["piece"])
        times = Times(float(line["forward"]), float(line["backward"]))
        measured = float(line["measured"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    sound = all(math.isfinite(seconds) and seconds >= 0 for seconds in (times.forward, times.backward, measured))
    return Row(piece, times, measured, "run" if line.get("source") == "run" else "rehearsal") if sound else None


def _device(line: dict[str, Any]) -> Device | None:
    given = line.get("device")
    if not isinstance(given, dict) or set(given) != {field.name for field in fields(Device)}:
        return None
    return Device(**given)
