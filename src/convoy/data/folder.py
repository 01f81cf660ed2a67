"""A folder of pictures for each class: `train/` and `val/` (or `test/`) with class folders, or one tree of them."""

import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convoy.data.config import DataConfig
from convoy.data.decode import BadImage, left_out, needs_package, suffixes
from convoy.data.processes import SharedBytes
from convoy.data.sources import EncodedSource, Opened, Source, reading, relabel, shown, split_of, spread
from convoy.errors import ConvoyError
from convoy.terminal import listed, printable

MAX_PICTURE_BYTES = 2**30  # more than any picture that is small enough to be decoded


class FolderSource(EncodedSource):
    """Picture files, named relative to one folder; others, by absolute paths."""

    def __init__(self, root: Path, files: list[str], labels: NDArray[np.int64]) -> None:
        self._root = str(root)
        above = os.path.join(self._root, "")  # noqa: PTH118
        self._files = SharedBytes(os.fsencode(file.removeprefix(above)) for file in files)
        self.labels = labels

    def name(self, sample: int) -> str:
        return printable(os.fsdecode(self._files[sample]))

    def _path(self, sample: int) -> str:
        return os.path.join(self._root, os.fsdecode(self._files[sample]))  # noqa: PTH118 (for every picture)

    def _marks(self) -> dict[str, Any]:
        with reading(Path(self._root)):
            sizes = [os.stat(self._path(sample)).st_size for sample in spread(len(self))]  # noqa: PTH116
        return {"names": self._files.checksum(), "sizes": sizes}

    def read(self, sample: int) -> bytes:
        return picture_bytes(self._path(sample), self.name(sample))


def picture_bytes(path: str, name: str) -> bytes:
    """The bytes of a picture file, which messages call `name`. Raises BadImage."""
    try:
        # O_NONBLOCK: do not wait for a writer of a pipe. No pathlib, which costs time for every picture.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise BadImage(name, "is no file but a folder, a pipe or a device")
            if status.st_size <= MAX_PICTURE_BYTES:
                data = file.read(status.st_size + 1) or b""
                if len(data) > status.st_size:  # it grows, or the system makes it up and calls its size 0
                    data += file.read(MAX_PICTURE_BYTES + 1 - len(data)) or b""
                if len(data) <= MAX_PICTURE_BYTES:
                    return data
            raise BadImage(name, f"has more than {MAX_PICTURE_BYTES} bytes")
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise BadImage(name, f"cannot be read ({getattr(error, 'strerror', None) or error})") from None


def has_classes(path: Path) -> bool:
    """Whether there are pictures in two folders or more below."""
    homes = (os.path.dirname(file) for top in subfolders(path) for file, end in _files(top) if end in suffixes())  # noqa: PTH120
    first = next(homes, None)
    return any(home != first for home in homes)


def open_folder(path: Path, config: DataConfig) -> Opened:
    """The pictures in class folders; a note says what else was left out, except hidden files."""
    notes: list[str] = []
    if config.train is None:
        train, held_out, notes = _splits(path)
    else:
        train, held_out = path / config.train, {"test": path / config.test} if config.test is not None else {}
        tops = (train, *held_out.values())
        if not all(top.is_dir() and top.resolve().is_relative_to(path.resolve()) for top in tops):
            listing = _listed([child.name for child in subfolders(path)]) or "none"
            raise ConvoyError(f"data.train or data.test is no folder below {shown(path)}, which holds {listing}")
    leftovers, empty = Counter[str](), list[str]()
    classes, source = _scan(path, train, held_out.get("test"), leftovers, empty)
    if not classes:
        raise ConvoyError(
            f"{shown(train)} holds no class folders with pictures: put those of each class into a folder of its own"
        )
    if empty:
        notes.append(f"left out: {_listed(empty)} without pictures")
    sources: dict[str, Source] = {"train": source}
    for split, folder in held_out.items():
        names, sources[split] = _scan(path, folder, None, leftovers, [])
        for name in names:
            if name not in classes:
                raise ConvoyError(
                    f"{shown(folder / name)} is a class that {train.name}/ does not have pictures of: add some there "
                    "or remove it here"
                )
        if not names and split == "test" and "validation" in sources:  # its labels may be withheld
            notes.append(f"left out: {printable(folder.name)}/, which has no class folders")
            del sources[split]
        elif not names:
            raise ConvoyError(
                f"{shown(folder)} holds no class folders with pictures: make one for each class as in {train.name}/, "
                f"or go without by --set data.train={printable(str(train.relative_to(path)))}"
            )
        else:
            relabel([sources[split]], names, classes)
    for folder in {path, train, *held_out.values()}:
        ends = (entry.suffix.lower() for entry in folder.iterdir() if not entry.name.startswith("."))
        leftovers.update(f"{end} beside the class folders" for end in ends if end in suffixes())
    shown_classes = [printable(name) for name in classes]
    return Opened(path.resolve().name, shown_classes, sources, (*notes, *left_out(leftovers)))


