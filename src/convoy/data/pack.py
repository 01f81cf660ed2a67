"""`convoy data pack`: a data set as WebDataset tars that read sequentially, with an index."""

import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from convoy.data.decode import BadImage, finish_picture, open_picture, suffix_of, upright_size
from convoy.data.packed import (
    AGAIN,
    INDEX,
    MASKS,
    PER_SHARD,
    UNFINISHED,
    VERSION,
    WHOLE,
    PackOptions,
    Statistics,
    index_file,
    shard_name,
)
from convoy.data.processes import Pool, SharedArray
from convoy.data.sources import EncodedSource, Opened, Progress, Source, shown
from convoy.data.webdataset import CLASS_NAMES
from convoy.errors import ConvoyError
from convoy.files import write_atomically, write_text, writing

_TAR_BLOCK = 512


def pack(
    kind: str,
    contents: Opened,
    folder: Path,
    options: PackOptions,
    progress: Progress | None,
    processes: int,
    tell: Callable[[str], object] = lambda sentence: None,
) -> dict[str, Statistics]:
    """Write a data set as a pack, or finish one that was interrupted; returns the statistics of each split. Raises
    ConvoyError for a picture that cannot be read, or a folder that holds something else; MachineError where a process
    died."""
    splits = {WHOLE: contents.train} if len(contents.sources) == 1 else contents.sources
    masks = {f"{split}{MASKS}": source.masks for split, source in splits.items() if source.masks is not None}
    splits = {**splits, **masks}
    if contents.task == "segmentation" and options.short_side is not None:
        raise ConvoyError("--short-side would leave masks larger than their pictures: leave it out")
    what = {
        "version": VERSION,
        "name": contents.name,
        "format": kind,
        "options": asdict(options),
        "classes": contents.classes,
        **({"task": contents.task} if contents.task != "classification" else {}),
        # Marks by which the original is recognised: not sizes, as a picture may have been mended.
        "splits": {
            name: {key: value for key, value in source.fingerprint().items() if key != "sizes"}
            for name, source in splits.items()
        },
    }
    with _begun(folder, what) as notes_folder:
        shards = [
            _Shard(folder, notes_folder, split, number, range(start, min(start + PER_SHARD, len(source))))
            for split, source in splits.items()
            for number, start in enumerate(range(0, len(source), PER_SHARD))
        ]
        _write_shards(folder, splits, shards, options, progress, processes, tell)
        write_text(folder / CLASS_NAMES, "".join(f"{name}\n" for name in contents.classes))
        statistics: dict[str, Statistics] = {}
        arrays: dict[str, NDArray[Any]] = {}
        for split, source in splits.items():
            parts = [(shard.number, shard.notes()) for shard in shards if shard.split == split]
            notes = np.concatenate([rows for _, rows in parts if rows is not None])
            numbers = np.concatenate([np.full(len(rows), number) for number, rows in parts if rows is not None])
            arrays |= index_arrays(split, source, numbers, notes)
            _, size, _, original_size, pixels, *sums = notes.sum(axis=0).tolist()
            statistics[split] = Statistics(len(notes), original_size, size, pixels, tuple(sums[:3]), tuple(sums[3:]))
        document = what | {
            "statistics": {split: asdict(item) for split, item in statistics.items()},
            "shards": {shard.name: (folder / shard.name).stat().st_size for shard in shards},
        }
        write_atomically(folder / INDEX, lambda path: path.write_bytes(index_file(arrays, document)))
    return statistics


_HALF_WRITTEN = re.compile(r"\.(\w+-\d{6}\.tar|classes\.txt|index\.safetensors)\.\d+\.tmp")


