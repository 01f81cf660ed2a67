"""What a checkpoint is, and its files: tensors as safetensors, all else as JSON, a checksum for every one of them.

Tensors are written and hashed in one pass, and read by the library of safetensors without running any code. Its own
`save_file` is not used: some versions of it copy all tensors, and its errors say nothing of the disk. The format is a
length of 8 bytes, a JSON header of names, types, shapes and places, and the bytes.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from convoy.comm.position import current
from convoy.errors import ConvoyError
from convoy.files import to_json, write_text

FORMAT = "convoy-checkpoint-1"
RECORD = "checkpoint.json"
STATE = "state"
_PIECE = 1 << 22  # bytes hashed and written at once: few enough to stay in the processor's cache in between
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


class DamagedCheckpointError(ConvoyError):
    """A checkpoint that is truncated, altered or not Convoy's; the message names it."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after `step` weight updates."""

    step: int
    identity: str  # of the run: the checkpoints of another run are not taken
    tensors: dict[str, Tensor]  # whole, by serial names
    values: dict[str, Any]  # everything that is no tensor, as JSON can hold it


Kinds = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # type and shape of tensors by name


def in_file(kinds: Kinds) -> list[str]:
    """The order of tensors in a file: the widest types come first, so that all are aligned."""
    return sorted(kinds, key=lambda name: (-kinds[name][0].itemsize, name))


def write_tensors(path: Path, kinds: Kinds, tensors: Iterable[Tensor]) -> str:
    """Write a file of tensors, sync it to disk, and give its SHA-256. They come in the order of `in_file`; each is let
    go before the next one is asked for.
    """
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for piece in _pieces(kinds, tensors):
            digest.update(piece)
            while piece:
                piece = piece[file.write(piece) :]
        os.fsync(file.fileno())
    return digest.hexdigest()


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """The same of tensors by name, which are on the CPU."""
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return write_tensors(path, kinds, (tensors[name] for name in in_file(kinds)))


def _pieces(kinds: Kinds, tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name in in_file(kinds):
        dtype, shape = kinds[name]
        end = place + dtype.itemsize * prod(shape)
        header[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for tensor in tensors:
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(content), _PIECE):
            yield content[start : start + _PIECE]
        del tensor, content


def read_shard(path: Path) -> dict[str, Tensor]:
    """The tensors of such a file."""
    try:
        return load_file(path)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is no file of tensors: {error}") from error


def sha256(path: Path) -> str:
    """The checksum of a file. Who watches over the run sees that it is being read."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            current.to("reading")
            digest.update(piece)
    return digest.hexdigest()


def write_record(
    folder: Path, step: int, identity: str, values: Mapping[str, Any], checksums: Mapping[str, str]
) -> None:
    """Write the record of a checkpoint whose other files are complete: `values` as JSON, and the SHA-256 of each file
    under `state/` by its name.
    """
    record: dict[str, Any] = {
        "format": FORMAT,
        "step": step,
        "identity": identity,
        "values": json.loads(to_json(values)),
        "sha256": dict(checksums),
    }
    write_text(folder / RECORD, _as_text(record))


def _as_text(record: Mapping[str, Any]) -> str:
    """The one form in which a record is written, with its checksum: every byte of the file counts."""
    checksum = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    return to_json({**record, "record_sha256": checksum}, indent=2) + "\n"


def _damaged(folder: Path, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"checkpoint {folder} {what}")


def checked_record(folder: Path, step: int | None = None) -> dict[str, Any]:
    """Read the record, and check every file of the checkpoint against it."""
    record = _read(folder, step)
    for name, checksum in record["sha256"].items():
        file = folder / STATE / name
        if not file.is_file():
            raise _damaged(folder, f"is damaged: {STATE}/{name} is missing")
        try:
            is_whole = sha256(file) == checksum
        except OSError as error:
            raise _damaged(folder, f"is damaged: {STATE}/{name} cannot be read ({error.strerror})") from error
        if not is_whole:
            raise _damaged(folder, f"is damaged: {STATE}/{name} does not match its checksum")
    there = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    extra = there - {RECORD, STATE} - {f"{STATE}/{name}" for name in record["sha256"]}
    if extra:
        raise _damaged(folder, f"holds the foreign file {min(extra)}")
    return record


def _read(folder: Path, step: int | None) -> dict[str, Any]:
    try:
        text = (folder / RECORD).read_text(encoding="utf-8")
        record: dict[str, Any] = json.loads(text)
        form = record["format"]
        del record["record_sha256"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, f"is damaged or not Convoy's: {RECORD} cannot be read") from error
    if form != FORMAT:
        raise _damaged(folder, f"has the foreign format {form!r}")
    kinds = {"step": int, "identity": str, "values": dict, "sha256": dict}
    if [type(record.get(key)) for key in kinds] != list(kinds.values()):
        raise _damaged(folder, f"is not Convoy's: {RECORD} lacks what belongs into it")
    if text != _as_text(record) or step not in (None, record["step"]):
        raise _damaged(folder, f"is damaged: {RECORD} does not match its checksum")
    return record


@contextmanager
def values_explained(what: str) -> Iterator[None]:
    """Say in one sentence that a checkpoint holds no state of this program: its checksums are no signature."""
    try:
        yield
    except ConvoyError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpointError(
            f"{what} holds other values than Convoy writes, though its checksums fit ({type(error).__name__}: "
            f"{error}): remove it, and use the one before it"
        ) from error
