"""WebDataset tars: the members `name.jpg` and `name.cls` of a tar are a sample and its label.

By the format's rule a name ends at its first dot; `22.05.jpg` and `22.05.cls`, alike up to the last, are a sample too.

Only the headers are read to begin with; a picture is then read at its offset, in any order, which an exact order of
samples needs (the `webdataset` package shuffles in a buffer while it streams). Nothing is unpacked and no member's name
is ever used as a path.
"""

import json
import os
import tarfile
import weakref
import zlib
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convoy.data.config import DataConfig
from convoy.data.decode import BadImage, left_out, suffixes
from convoy.data.folder import MAX_PICTURE_BYTES
from convoy.data.processes import SharedArray, SharedBytes
from convoy.data.sources import EncodedSource, Opened, Progress, Source, reading, shards, shown, spread
from convoy.errors import ConvoyError
from convoy.terminal import printable

_MAX_LABEL_BYTES = 2**20
_MOST_OPEN = 256
CLASS_NAMES = "classes.txt"


class TarSource(EncodedSource):
    """Members of tar files; `places` are int64 [n, 3]: number of the file, offset and size of the member's content."""

    def __init__(
        self, files: list[Path], names: SharedBytes, places: NDArray[np.int64], labels: NDArray[np.int64]
    ) -> None:
        self._files = [str(file) for file in files]
        self._names = names
        self._places = SharedArray.of(places)
        self.labels = labels
        self._open: dict[int, _Descriptor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_open": {}}

    def name(self, sample: int) -> str:
        return self.place(sample)

    def place(self, sample: int) -> str:
        shard = Path(self._files[self._places.array[sample, 0]]).name
        return f"{printable(shard)}/{printable(os.fsdecode(self._names[sample]))}"

    def _marks(self) -> dict[str, Any]:
        shards, _, sizes = self._places.array.T
        names = zlib.crc32(np.ascontiguousarray(shards).data, self._names.checksum())
        return {"names": names, "sizes": sizes[spread(len(self))].tolist()}

    def read(self, sample: int) -> bytes:
        shard, offset, size = self._places.array[sample].tolist()
        try:
            file = self._open.get(shard)
            if file is None:
                if len(self._open) >= _MOST_OPEN:
                    self._open.clear()
                file = self._open[shard] = _Descriptor(self._files[shard])
            data = os.pread(file.number, size, offset)
            while 0 < len(data) < size and (more := os.pread(file.number, size - len(data), offset + len(data))):
                data += more
        except OSError as error:
            raise BadImage(self.name(sample), f"cannot be read ({error.strerror})") from None
        if len(data) < size:
            raise BadImage(self.name(sample), "is cut off")
        return data


class _Descriptor:
    """An open file that closes when nobody refers to it."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number)


def open_tars(path: Path, config: DataConfig, progress: Progress | None = None) -> Opened:
    """One tar, or a folder of tars whose names say train, val or test; class names come from a `classes.txt` beside
    them."""
    leftovers, text = Counter[str](), ""
    splits = shards(path, ".tar", config).items()
    sources: dict[str, Source] = {split: _open_split(files, progress, leftovers) for split, files in splits}
    names = (path.parent if path.is_file() else path) / CLASS_NAMES
    if names.is_file():
        with reading(names):
            text = names.read_text(encoding="utf-8", errors="replace")
    classes = [printable(line.strip()) for line in text.splitlines() if line.strip()]
    name = path.stem if path.is_file() else path.resolve().name
    return Opened(name, classes, sources, tuple(left_out(leftovers)))


def _open_split(files: list[Path], progress: Progress | None, leftovers: Counter[str]) -> TarSource:
    samples: list[tuple[str, int, int, int, int]] = []
    for number, file in enumerate(files):
        samples += [
            (member.name, number, member.offset_data, member.size, label) for member, label in _labeled(file, leftovers)
        ]
        if progress:
            progress("indexing tars", number + 1, len(files))
    if not samples:
        raise ConvoyError(f"{shown(files[0])} holds no samples: a sample is a picture and its .cls, with equal names")
    return TarSource(
        files,
        SharedBytes(os.fsencode(name) for name, *_ in samples),
        np.array([place for _, *place, _ in samples], np.int64),
        np.array([label for *_, label in samples], np.int64),
    )


def _labeled(path: Path, leftovers: Counter[str]) -> list[tuple[tarfile.TarInfo, int]]:
    """The pictures of a tar and their labels; counts the members that are left out by their kind."""
    kinds: dict[str, dict[str, tarfile.TarInfo]] = {"picture": {}, ".cls": {}, ".json": {}}
    try:
        with reading(path), tarfile.open(path, "r:") as tar:
            for member in tar:
                # Of one with fewer bytes than none, Python would read for ever; another would fill the memory.
                if member.size < 0 or (member.isreg() and member.size > MAX_PICTURE_BYTES):
                    raise ConvoyError(
                        f"{shown(path)} has {printable(member.name)} of {member.size} bytes, which is no picture: "
                        "write the tar again"
                    )
                key, end = os.path.splitext(member.name.removeprefix("./"))  # noqa: PTH122 (no path)
                kind = "picture" if end.lower() in suffixes() else end.lower()
                if not member.isreg() or member.sparse is not None or key.rpartition("/")[2].startswith("."):
                    if kind in kinds:
                        leftovers[f"{end} that is hidden, a link or no whole file"] += 1
                elif kind not in kinds:
                    leftovers[_after_first_dot(member.name)] += 1
                elif key in kinds[kind]:
                    what = "pictures" if kind == "picture" else f"members {kind} of"
                    raise ConvoyError(f"{shown(path)} has two {what} {printable(key)}: give them other names")
                else:
                    kinds[kind][key] = member
            pictures, labels, documents = kinds.values()
            unlabeled = {key: member for key, member in documents.items() if key not in labels}
            labels |= {key: member for key, member in unlabeled.items() if _label(tar, member, path) is not None}
            pairs = _pairs(pictures, labels, path, leftovers)
            labeled = [(pictures[key], _label(tar, labels[by], path)) for by, key in pairs]
            return [(member, label) for member, label in labeled if label is not None]
    except ConvoyError:
        raise
    except (tarfile.TarError, MemoryError, ValueError, OverflowError) as error:
        reason = printable(str(error)) or "it says it holds more than fits into memory"
        sentence = f"is no tar file, or is cut off or damaged ({reason}): fetch it again"
        with path.open("rb") as file:
            if file.read(2) == b"\x1f\x8b":
                sentence = (
                    "is compressed, and pictures cannot be read at random from it: unpack it to a plain tar (gunzip)"
                )
        raise ConvoyError(f"{shown(path)} {sentence}") from None


def _pairs(
    pictures: dict[str, tarfile.TarInfo], labels: Collection[str], path: Path, leftovers: Counter[str]
) -> Iterable[tuple[str, str]]:
    """The keys of each sample's label and picture: the same up to their last dots, else up to their first ones."""
    pairs: dict[str, str] = {}
    for key in sorted(pictures, key=lambda key: "." in key.rpartition("/")[2]):  # names with one dot first
        short_key = key.removesuffix(_after_first_dot(key))
        by = key if key in labels else short_key
        if by not in labels and key == short_key:
            raise ConvoyError(
                f"{shown(path)} has no label for {printable(pictures[key].name)}: a sample needs {printable(key)}.cls "
                'with a whole number, or .json with "label"'
            )
        if pairs.get(by, by) != by:
            raise ConvoyError(
                f"{shown(path)} has two pictures that may be meant by the label of {printable(by)}: call one "
                f"{printable(by)}, as a name ends at its first dot"
            )
        if by not in labels or by in pairs:
            leftovers[_after_first_dot(pictures[key].name)] += 1
        else:
            pairs[by] = key
    for key in labels:
        if key not in pairs and key.removesuffix(_after_first_dot(key)) not in pairs:
            raise ConvoyError(f"{shown(path)} has a label for {printable(key)} but no picture: write the tar again")
    return sorted(pairs.items(), key=lambda pair: pictures[pair[1]].offset)


def _after_first_dot(name: str) -> str:
    _, dot, end = name.rpartition("/")[2].partition(".")
    return dot + end


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> int | None:
    """The whole number in a .cls, or under "label" or "cls" in a .json; None where a .json has neither."""
    file = tar.extractfile(member)
    content = file.read(_MAX_LABEL_BYTES) if file else b""
    if member.name.lower().endswith(".json"):
        try:
            document = json.loads(content)
        except (ValueError, RecursionError):
            raise ConvoyError(f"{shown(path)} has {printable(member.name)}, which is no JSON: write it again") from None
        value = document.get("label", document.get("cls")) if isinstance(document, dict) else None
        if value is None:
            return None
        content = str(value).encode()
    text = content[:40].decode("utf-8", "replace").strip()
    try:
        label = int(text)
    except ValueError:
        raise ConvoyError(
            f"{shown(path)} has label {printable(text)!r} in {printable(member.name)}, but a label is a whole number"
        ) from None
    if abs(label) >= 2**31:
        raise ConvoyError(f"{shown(path)} has label {label} in {printable(member.name)}, out of range")
    return label
