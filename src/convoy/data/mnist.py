"""MNIST and data sets in its files: idx, plain or gzip (LeCun, Cortes, Burges: yann.lecun.com/exdb/mnist)."""

import gzip
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from convoy.data.files import Opened, reading, shown, unpacking
from convoy.data.known import MNIST_CLASSES
from convoy.data.sources import PixelSource
from convoy.errors import ConvoyError

_IMAGES, _LABELS = 0x803, 0x801
_MAX_BYTES = 16 * 2**30
_MOST_PACKED = 1032  # bytes that deflate can make of one (zlib's technical details)
_SHARE_OF_MEMORY = 2


def find_mnist(folder: Path) -> bool:
    """Whether the folder holds files named like MNIST's."""
    return any(_candidates(folder, split, "images") for split in ("train", "t10k"))


def open_mnist(folder: Path) -> Opened:
    """The two splits of a folder with the four files of MNIST (gzip or plain).

    Raises:
        ConvoyError: a file is missing, is no idx file, is cut off or too long, or pictures and labels do not match.
    """
    return Opened("mnist", MNIST_CLASSES, _open_split(folder, "train"), _open_split(folder, "t10k"))


def _open_split(folder: Path, split: str) -> PixelSource:
    images, labels = _find(folder, split, "images"), _find(folder, split, "labels")
    pixels, classes = read_idx(images, _IMAGES), read_idx(labels, _LABELS)
    if len(pixels) != len(classes):
        raise ConvoyError(
            f"{shown(images)} has {len(pixels)} pictures, but {labels.name} has {len(classes)} labels: "
            "they are from different data sets, fetch both again"
        )
    if classes.max() > 9:
        place = int(classes.argmax())
        raise ConvoyError(
            f"{shown(labels)} has label {classes[place]} at picture {place}, out of range: MNIST's are 0 to 9"
        )
    return PixelSource(pixels[..., None], classes.astype(np.int64), images.name)


def _candidates(folder: Path, split: str, kind: str) -> list[Path]:
    digit = 3 if kind == "images" else 1
    stems = [f"{split}-{kind}{separator}idx{digit}-ubyte" for separator in "-."]
    return [file for stem in stems for end in ("", ".gz") if (file := folder / (stem + end)).is_file()]


def _find(folder: Path, split: str, kind: str) -> Path:
    found = _candidates(folder, split, kind)
    if not found:
        digit = 3 if kind == "images" else 1
        raise ConvoyError(
            f"{shown(folder)} lacks {split}-{kind}-idx{digit}-ubyte.gz: an MNIST folder holds the pictures and labels "
            "of train and t10k, gzip or plain"
        )
    return found[0]


def read_idx(path: Path, magic: int) -> NDArray[np.uint8]:
    """The array in an idx file of bytes; `magic` says how many dimensions it must have.

    Raises:
        ConvoyError: another magic number, no entries, or not as many bytes as its header says.
    """
    what = "pictures" if magic == _IMAGES else "labels"
    num_dims = magic & 0xFF
    opener = gzip.open if path.suffix == ".gz" else open
    with reading(path), unpacking(path, "fetch it again"), opener(path, "rb") as file:
        header = file.read(4 + 4 * num_dims)
        if len(header) < 4 + 4 * num_dims or int.from_bytes(header[:4], "big") != magic:
            raise ConvoyError(
                f"{shown(path)} is no idx file of {what} (it begins with {header[:4].hex() or 'nothing'}, "
                f"not {magic:08x}): fetch it again"
            )
        shape = [int.from_bytes(header[start : start + 4], "big") for start in range(4, len(header), 4)]
        expected = int(np.prod(shape, dtype=object))
        if not 0 < expected <= _MAX_BYTES:
            raise ConvoyError(f"{shown(path)} says it holds {' x '.join(map(str, shape))} bytes: fetch it again")
        content = file.read(_num_bytes(path, expected) + 1)
    if len(content) != expected:
        relation = "more" if len(content) > expected else f"only {len(content)}"
        raise ConvoyError(f"{shown(path)} should hold {expected} bytes of {what} but has {relation}: fetch it again")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _num_bytes(path: Path, claimed: int) -> int:
    """So many bytes are to be read, before memory is taken for them: no more than the file can hold.

    Raises:
        ConvoyError: they would fill the memory.
    """
    num_bytes = min(claimed, path.stat().st_size * (_MOST_PACKED if path.suffix == ".gz" else 1))
    if num_bytes > _memory() // _SHARE_OF_MEMORY:
        raise ConvoyError(
            f"{shown(path)} unpacks to {claimed} bytes, more than half of this machine's memory: use a machine with "
            "more, or a format that is read in pieces (a folder, parquet, WebDataset)"
        )
    return num_bytes


def _memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
