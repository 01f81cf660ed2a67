"""TensorBoard's files of events, written line by line as the metrics are.

tensorboardX's own writer has a thread and a queue, which stop for good, and then block, when the disk is full.
"""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import scalar

_VERSION = "brain.Event:2"


def new_file(folder: Path) -> Path:
    """A name in the form that TensorBoard looks for, and in whose order it reads."""
    return folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"


def beginning(first_step: int) -> bytes:
    """What a file begins with; it hides what earlier files have from `first_step` on."""
    session = SessionLog(status=SessionLog.START)
    return _record(Event(wall_time=time.time(), file_version=_VERSION)) + _record(
        Event(wall_time=time.time(), step=first_step, session_log=session)
    )


def scalars(step: int, values: Mapping[str, float]) -> bytes:
    """Finite numbers after so many updates, by name."""
    now = time.time()
    return b"".join(
        _record(Event(wall_time=now, step=step, summary=scalar(name, value))) for name, value in values.items()
    )


def _record(event: Event) -> bytes:
    """TFRecord: length, its checksum, content, its checksum."""
    content: bytes = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    return length + _checksum(length) + content + _checksum(content)


def _checksum(content: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(content))
