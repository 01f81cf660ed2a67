"""CIFAR-10 and CIFAR-100 as their author publishes them: python and binary files (Krizhevsky, 2009)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convoy.data.cifar_pickle import read_pickle
from convoy.data.files import Opened, reading, shown
from convoy.data.sources import PixelSource
from convoy.errors import ConvoyError

_SIDE = 32
_BYTES = 3 * _SIDE * _SIDE


@dataclass(frozen=True)
class _Layout:
    """The file names of one version. `label_bytes` is 0 for the python version; its label comes last."""

    name: str
    folder: str
    train: tuple[str, ...]
    test: str
    names: str
    names_key: str
    label_key: str
    label_bytes: int
    num_classes: int


_FIVE = tuple(f"data_batch_{i}" for i in range(1, 6))
_LAYOUTS = (
    _Layout("cifar10", "cifar-10-batches-py", _FIVE, "test_batch", "batches.meta", "label_names", "labels", 0, 10),
    _Layout(
        "cifar10",
        "cifar-10-batches-bin",
        tuple(f"{name}.bin" for name in _FIVE),
        "test_batch.bin",
        "batches.meta.txt",
        "",
        "",
        1,
        10,
    ),
    _Layout("cifar100", "cifar-100-python", ("train",), "test", "meta", "fine_label_names", "fine_labels", 0, 100),
    _Layout("cifar100", "cifar-100-binary", ("train.bin",), "test.bin", "fine_label_names.txt", "", "", 2, 100),
)


def find_cifar(path: Path) -> tuple[Path, _Layout] | None:
    """The folder with CIFAR's files, which is `path` or lies in it, and their version."""
    for layout in _LAYOUTS:
        for folder in (path, path / layout.folder):
            if any((folder / name).is_file() for name in (*layout.train, layout.test)):
                return folder, layout
    return None


def open_cifar(path: Path) -> Opened:
    """Both splits in memory, 32x32 RGB; CIFAR-100 with its 100 fine labels.

    Raises:
        ConvoyError: a file is missing, damaged or dangerous, or a label is out of range.
    """
    found = find_cifar(path)
    if found is None:
        raise ConvoyError(
            f"{shown(path)} holds no CIFAR files ({', '.join(layout.folder for layout in _LAYOUTS)}): unpack the "
            "archive and set data.path to its folder"
        )
    folder, layout = found
    classes = _class_names(folder / layout.names, layout)
    train, test = ([_read(folder / name, layout) for name in names] for names in (layout.train, (layout.test,)))
    return Opened(layout.name, classes, _join(train, "training pictures"), _join(test, "test pictures"))


def _join(parts: list[tuple[NDArray[np.uint8], NDArray[np.int64]]], name: str) -> PixelSource:
    planes = np.concatenate([pixels for pixels, _ in parts]).reshape(-1, 3, _SIDE, _SIDE)
    labels = np.concatenate([labels for _, labels in parts])
    return PixelSource(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels, f"CIFAR's {name}")


def _read(path: Path, layout: _Layout) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    pixels, labels = _read_binary(path, layout) if layout.label_bytes else _read_python(path, layout)
    if len(labels) == 0:
        raise ConvoyError(f"{shown(path)} holds no pictures: fetch it again")
    if labels.min() < 0 or labels.max() >= layout.num_classes:
        place = int(np.flatnonzero((labels < 0) | (labels >= layout.num_classes))[0])
        raise ConvoyError(
            f"{shown(path)} has label {labels[place]} at picture {place}, out of range: "
            f"the labels of {layout.name} are 0 to {layout.num_classes - 1}"
        )
    return pixels, labels


def _read_binary(path: Path, layout: _Layout) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    with reading(path):
        content = np.fromfile(path, np.uint8)
    row = _BYTES + layout.label_bytes
    if content.size % row:
        raise ConvoyError(
            f"{shown(path)} has {content.size} bytes, which is no multiple of {row}: it is cut off or no file of "
            f"{layout.name}, fetch it again"
        )
    table = content.reshape(-1, row)
    return table[:, layout.label_bytes :], table[:, layout.label_bytes - 1].astype(np.int64)


def _read_python(path: Path, layout: _Layout) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    content = read_pickle(path)
    pixels, labels = content.get("data"), content.get(layout.label_key)
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _BYTES:
        raise ConvoyError(f"{shown(path)} has no `data` of {_BYTES} bytes a picture: fetch it again")
    if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 2**31 for label in labels):
        raise ConvoyError(f"{shown(path)} has no list of whole numbers `{layout.label_key}`: fetch it again")
    if len(labels) != len(pixels):
        raise ConvoyError(f"{shown(path)} has {len(pixels)} pictures but {len(labels)} labels: fetch it again")
    return pixels, np.array(labels, np.int64)


def _class_names(path: Path, layout: _Layout) -> list[str]:
    names: Any
    if layout.label_bytes:
        with reading(path):
            names = path.read_text(encoding="utf-8", errors="replace").split()
    else:
        names = read_pickle(path).get(layout.names_key)
        if isinstance(names, list):
            names = [name.decode("latin1") if isinstance(name, bytes) else str(name) for name in names]
    if not isinstance(names, list) or len(names) != layout.num_classes:
        raise ConvoyError(f"{shown(path)} does not name the {layout.num_classes} classes: fetch it again")
    return names
