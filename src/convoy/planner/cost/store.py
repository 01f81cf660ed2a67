"""The profile store: what was measured on a device, kept for the next time, in a database of SQLite.

Of each operation it has the last runs (trainings that were watched), or the last profiling where no run had it, or none
for long. Its time is the median of those runs, in which a newer one weighs more. Too many operations or devices: those
that were measured longest ago go. A file that is no such database is put in its place anew.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from convoy import resources
from convoy.files import expanded
from convoy.planner.cost.costs import Times
from convoy.planner.cost.local_op import LocalOp
from convoy.resources import cores_allowed, free_memory
from convoy.units import size
from convoy.version import __version__

# Of what is free, for the tensors that are counted. Kernels and the framework take the rest of a GPU. On a host, four
# ranks of ResNet-50 with a predicted 1.05 GB each came to 1.47 GB, and with the processes that load pictures to all of
# 8.6 GB: gradients of activations, kernels and messages between processes take 0.4 of what is free.
GPU_SHARE, HOST_SHARE = 0.9, 0.6


def device_memory(device: torch.device, on_host: int) -> tuple[float, str]:
    """Bytes for parameters, gradients, optimizer and activations on a device, and a word on where they come from. A GPU
    has what is free and what this process holds of it. What is free of a host's memory, or of what control groups leave
    of it, its `on_host` ranks share."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        there = float(free + torch.cuda.memory_reserved(device))
        return GPU_SHARE * there, f"nine tenths of the {size(int(there))} that are free on the GPU"
    there = free_memory()
    shared = f" over {on_host} devices" if on_host > 1 else ""
    return HOST_SHARE * there / on_host, f"{HOST_SHARE} of the {size(int(there))} that are free here{shared}"


_LOWER = ("tf32", "bf16")  # precisions in which float32 may be multiplied


@dataclass(frozen=True)
class Device:
    """Everything that would make the same piece take another time."""

    name: str  # the processor's or GPU's name
    torch: str  # version
    convoy: str
    threads: int  # that compute on it; 0 where that says nothing, as on a GPU
    precision: str = "float32"  # in which convolutions and matrix products compute
    channels_last: bool = False
    compiled: bool = False
    neighbours: int = 1  # ranks that compute on the same host at once and share its memory, itself counted
    numerics: str = ""  # torch's switches that change kernels, as `benchmark, tf32 products`
    share: float = 1.0  # of the time of its threads' cores, what control groups leave it

    @property
    def key(self) -> str:
        """A name that equal devices share, fit for a file."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40]
        digest = hashlib.blake2b(repr(sorted(asdict(self).items())).encode(), digest_size=6).hexdigest()
        return f"{plain or 'device'}-{self.threads}t-{self.precision}-{digest}"

    def describe(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads != 1 else ''}, " if self.threads else ""
        order = ", channels last" if self.channels_last else ""
        with_others = f", {self.neighbours} ranks on the host" if self.neighbours > 1 else ""
        compiled = ", compiled" if self.compiled else ""
        share = f"{self.share:.0%} of the time, " if self.share < 1 else ""
        numerics = f", {self.numerics}" if self.numerics else ""
        return (
            f"{self.name}, {threads}{share}{self.precision}{numerics}{order}{compiled}{with_others}, torch {self.torch}"
        )


def this_device(
    device: torch.device,
    *,
    precision: str = "float32",
    channels_last: bool = False,
    compiled: bool = False,
    neighbours: int = 1,
) -> Device:
    """The device that this process computes on, with the threads that torch uses now."""
    is_cpu = device.type == "cpu"
    name = resources.processor_name() if is_cpu else torch.cuda.get_device_name(device)
    threads = torch.get_num_threads() if is_cpu else 0
    return Device(
        name,
        torch.__version__,
        __version__,
        threads,
        precision,
        channels_last,
        compiled,
        neighbours,
        ", ".join(_numerics(is_cpu)),
        round(min(1.0, cores_allowed() / threads), 3) if is_cpu else 1.0,
    )


def _numerics(is_cpu: bool) -> Iterator[str]:
    if torch.are_deterministic_algorithms_enabled():
        yield "deterministic"
    if not is_cpu and torch.backends.cudnn.benchmark:
        yield "benchmark"
    convolutions: Any = torch.backends.mkldnn if is_cpu else torch.backends.cudnn
    products: Any = torch.backends.mkldnn if is_cpu else torch.backends.cuda
    for what, setting in (("convolutions", convolutions.conv), ("products", products.matmul)):
        if setting.fp32_precision in _LOWER:
            yield f"{setting.fp32_precision} {what}"


ENVIRONMENT = "CONVOY_CACHE"
FILE = "profiles.sqlite"
_RUNS = 5  # runs that the time of an operation is the median of
_LONG_S = 30 * 86_400.0  # seconds after which a run is old: later measurements count in its place
_OPERATIONS, _DEVICES = 10_000, 64  # most that are kept of a device, and of devices
_PATIENCE_S = 60.0  # for other processes that write
_TABLES = """
CREATE TABLE IF NOT EXISTS devices (key TEXT PRIMARY KEY, device TEXT, changed REAL);
CREATE TABLE IF NOT EXISTS notes (device TEXT, name TEXT, value TEXT, PRIMARY KEY (device, name));
CREATE TABLE IF NOT EXISTS times (number INTEGER PRIMARY KEY AUTOINCREMENT, device TEXT, op TEXT, local_op TEXT,
    forward REAL, backward REAL, measured REAL, source TEXT, host_forward REAL, host_backward REAL);
