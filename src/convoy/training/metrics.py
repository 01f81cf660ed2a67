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
from contextlib import ExitStack
from io import FileIO
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
        # A name in the form that TensorBoard looks for, and in whose order it reads.
        events = tensorboard / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._lines, self._events = metrics, events
        self._kept = {metrics: b"", events: b""}  # what waits for room
        with ExitStack() as stack:
            self._files = {path: stack.enter_context(_appended(path)) for path in self._kept}
            self._open = stack.pop_all()
        self._tell, self._check = tell, check
        self._failed = False
        self._append({events: beginning(first_step + 1)})

    def write(self, split: str, step: int, epoch: float, time_s: float, **values: float | int | None) -> None:
        self._check(step)
        line = {"split": split, "step": step, "epoch": round(epoch, 6), "time_s": round(time_s, 4), **values}
        finite = {f"{split}/{k}": float(v) for k, v in values.items() if v is not None and math.isfinite(v)}
        self._append({self._lines: f"{to_json(line)}\n".encode(), self._events: scalars(step, finite)})

    def _append(self, contents: Mapping[Path, bytes]) -> None:
        """Append, after what is kept from before."""
        for path, content in contents.items():
            self._kept[path] += content
            reason = self._write(path)
            if reason is not None and not self._failed:
                self._failed = True
                self._tell(f"{path} cannot be written ({reason}): the metrics are kept until it can")
        if self._failed and not any(self._kept.values()):
            self._failed = False
            self._tell("the metrics are written again, those that were kept too")

    def _write(self, path: Path) -> str | None:
        """Write what is kept for a file, or say why not."""
        try:
            while self._kept[path]:
                self._kept[path] = self._kept[path][self._files[path].write(self._kept[path]) :]
        except OSError as error:
            return str(error.strerror)
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ending: object) -> None:
        lost = {str(path): reason for path in self._kept if (reason := self._write(path)) is not None}
        self._open.close()
        if lost:
            reason = next(iter(lost.values()))
            self._tell(f"the last metrics could not be written to {' and '.join(lost)} ({reason})")


def _appended(path: Path) -> FileIO:
    """A file whose end is written to; its folder is made, no other one."""
    try:
        path.parent.mkdir(exist_ok=True)
        return path.open("ab", buffering=0)
    except OSError as error:
        raise ConvoyError(f"cannot write to {path} ({error.strerror}): free what is in its way") from error
