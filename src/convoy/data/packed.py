"""Packs, which `convoy data pack` writes: what they are on disk, and how they are read, verified and unpacked.

A pack is a folder of `train-000000.tar`, …, and the like of `validation` and `test` (`data-000000.tar`, … where the
data set has no split of its own), which any reader of WebDataset takes, `classes.txt`, and `index.safetensors`: where
every picture lies, its label, checksum and name. Samples have the numbers that they have in the original, so a run sees
them in the same order.

A picture is one `pread`, where Parquet reads a row group of a hundred or more. The index is written last. Until then
the folder `.packing` says what is being packed, and keeps what is known of the shards that are complete, so that a pack
that was interrupted goes on where it stopped; nobody reads it before.
"""

import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from convoy.data.decode import BadImage, open_picture, suffix_of, suffixes
from convoy.data.folder import MAX_PICTURE_BYTES
from convoy.data.processes import SharedBytes
from convoy.data.sources import Opened, Progress, Source, reading, shown
from convoy.data.webdataset import TarSource
from convoy.errors import ConvoyError
from convoy.files import writing
from convoy.terminal import printable

INDEX, UNFINISHED = "index.safetensors", ".packing"
VERSION = 1
# Names in shards and index. `data` is of an original without a split, so that readers see no split in the name.
WHOLE = "data"
SPLITS = ([WHOLE], ["train", "test"], ["train", "validation"], ["train", "validation", "test"])
MASKS = "_masks"  # behind the name of a split: its masks, which are packed as pictures are
PER_SHARD = 2048

AGAIN = "mend that, and run the same again"  # where something cannot be written
_EVERY = 2000  # pictures from one report of progress to the next
_LONGEST = 200  # bytes of a name


@dataclass(frozen=True)
class PackOptions:
    """How pictures are stored."""

    short_side: int | None = None  # larger pictures are resized to it, in pixels; None leaves all as they are
    raw: bool = False  # pixels (PPM) instead of picture files
    quality: int = 90  # of JPEG, 1 to 95, for pictures that were resized

    def __str__(self) -> str:
        side = f"short side at most {self.short_side}" if self.short_side else "size as in the original"
        if self.raw:
            return f"raw pixels, {side}"
        return f"{side}, JPEG of quality {self.quality} where resized" if self.short_side else f"files and {side}"


