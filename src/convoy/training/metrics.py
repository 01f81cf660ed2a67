"""Writes the course of a run: `metrics.jsonl` for programs, TensorBoard events for people.

What a full disk refuses is kept, and written as soon as there is room. tensorboardX's own writer is not used: its
thread and queue stop for good, and then block, when the disk is full.
"""

import math
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from convoy.errors import ConvoyError
from convoy.files import to_json

_VERSION = "brain.Event:2"


def beginning(first_step: int) -> bytes:
    """What a file begins with; it hides what earlier files have from `first_step` on."""
    session = SessionLog(status=SessionLog.START)
    return _record(Event(wall_time=time.time(), file_version=_VERSION)) + _record(
        Event(wall_time=time.time(), step=first_step, session_log=session)
    )


def scalars(step: int, values: Mapping[str, float]) -> bytes:
    """Finite numbers after so many updates, by name: one event for all of them, as the checksums of an event for each
    take 250 µs a line, a twentieth of an update of LeNet."""
    summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
    return _record(Event(wall_time=time.time(), step=step, summary=summary))


def _record(event: Event) -> bytes:
    """TFRecord: length, its checksum, content, its checksum."""
    content: bytes = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    return length + _checksum(length) + content + _checksum(content)


def _checksum(content: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(content))


class AppendedFile:
    """Appends to a file, at once on the operating system's side of the process; its folder is made, no other one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept = b""  # waits for room
        try:
            path.parent.mkdir(exist_ok=True)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConvoyError(f"cannot write to {path} ({error.strerror}): free what is in its way") from error

    def write(self, content: bytes) -> None:
        """Append, after what is kept from before; an OSError where not all of it could be written: the rest is kept."""
        self.kept += content
        while self.kept:
            self.kept = self.kept[self._file.write(self.kept) :]

    def close(self) -> None:
        """Write what is kept, if that is possible; an OSError where something is lost."""
        try:
            self.write(b"")
        finally:
            self._file.close()


class MetricsWriter:
    """Appends lines to the metrics of a run, each at once on disk's side of the process.

    A line that cannot be written, because the disk is full, does not end the run: it is kept, and written with a later
    one. That is said once, and again when all is written. `check` refuses a line after so many updates where the run
    directory has gone, which open files do not notice.
    """

    def __init__(
        self,
        metrics: Path,
        tensorboard: Path,
        first_step: int = 0,
        tell: Callable[[str], None] = lambda sentence: None,
        check: Callable[[int], None] = lambda done: None,
    ) -> None:
        self._lines = AppendedFile(metrics)
        try:
            # A name in the form that TensorBoard looks for, and in whose order it reads.
            name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
            self._events = AppendedFile(tensorboard / name)
        except BaseException:
            self._lines.close()
            raise
        self._tell, self._check = tell, check
        self._failed = False
        self._append(self._events, beginning(first_step + 1))

    def write(self, split: str, step: int, epoch: float, time_s: float, **values: float | int | None) -> None:
        self._check(step)
        line = {"split": split, "step": step, "epoch": round(epoch, 6), "time_s": round(time_s, 4), **values}
        self._append(self._lines, f"{to_json(line)}\n".encode())
        finite = {f"{split}/{k}": float(v) for k, v in values.items() if v is not None and math.isfinite(v)}
        self._append(self._events, scalars(step, finite))
        if self._failed and not self._lines.kept and not self._events.kept:
            self._failed = False
            self._tell("the metrics are written again, those that were kept too")

    def _append(self, file: AppendedFile, content: bytes) -> None:
        try:
            file.write(content)
        except OSError as error:
            if not self._failed:
                self._tell(f"{file.path} cannot be written ({error.strerror}): the metrics are kept until it can")
            self._failed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ending: object) -> None:
        lost: list[str] = []
        reason = None
        for file in (self._lines, self._events):
            try:
                file.close()
            except OSError as failure:
                lost.append(str(file.path))
                reason = failure.strerror
        if lost:
            self._tell(f"the last metrics could not be written to {' and '.join(lost)} ({reason})")
