"""A folder of pictures for each class: `train/` and `val/` (or `test/`) with class folders, or one tree of them."""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from convoy.data.decode import BadImage
from convoy.data.files import Opened, reading, shown
from convoy.data.memory import Names
from convoy.data.sources import EncodedSource
from convoy.errors import ConvoyError
from convoy.terminal import printable

SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".jp2", ".avif")
)
MAX_PICTURE_BYTES = 2**30
"""No picture of the size that is decoded has more."""
_TRAIN = ("train", "training")
_HELD_OUT = ("val", "valid", "validation", "test")


class FolderSource(EncodedSource):
    """Picture files below one folder, named relative to it."""

    def __init__(self, root: Path, files: list[str], labels: NDArray[np.int64]) -> None:
        self._root = str(root)
        self._files = Names([file[len(self._root) :].lstrip(os.sep) for file in files])
        self.labels = labels

    def name(self, sample: int) -> str:
        return printable(self._files[sample])

    def read(self, sample: int) -> bytes:
        return picture_bytes(os.path.join(self._root, self._files[sample]), self.name(sample))  # noqa: PTH118 (hot path)


def picture_bytes(path: str, name: str) -> bytes:
    """The bytes of a picture file, which messages call `name`. Raises BadImage."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 (hot path)
            if os.fstat(file.fileno()).st_size > MAX_PICTURE_BYTES:
                raise BadImage(name, f"has more than {MAX_PICTURE_BYTES} bytes")
            return file.read()
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise BadImage(name, f"cannot be read ({getattr(error, 'strerror', None) or error})") from None


def find_folder(path: Path) -> bool:
    """Whether there are folders that may be classes."""
    return any(_folders(path))


def open_folder(path: Path) -> Opened:
    """The pictures in class folders; files that are no pictures by their suffix, and hidden ones, are left out.

    Raises:
        ConvoyError: there are no class folders, a class has no picture, or the splits' classes differ.
    """
    train, test = _subfolder(path, _TRAIN), _subfolder(path, _HELD_OUT)
    if train is None and test is not None:
        raise ConvoyError(
            f"{shown(path)} has {test.name}/ but no train/: put the training pictures into train/, or set data.path "
            f"to {shown(test)} to split that"
        )
    classes = [folder.name for folder in _folders(train or path)]
    if not classes:
        raise ConvoyError(
            f"{shown(train or path)} holds no class folders: put the pictures of each class into a folder of its own"
        )
    shown_classes = [printable(name) for name in classes]
    source = _scan(path, train or path, classes)
    if test is None:
        return Opened(path.resolve().name, shown_classes, source)
    held = [folder.name for folder in _folders(test)]
    for name in held:
        if name not in classes:
            raise ConvoyError(
                f"{shown(test / name)} is a class that train/ does not have: add it there or remove it here"
            )
    if not held:
        raise ConvoyError(f"{shown(test)} holds no class folders: make one for each class as in train/")
    return Opened(path.resolve().name, shown_classes, source, _scan(path, test, classes))


def _subfolder(path: Path, names: tuple[str, ...]) -> Path | None:
    return next((path / name for name in names if (path / name).is_dir()), None)


def _folders(path: Path) -> list[Path]:
    with reading(path):
        return sorted(entry for entry in path.iterdir() if not entry.name.startswith(".") and entry.is_dir())


def _scan(root: Path, split: Path, classes: list[str]) -> FolderSource:
    files: list[str] = []
    counts = []
    for name in classes:
        folder = split / name
        found = pictures(folder) if folder.is_dir() else []  # a held-out split need not have all classes
        if not found and folder.is_dir():
            raise ConvoyError(
                f"{shown(folder)} is a class without pictures ({', '.join(sorted(SUFFIXES)[:6])}, …): "
                "add some or remove the folder"
            )
        files.extend(found)
        counts.append(len(found))
    return FolderSource(root, files, np.repeat(np.arange(len(classes)), counts).astype(np.int64))


def open_class(path: Path) -> Opened | None:
    """A folder of pictures without class folders, as a data set of the one class that the folder is named after.

    None where the folder holds other folders, or no pictures.
    """
    files = [] if next(iter(_folders(path)), None) else pictures(path)
    if not files:
        return None
    name = path.resolve().name
    return Opened(name, [printable(name)], FolderSource(path, files, np.zeros(len(files), np.int64)))


def pictures(folder: Path) -> list[str]:
    """All picture files below a folder, sorted; links are followed, but no folder is entered twice."""
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    open_folders = [str(folder)]
    while open_folders:
        current = open_folders.pop()
        with reading(Path(current)):
            status = os.stat(current)  # noqa: PTH116
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(current) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir():
                        open_folders.append(entry.path)
                    elif os.path.splitext(entry.name)[1].lower() in SUFFIXES and entry.is_file():  # noqa: PTH122
                        found.append(entry.path)
    return sorted(found)