CREATE INDEX IF NOT EXISTS of_op ON times (device, op);
"""

# Columns of `times` that stores of earlier versions lack; without a value they are 0
_LATER = ("host_forward", "host_backward")

# What measured an operation: the planner by itself, or a training that was watched
Source = Literal["profiling", "run"]


@dataclass(frozen=True)
class Measurement:
    """One measured operation."""

    local_op: LocalOp
    times: Times
    measured: float  # seconds since 1970
    source: Source = "profiling"


class ProfileStore:
    """Times of operations, and other facts about a device, by device. Several processes may share it; writing raises
    OSError where it cannot be. The folder is by default `$CONVOY_CACHE/profiles`, or `convoy/profiles` in the user's
    cache folder."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = default_folder() if path is None else Path(path)
        self._file = self.path / FILE

    def times(self, device: Device) -> dict[LocalOp, Times]:
        return {row.local_op: row.times for row in self.rows(device)}

    def rows(self, device: Device) -> list[Measurement]:
        """What is known of every operation, those measured longest ago first."""
        by_op: dict[str, list[Measurement]] = {}
        for op, *columns in self._read(
            "SELECT op, local_op, measured, source, forward, backward, host_forward, host_backward FROM times "
            "WHERE device = ? ORDER BY number",
            device.key,
        ):
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):  # somebody else's rows
                by_op[op] = [*by_op.pop(op, []), _row(*columns)]
        return [_together(rows) for rows in by_op.values()]

    def put(self, device: Device, measured: Mapping[LocalOp, Times], source: Source = "profiling") -> None:
        """Add measurements of the planner, or of a run; a ValueError for a time that is none. A run knows nothing of
        the host: what was known of it stays."""
        now = time.time()
        for times in measured.values():
            if not all(math.isfinite(seconds) and seconds >= 0 for seconds in times.numbers):
                raise ValueError(f"{times} are no times")
        if not measured:
            return
        with self._writing(device, now) as database:
            for local_op, times in measured.items():
                where = device.key, local_op.key
                host = times.host_forward, times.host_backward
                if source == "run":
                    query = (
                        "SELECT host_forward, host_backward FROM times WHERE device = ? AND op = ? ORDER BY number DESC"
                    )
                    host = database.execute(query, where).fetchone() or host
                old = "DELETE FROM times WHERE device = ? AND op = ? AND"
                database.execute(f"{old} (source != 'run' OR measured < ?)", (*where, now - _LONG_S))
                cursor = database.execute("SELECT number FROM times WHERE device = ? AND op = ? ORDER BY number", where)
                runs = cursor.fetchall()
                if source != "run" and runs:
                    continue
                if len(runs) >= _RUNS:
                    database.execute(f"{old} number <= ?", (*where, runs[-_RUNS][0]))
                columns = "device, op, local_op, forward, backward, measured, source, host_forward, host_backward"
                values = json.dumps(local_op.to_dict()), times.forward, times.backward, now, source, *host
                database.execute(f"INSERT INTO times ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*where, *values))
            newest = database.execute(
                "SELECT max(number) FROM times WHERE device = ? GROUP BY op ORDER BY 1 DESC", (device.key,)
            ).fetchall()
            if len(newest) > _OPERATIONS:
                last = newest[_OPERATIONS * 3 // 4][0]
                database.execute("DELETE FROM times WHERE device = ? AND number <= ?", (device.key, last))

    def note(self, device: Device, name: str, value: Any) -> None:
        """Keep a fact about a device that JSON can say, such as its links."""
        text = json.dumps(value, allow_nan=False)
        with self._writing(device, time.time()) as database:
            database.execute("INSERT OR REPLACE INTO notes VALUES (?, ?, ?)", (device.key, name, text))

    def noted(self, device: Device, name: str) -> Any:
        """What was noted last under a name, None where nothing was."""
        rows = self._read("SELECT value FROM notes WHERE device = ? AND name = ?", device.key, name)
        return json.loads(rows[0][0]) if rows else None

    def devices(self) -> list[Device]:
        devices = []
        for (text,) in self._read("SELECT device FROM devices ORDER BY key"):
            with contextlib.suppress(TypeError, ValueError):  # of another version of this program
                devices.append(Device(**json.loads(text)))
        return devices

    def clear(self, device: Device | None = None) -> int:
        """Forget a device, or all of them; how many those were."""
        keys = [key for (key,) in self._read("SELECT key FROM devices") if device is None or key == device.key]
        if keys:
            with self._writing() as database:
                _forget(database, keys)
        return len(keys)

    def _read(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        """The rows of a query; none where there is no store, or a damaged one."""
        try:
            address = f"{self._file.absolute().as_uri()}?mode=ro"
            with closing(sqlite3.connect(address, _PATIENCE_S, uri=True)) as database:
                return database.execute(query, values).fetchall()
        except sqlite3.Error:
            return []

    @contextmanager
    def _writing(self, device: Device | None = None, now: float = 0.0) -> Iterator[sqlite3.Connection]:
        """While entered, nobody else writes; all of it is kept, or nothing."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with closing(self._open()) as database:
                database.execute("BEGIN IMMEDIATE")
                if device is not None:
                    values = device.key, json.dumps(asdict(device)), now
                    database.execute("INSERT OR REPLACE INTO devices VALUES (?, ?, ?)", values)
                    keys = database.execute("SELECT key FROM devices ORDER BY changed DESC").fetchall()
                    _forget(database, [key for (key,) in keys[_DEVICES:]])
                yield database
                database.execute("COMMIT")
        except sqlite3.Error as error:
            raise OSError(errno.EIO, str(error)) from error

    def _open(self) -> sqlite3.Connection:
        for attempt in (1, 2):
            database = sqlite3.connect(self._file, _PATIENCE_S, isolation_level=None)
            try:
                database.executescript(_TABLES)
                columns = {name for _, name, *_ in database.execute("PRAGMA table_info(times)")}
                for column in _LATER:
                    if column not in columns:
                        with contextlib.suppress(sqlite3.OperationalError):  # another process has just done it
                            database.execute(f"ALTER TABLE times ADD COLUMN {column} REAL")
            except sqlite3.DatabaseError as error:
                database.close()
                if isinstance(error, sqlite3.OperationalError) or attempt == 2:  # locked, read-only, a full disk
                    raise
                self._file.unlink(missing_ok=True)
            else:
                return database
        raise AssertionError("two attempts")


def default_folder() -> Path:
    """`$CONVOY_CACHE/profiles`, else `convoy/profiles` under `$XDG_CACHE_HOME` or `~/.cache`."""
    folder = os.environ.get(ENVIRONMENT)
    if folder:
        return expanded(folder) / "profiles"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else expanded("~") / ".cache") / "convoy" / "profiles"


def _forget(database: sqlite3.Connection, keys: list[str]) -> None:
    for key in keys:
        for table, column in (("devices", "key"), ("notes", "device"), ("times", "device")):
            database.execute(f"DELETE FROM {table} WHERE {column} = ?", (key,))


def _row(local_op: str, measured: float, source: str, *seconds: float | None) -> Measurement:
    """A row of the table `times`; a KeyError, TypeError, ValueError or AttributeError where it is none."""
    forward, backward, *host = seconds
    if forward is None or backward is None:
        raise ValueError("an operation without its times")
    times = Times(float(forward), float(backward), *(float(number or 0.0) for number in host))
    return Measurement(
        LocalOp.from_dict(json.loads(local_op)), times, measured, "run" if source == "run" else "profiling"
    )


def _together(rows: list[Measurement]) -> Measurement:
    last = rows[-1]
    times = Times(*(_middle(list(ways)) for ways in zip(*(row.times.numbers for row in rows), strict=True)))
    return Measurement(last.local_op, times, last.measured, last.source)


def _middle(values: list[float]) -> float:
    """The median, where the second value counts twice, the third three times, and so on."""
    weighed = sorted((value, place) for place, value in enumerate(values, 1))
    half = sum(place for _, place in weighed) / 2
    for value, place in weighed:
        half -= place
        if half <= 0:
            return value
    raise AssertionError("half of the weights is less than all of them")