def _splits(path: Path) -> tuple[Path, dict[str, Path], list[str]]:
    """The folders of class folders to train on, and for validation and test (none where one tree holds all), and
    sentences on that."""
    folders = subfolders(path)
    splits = {folder: split for folder in folders if (split := split_of(folder.name)) is not None}
    if not splits:
        shared = _inner(folders[0]) if folders else set[str]()
        if len(folders) == 1 and "train" in map(split_of, shared):
            return _splits(folders[0])
        for folder in folders[1:]:
            shared = shared & _inner(folder) if len(shared) > 1 else set()  # one may be what each class has, as images/
        if len(folders) > 1 and len(shared) > 1:
            raise _unclear(path, folders)
        return path, {}, []
    train = [folder for folder in splits if splits[folder] == "train"]
    validation, tests = ([folder for folder in splits if splits[folder] == split] for split in ("val", "test"))
    if validation and len(tests) > 1:
        tests = []
    unnamed = [
        folder for folder in folders if folder not in splits and any(end in suffixes() for _, end in _files(folder))
    ]
    within = {name for folder in splits for name in _inner(folder)}
    overlap = within and any(folder.name in within or _inner(folder) & within for folder in unnamed)
    held_out = validation + tests
    if unnamed and not overlap and (not train or not (within or held_out)):
        classes = _listed([folder.name for folder in splits])
        return path, {}, [f"{classes} is a class here, not a split (--set data.train=… says otherwise)"]
    if not train and not unnamed:
        raise ConvoyError(
            f"{shown(path)} has {held_out[0].name}/ but no train/: put the training pictures into train/, or set "
            f"data.path to {shown(held_out[0])} to split that"
        )
    if len(train) != 1 or max(len(validation), len(tests)) > 1 or overlap or (unnamed and not held_out):
        raise _unclear(path, folders)
    unused = [folder.name for folder in folders if folder not in (*train, *held_out)]
    notes = [f"left out: {_listed(unused)}"] if unused else []
    named = [("validation", folder) for folder in validation] + [("test", folder) for folder in tests]
    return _unwrapped(train[0]), {split: _unwrapped(folder) for split, folder in named}, notes


def _unclear(path: Path, folders: list[Path]) -> ConvoyError:
    names = [folder.name for folder in folders]
    first_name, second_name = (printable(name) for name in (names * 2)[:2])
    return ConvoyError(
        f"{shown(path)} holds {_listed(names)}, and which to train on is not clear: say so, as by --set "
        f"data.train={first_name} --set data.test={second_name}, or --set data.train=. where each is a class"
    )


def _listed(names: list[str]) -> str:
    return listed([f"{printable(name)}/" for name in names], 5)


def _unwrapped(folder: Path) -> Path:
    """The folder of the same name within, where that is all that it holds, as some archives unpack."""
    while [inner.name.lower() for inner in subfolders(folder)] == [folder.name.lower()]:
        folder = subfolders(folder)[0]
    return folder


def _inner(folder: Path) -> set[str]:
    return {inner.name for inner in subfolders(_unwrapped(folder))}


def subfolders(path: Path) -> list[Path]:
    """The folders in a folder, which may be classes, sorted."""
    with reading(path), os.scandir(path) as entries:
        return sorted(Path(entry.path) for entry in entries if not entry.name.startswith(".") and entry.is_dir())


def _scan(
    root: Path, split: Path, without: Path | None, leftovers: Counter[str], empty: list[str]
) -> tuple[list[str], FolderSource]:
    """The classes that have pictures, and their source; counts other files by kind, and lists empty folders."""
    files: list[str] = []
    counts: dict[str, int] = {}
    for folder in subfolders(split):
        if folder == without:
            continue
        kinds = Counter[str]()
        if paths := pictures(folder, kinds):
            counts[folder.name] = len(paths)
        elif needs_package(kinds):
            raise ConvoyError(f"{shown(folder)} is a class without pictures that can be read ({left_out(kinds)[0]})")
        else:
            empty.append(folder.name)
        files.extend(paths)
        leftovers.update(kinds)
    labels = np.repeat(np.arange(len(counts)), list(counts.values())).astype(np.int64)
    return list(counts), FolderSource(root, files, labels)


def open_class(path: Path) -> Opened | None:
    """A folder of pictures and nothing else, as a data set of the one class that it is named after; else None."""
    leftovers = Counter[str]()
    files = [] if next(iter(subfolders(path)), None) else pictures(path, leftovers)
    if not files:
        return None
    name, source = path.resolve().name, FolderSource(path, files, np.zeros(len(files), np.int64))
    return Opened(name, [printable(name)], {"train": source}, tuple(left_out(leftovers)))


def pictures(folder: Path, others: Counter[str] | None = None) -> list[str]:
    """All picture files below a folder, sorted; `others` counts the other files by the ends of their names."""
    files = list(_files(folder))
    if others is not None:
        others.update(end for _, end in files if end not in suffixes())
    return sorted(file for file, end in files if end in suffixes())


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    """All files below a folder except hidden ones, with the ends of their names, and dead links. Links are followed,
    once, and not to what the folder lies in."""
    seen = {(above.stat().st_dev, above.stat().st_ino) for above in folder.resolve().parents}
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
                    elif entry.is_file():
                        yield entry.path, os.path.splitext(entry.name)[1].lower()  # noqa: PTH122
                    elif entry.is_symlink():
                        yield entry.path, "by dead links"