@contextmanager
def _begun(folder: Path, what: dict[str, Any]) -> Iterator[Path]:
    """The folder of the notes on a pack in a folder where nobody else packs, and nothing else was begun; ConvoyError
    where that is not so. It is named by what is packed."""
    unfinished = folder / UNFINISHED
    notes = unfinished / hashlib.sha256(json.dumps(what).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    if folder.exists() and not folder.is_dir():
        raise ConvoyError(f"{shown(folder)} is a file: name a folder for the pack")
    with writing(shown(folder), AGAIN):
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConvoyError(f"another process packs into {shown(folder)}: wait for it, or end it") from None
            except OSError:  # a file system without locks, which keeps nobody out
                pass
            if unfinished.is_symlink():
                raise ConvoyError(f"{shown(unfinished)} is a link, not the folder of an unfinished pack: remove it")
            if (folder / INDEX).exists():
                raise ConvoyError(f"{shown(folder)} is a finished pack: remove it, or name another folder")
            if not unfinished.exists():
                if any(folder.iterdir()):
                    raise ConvoyError(f"{shown(folder)} is not empty: name a new folder for the pack")
                unfinished.mkdir()
            if any(entry != notes or entry.is_symlink() for entry in unfinished.iterdir()):
                raise ConvoyError(
                    f"{shown(folder)} holds an unfinished pack of something else: other pictures, names, labels or "
                    "options, or by another version of Convoy; finish it as it was begun, or remove it"
                )
            notes.mkdir(exist_ok=True)
            for entry in folder.iterdir():
                if _HALF_WRITTEN.fullmatch(entry.name):
                    entry.unlink()
            yield notes
        finally:
            os.close(lock)
    shutil.rmtree(unfinished, ignore_errors=True)


@dataclass(frozen=True)
class _Shard:
    """Consecutive samples of a split."""

    folder: Path
    notes_folder: Path
    split: str
    number: int
    samples: range

    @property
    def name(self) -> str:
        return shard_name(self.split, self.number)

    @property
    def _notes(self) -> Path:
        return self.notes_folder / f"{self.name}.json"

    def notes(self) -> NDArray[np.int64] | None:
        """What is known of the pictures of a complete shard, int64 [n, 11]: offset, size, CRC-32, bytes of the
        original's file, pixels, and their sums and squares by channel. None
        where it or its notes are incomplete or damaged."""
        if not (self._notes.exists() and (self.folder / self.name).exists()):
            return None
        try:
            checksum, _, text = self._notes.read_bytes().partition(b" ")
            notes = np.array(json.loads(text), np.int64)
        except (TypeError, ValueError):
            return None
        return notes if checksum == b"%d" % zlib.crc32(text) and notes.shape == (len(self.samples), 11) else None

    def write(self, source: Source, labels: NDArray[Any], options: PackOptions) -> None:
        """Write the tar, and then the notes on it. Raises BadImage."""
        notes: list[tuple[int, ...]] = []

        def fill(path: Path) -> None:
            with path.open("wb") as file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                for sample in self.samples:
                    data, suffix, counts = packed_picture(source, sample, options)
                    notes.append((tar.offset + _TAR_BLOCK, len(data), zlib.crc32(data), *counts))
                    _add(tar, f"{sample:09d}{suffix}", data)
                    target = labels[sample]
                    _add(tar, f"{sample:09d}.{'json' if target.ndim else 'cls'}", str(target.tolist()).encode())

        write_atomically(self.folder / self.name, fill)
        text = json.dumps(notes)
        write_text(self._notes, f"{zlib.crc32(text.encode())} {text}")


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _write_shards(
    folder: Path,
    splits: dict[str, Source],
    shards: list[_Shard],
    options: PackOptions,
    progress: Progress | None,
    processes: int,
    tell: Callable[[str], object],
) -> None:
    total = sum(len(source) for source in splits.values())
    queue = deque(number for number, shard in enumerate(shards) if shard.notes() is None)
    num_done = total - sum(len(shards[number].samples) for number in queue)
    if num_done:
        tell(f"going on after {num_done:,} of {total:,} pictures")
    if progress:
        progress("packing", num_done, total)
    labels = {
        split: SharedArray.of(source.labels if source.values is None else source.values)
        for split, source in splits.items()
    }
    mend = f"run the same again to go on in {shown(folder)}"
    pool = Pool("packs", mend, processes, _writer, shards, splits, labels, options)
    try:
        with closing(pool):
            pool.start(min(processes, len(queue)))
            while queue or pool.num_sent:
                room = min(len(queue), Pool.MOST_SENT - pool.num_sent)
                pool.send([(queue.popleft(), 0, 0, 0, 0) for _ in range(room)])
                for (number, *_), error in pool.receive():
                    if error is not None:
                        raise error
                    num_done += len(shards[number].samples)
                    if progress:
                        progress("packing", num_done, total)
    except BadImage as bad:
        raise ConvoyError(
            f"{bad}: mend it, and pack again to go on; or remove it, and pack into a new folder (convoy data PATH "
            "--check names all that cannot be read)"
        ) from None
    except KeyboardInterrupt:
        tell(f"the same command goes on after {num_done:,} of {total:,} pictures")
        raise


def _writer(
    shards: list[_Shard], splits: dict[str, Source], labels: dict[str, SharedArray], options: PackOptions
) -> Callable[..., None]:
    """In a worker: the function that writes a shard."""

    def write(number: int, *_: int) -> None:
        shard = shards[number]
        form = PackOptions() if shard.split.endswith(MASKS) else options
        shard.write(splits[shard.split], labels[shard.split].array, form)

    return write


def packed_picture(source: Source, sample: int, options: PackOptions) -> tuple[bytes, str, tuple[int, ...]]:
    """A picture as the pack keeps it, unchanged where `options` ask for nothing else; the end of its name; and the
    bytes of the original's file, pixels, and their sums and squares by channel. Raises BadImage."""
    name, side = source.name(sample), options.short_side
    data = source.read(sample) if isinstance(source, EncodedSource) else b""
    image = open_picture(data, name) if data else source.load(sample)
    size = width, height = upright_size(image)
    is_smaller = side is not None and min(size) > side
    if is_smaller:
        assert side is not None
        width, height = (max(round(length * side / min(size)), side) for length in size)
    image = finish_picture(image, name, (2 * width, 2 * height) if is_smaller else None)
    if is_smaller:
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    if options.raw:
        suffix, content = ".ppm", b"P%d\n%d %d\n255\n" % (5 if image.mode == "L" else 6, *image.size) + image.tobytes()
    elif is_smaller:
        suffix, content = ".jpg", _encoded(image, "JPEG", quality=options.quality)
    elif data:
        suffix, content = suffix_of(image), data
    else:
        suffix, content = ".png", _encoded(image, "PNG")
    histogram = np.array(image.histogram(), np.int64).reshape(-1, 256)
    histogram = histogram * np.ones((3 // len(histogram), 1), np.int64)
    sums, squares = ((histogram @ np.arange(256) ** power).tolist() for power in (1, 2))
    return content, suffix, (len(data), width * height, *sums, *squares)


def _encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    with io.BytesIO() as file:
        image.save(file, kind, **options)
        return file.getvalue()


def index_arrays(
    split: str, source: Source, shards: NDArray[np.int64], notes: NDArray[np.int64]
) -> dict[str, NDArray[Any]]:
    """The arrays of a split: where its pictures lie, their labels, checksums and names."""
    names = [source.name(sample).encode("utf-8", "surrogatepass") for sample in range(len(source))]
    offsets, sizes, checksums = notes[:, :3].T
    values = {} if source.values is None else {f"{split}.value": source.values.ravel()}
    return values | {
        f"{split}.shard": shards.astype(np.int32),
        f"{split}.offset": offsets.copy(),
        f"{split}.size": sizes.astype(np.int32),
        f"{split}.crc32": checksums.astype(np.uint32),
        f"{split}.label": source.labels.astype(np.int32),
        f"{split}.name_end": np.cumsum([len(name) for name in names], dtype=np.int64),
        f"{split}.names": np.frombuffer(b"".join(names), np.uint8),
    }
