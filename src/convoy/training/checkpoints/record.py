"""`checkpoint.json`: what is in a checkpoint beside the tensors, and the checksum of every file."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convoy.files import to_json, write_text
from convoy.training.checkpoints.checkpoint import DamagedCheckpointError
from convoy.training.checkpoints.shard import sha256

FORMAT = "convoy-checkpoint-1"
RECORD = "checkpoint.json"
STATE = "state"


def write_record(
    folder: Path, step: int, identity: str, values: Mapping[str, Any], checksums: Mapping[str, str]
) -> None:
    """Write it into the folder of a checkpoint whose other files are complete.

    Args:
        folder: of the checkpoint.
        step: weight updates done.
        identity: of the run.
        values: as JSON can hold them.
        checksums: SHA-256 of each file under `state/`, by name.
    """
    record: dict[str, Any] = {
        "format": FORMAT,
        "step": step,
        "identity": identity,
        "values": json.loads(to_json(values)),
        "sha256": dict(checksums),
    }
    write_text(folder / RECORD, as_text(record | {"record_sha256": _digest(record)}))


def as_text(record: Mapping[str, Any]) -> str:
    """The one form in which a record is written: every byte of the file counts."""
    return to_json(record, indent=2) + "\n"


def checked_record(folder: Path, step: int) -> dict[str, Any]:
    """Read it, and check every file of the checkpoint against it.

    Raises:
        DamagedCheckpointError: a file is missing, truncated, altered, or was put in.
    """
    record = _read(folder, step)
    checksums: dict[str, str] = record["sha256"]
    for name, checksum in checksums.items():
        file = folder / STATE / name
        if not file.is_file():
            raise DamagedCheckpointError(f"checkpoint {folder} is damaged: {STATE}/{name} is missing")
        if _sha256(folder, file) != checksum:
            raise DamagedCheckpointError(f"checkpoint {folder} is damaged: {STATE}/{name} does not match its checksum")
    there = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    extra = there - {RECORD, STATE} - {f"{STATE}/{name}" for name in checksums}
    if extra:
        raise DamagedCheckpointError(f"checkpoint {folder} holds the foreign file {min(extra)}")
    return record


def _read(folder: Path, step: int) -> dict[str, Any]:
    path = folder / RECORD
    try:
        text = path.read_text(encoding="utf-8")
        record: dict[str, Any] = json.loads(text)
        known, as_written = record["format"] == FORMAT, text == as_text(record)
        digest = record.pop("record_sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(
            f"checkpoint {folder} is damaged or not Convoy's: {path.name} cannot be read"
        ) from error
    if not known:
        raise DamagedCheckpointError(f"checkpoint {folder} has the foreign format {record['format']!r}")
    if not as_written or digest != _digest(record) or record["step"] != step:
        raise DamagedCheckpointError(f"checkpoint {folder} is damaged: {path.name} does not match its checksum")
    return record


def _sha256(folder: Path, file: Path) -> str:
    try:
        return sha256(file)
    except OSError as error:
        raise DamagedCheckpointError(
            f"checkpoint {folder} is damaged: {STATE}/{file.name} cannot be read ({error.strerror})"
        ) from error


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
