"""One file of tensors: safetensors, written and hashed in one pass, and read by its library without running any code.

The library's own `save_file` is not used: some versions of it copy all tensors, and its errors say nothing of the
disk. The format is a length of 8 bytes, a JSON header of names, types, shapes and places, and the bytes.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from convoy.engine.position import here
from convoy.training.checkpoints.checkpoint import DamagedCheckpointError

_PIECE = 1 << 22
"""Bytes that are hashed and written at once: few enough to stay in the processor's cache in between."""
_TYPES = {
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


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors on the CPU into a new file, and sync it to disk.

    Returns:
        The file's SHA-256.

    Raises:
        OSError: it cannot be written.
    """
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for piece in _pieces(tensors):
            digest.update(piece)
            while piece:
                piece = piece[file.write(piece) :]
        os.fsync(file.fileno())
    return digest.hexdigest()


def read_shard(path: Path) -> dict[str, Tensor]:
    """The tensors of such a file.

    Raises:
        DamagedCheckpointError: it is none.
    """
    try:
        return load_file(path)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is no file of tensors: {error}") from error


def sha256(path: Path) -> str:
    """The checksum of a file. Who watches over the run sees that it is being read."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            here.to("reading")
            digest.update(piece)
    return digest.hexdigest()


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """The whole file, piece by piece; the widest types come first, so that all tensors are aligned."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, tensor in ordered:
        end = place + tensor.nbytes
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(content), _PIECE):
            yield content[start : start + _PIECE]