@dataclass(frozen=True)
class Statistics:
    """Sums over the pictures of a split."""

    images: int = 0
    original_bytes: int = 0  # of the original's files; 0 where it keeps pixels
    stored_bytes: int = 0  # of the pictures in the pack
    pixels: int = 0  # of all stored pictures
    # of the stored pixels, 0 to 255: red, green, blue, which are equal for grey
    sums: tuple[int, int, int] = (0, 0, 0)
    squares: tuple[int, int, int] = (0, 0, 0)  # of the same, squared

    @property
    def moments(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of each channel, pixels from 0 to 1; of one where all pictures are grey."""
        channels = 1 if len(set(self.sums)) == len(set(self.squares)) == 1 else 3
        sums, squares = np.array([self.sums[:channels], self.squares[:channels]]) / max(self.pixels, 1)
        deviations = np.maximum(squares - sums**2, 0) ** 0.5
        return (sums / 255).round(4).tolist(), (deviations / 255).round(4).tolist()


def shard_name(split: str, number: int) -> str:
    """The file name of a shard."""
    return f"{split}-{number:06d}.tar"


class PackedSource(TarSource):
    """The pictures of a split of a pack, under the names that they have in the original."""

    mend = "fetch the pack again, or pack again"
    is_packed = True
    contents = 0  # the index's checksum of the checksums of all pictures

    def name(self, sample: int) -> str:
        return printable(os.fsdecode(self._names[sample]))

    def _marks(self) -> dict[str, Any]:
        return {"names": self._names.checksum(), "contents": self.contents}


_Name = Annotated[str, AfterValidator(printable)]


class Pack(BaseModel, frozen=True):
    """A pack on disk, as its index describes it."""

    path: Path
    name: _Name  # of the original data set
    format: _Name  # of the original
    classes: list[_Name]  # by label
    task: str = "classification"
    options: PackOptions
    statistics: dict[str, Statistics]  # by split, as `SPLITS` has them
    shards: dict[str, int]  # sizes in bytes, by name
    index: dict[str, int]  # CRC-32 of the arrays in the index, by name

    @classmethod
    def open(cls, path: Path, *, to_verify: bool = False) -> "Pack":
        """Read its index and, unless it is to be verified, see that all shards are there. Raises ConvoyError where the
        pack is not finished, is damaged or of a later version."""
        index = path / INDEX
        if (path / UNFINISHED).exists() and not index.exists():
            raise ConvoyError(
                f"{shown(path)} is a pack that was interrupted: finish it by the same convoy data pack, or remove it"
            )
        try:
            with reading(index), safe_open(index, "np") as file:
                document = json.loads((file.metadata() or {})["convoy.pack"])
            if document["version"] > VERSION:
                raise ConvoyError(f"{shown(path)} was packed by a later version of Convoy: use that, or pack again")
            pack = cls.model_validate(document | {"path": path})
            if pack.splits not in SPLITS or any(name != Path(name).name for name in pack.shards):
                raise ValueError
        except ConvoyError:
            raise
        except (SafetensorError, KeyError, ValueError, TypeError, AttributeError):
            raise _damaged(index) from None
        if not to_verify and (faults := pack.wrong_shards()):
            raise ConvoyError(next(iter(faults.values())))
        return pack

    @property
    def splits(self) -> list[str]:
        return [split for split in self.statistics if not split.endswith(MASKS)]

    def __str__(self) -> str:
        return f"a pack of {self.name} ({self.format}; {self.options})"

    def wrong_shards(self) -> dict[str, str]:
        """A sentence for each shard that is missing or has another size than it was written with, by its name."""
        faults = {}
        for name, size in self.shards.items():
            try:
                with reading(self.path / name):
                    now = (self.path / name).stat().st_size
                if now != size:
                    raise ConvoyError(
                        f"{shown(self.path / name)} has {now:,} bytes instead of {size:,}: {PackedSource.mend}"
                    )
            except ConvoyError as error:
                faults[name] = str(error)
        return faults

    def arrays(self, split: str, *names: str) -> list[NDArray[Any]]:
        """Arrays of a split in the index: shard, offset, size, crc32, label, names, name_end; raises ConvoyError."""
        index = self.path / INDEX
        try:
            with reading(index), safe_open(index, "np") as file:
                arrays = {name: file.get_tensor(name) for name in (f"{split}.{key}" for key in names)}
        except SafetensorError:
            raise _damaged(index) from None
        for name, array in arrays.items():
            if array.ndim != 1 or array.dtype.kind not in "iuf" or zlib.crc32(array) != self.index.get(name):
                raise _damaged(index)
        return list(arrays.values())

    def source(self, split: str) -> PackedSource:
        *parts, label, names, ends = self.arrays(split, "shard", "offset", "size", "label", "names", "name_end")
        lengths, ends = {len(array) for array in (*parts, label, ends)}, ends.astype(np.int64)
        places = np.stack(parts, axis=1).astype(np.int64) if len(lengths) == 1 else np.zeros((0, 3), np.int64)
        if (
            not len(places)
            or places.min() < 0
            or places[:, 0].max() >= len(self.shards)
            or places[:, 2].max() > MAX_PICTURE_BYTES
            or np.diff(ends, prepend=0, append=names.size).min() < 0
        ):
            raise _damaged(self.path / INDEX)
        files = [self.path / shard_name(split, number) for number in range(len(self.shards))]
        source = PackedSource(files, SharedBytes([names.tobytes()], ends), places, label.astype(np.int64))
        source.contents = self.index.get(f"{split}.crc32", 0)
        if f"{split}.value" in self.index:
            (values,) = self.arrays(split, "value")
            if values.size != len(label) * len(self.classes):
                raise _damaged(self.path / INDEX)
            source.values = values.astype(np.float32).reshape(len(label), -1)
        if split + MASKS in self.statistics:
            source.masks = self.source(split + MASKS)
            if len(source.masks) != len(label):
                raise _damaged(self.path / INDEX)
        return source

    def contents(self) -> Opened:
        note = f"{shown(self.path)} is {self}; its samples come in the order of the original"
        first, *others = self.splits
        sources: dict[str, Source] = {"train": self.source(first), **{split: self.source(split) for split in others}}
        return Opened(self.name, self.classes, sources, (note,), self.task, self.options.short_side)


def _damaged(index: Path) -> ConvoyError:
    return ConvoyError(f"{shown(index)} is cut off or damaged: pack the data again")


def is_pack(path: Path) -> bool:
    """Whether a folder is a pack, finished or not."""
    return (path / INDEX).is_file() or (path / UNFINISHED).is_dir()


def index_file(arrays: dict[str, NDArray[Any]], document: dict[str, Any]) -> bytes:
    """The content of an index: its arrays with their checksums, and a document on the whole."""
    checksums = {name: zlib.crc32(array.data) for name, array in arrays.items()}
    return bytes(save(arrays, {"convoy.pack": json.dumps(document | {"index": checksums})}))


def damaged(pack: Pack, progress: Progress | None) -> Iterator[str]:
    """A sentence for each shard that is missing or of another size, and for each picture of the other shards whose
    bytes are not those that were packed; every picture is read."""
    faults = pack.wrong_shards()
    yield from faults.values()
    yield from (str(data) for *_, data in _pictures(pack, "reading", progress, faults) if isinstance(data, BadImage))


def _pictures(
    pack: Pack, what: str, progress: Progress | None, without: Collection[str] = ()
) -> Iterator[tuple[str, PackedSource, int, bytes | BadImage]]:
    """All pictures but those of some shards, by split and sample: their bytes, or why these are not what was packed."""
    num_done, total = 0, sum(sums.images for sums in pack.statistics.values())
    for split in pack.statistics:
        source, (crc32, shard) = pack.source(split), pack.arrays(split, "crc32", "shard")
        for sample in range(len(source)):
            if shard_name(split, shard[sample]) not in without:
                data: bytes | BadImage
                try:
                    data = source.read(sample)
                    if zlib.crc32(data) != crc32[sample]:
                        data = BadImage(source.place(sample), "is not what was packed: its checksum differs")
                except BadImage as bad:
                    data = bad
                yield split, source, sample, data
            num_done += 1
            if progress and (num_done % _EVERY == 0 or num_done == total):
                progress(what, num_done, total)


def unpack(pack: Pack, folder: Path, progress: Progress | None) -> int:
    """Write the pictures of a pack as a folder for each class, below one for each split, under their original names as
    far as possible; returns their number. Until all are written they lie in a new hidden folder, so that nobody takes a
    part for the whole."""
    if pack.task != "classification":
        raise ConvoyError(f"{shown(pack.path)} is of {pack.task}: only a pack of classes becomes folders again")
    was_there = folder.exists()
    if was_there and (not folder.is_dir() or any(folder.iterdir())):
        raise ConvoyError(f"{shown(folder)} is not an empty folder: name a new one")
    with writing(shown(folder), AGAIN):
        folder.mkdir(parents=True, exist_ok=True)
        # The name is random, so nobody can have put a link or a folder there before.
        unfinished = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=folder))
        try:
            num_done = _unpack(pack, unfinished, progress)
            for entry in unfinished.iterdir():
                entry.rename(folder / entry.name)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
            if not was_there:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()
    return num_done


def _unpack(pack: Pack, folder: Path, progress: Progress | None) -> int:
    below = {split: folder if len(pack.statistics) == 1 else folder / split for split in pack.statistics}
    folders, num_done = _distinct(pack.classes), 0
    for split, name in product(below.values(), folders):
        (split / name).mkdir(parents=True, exist_ok=True)
    file_names: set[tuple[Path, str]] = set()
    for split_name, source, sample, data in _pictures(pack, "unpacking", progress):
        try:
            if isinstance(data, BadImage):
                raise data
            image = open_picture(data, source.place(sample))
        except BadImage as bad:
            raise ConvoyError(f"{bad}: {source.mend}") from None
        stem, dot, end = source.name(sample).rpartition("/")[2].rpartition(".")
        if f".{end.lower()}" not in suffixes():
            stem, end = f"{stem}{dot}{end}", ""
        stem, suffix = _plain_name(stem), suffix_of(image, f".{end}")
        place = below[split_name] / folders[source.labels[sample]]
        while not stem or (place, f"{stem}{suffix}".lower()) in file_names:
            stem = f"{stem}-{sample:09d}".lstrip("-")
        file_names.add((place, f"{stem}{suffix}".lower()))
        (place / f"{stem}{suffix}").write_bytes(data)
        num_done += 1
    return num_done


def _distinct(classes: list[str]) -> list[str]:
    """A folder name for each class, with its number where two would be the same."""
    names = [_plain_name(name) for name in classes]
    if all(names) and len({name.lower() for name in names}) == len(names):
        return names
    return [f"{number:06d} {name}".strip() for number, name in enumerate(names)]


def _plain_name(name: str) -> str:
    """A name without anything that would make it a path, or hidden, or longer than file systems take."""
    plain = re.sub(r"[/\\\0]", "_", name).lstrip(".").strip()
    return plain.encode("utf-8", "replace")[:_LONGEST].decode("utf-8", "ignore")
