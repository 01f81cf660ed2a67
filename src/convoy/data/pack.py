"""`convoy data pack`: a data set as WebDataset tars that read sequentially, with an index."""

import io
import json
import os
import re
import shutil
import tarfile
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import reduce
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import save

from convoy.data.decode import BadImage, finish_picture, open_picture, suffix_of, upright_size
from convoy.data.files import Opened, keep_others_out, shown, writing
from convoy.data.packed import INDEX, PER_SHARD, SPLITS, UNFINISHED, VERSION, PackOptions, Statistics, shard_name
from convoy.data.processes import follow_parent, forkserver
from convoy.data.sources import EncodedSource, Progress, Source
from convoy.data.webdataset import CLASS_NAMES
from convoy.errors import ConvoyError, MachineError
from convoy.files import write_atomically, write_json, write_text

_TAR_BLOCK = 512
# Name of the folder of notes from the moment in which the pack is finished until it is removed.
_FINISHED = ".packed-"


class _Stored(NamedTuple):
    data: bytes
    suffix: str
    statistics: Statistics


class Known(NamedTuple):
    """The notes on a complete shard: offset, size and CRC-32 of its pictures, and their statistics."""

    number: int
    offsets: list[int]
    sizes: list[int]
    crc32: list[int]
    statistics: Statistics


def pack(
    kind: str,
    opened: Opened,
    folder: Path,
    options: PackOptions,
    progress: Progress | None,
    processes: int,
    tell: Callable[[str], object] = lambda sentence: None,
) -> dict[str, Statistics]:
    """Write a data set as a pack, or finish one that was interrupted; returns the statistics of each split. Raises
    ConvoyError for a picture that cannot be read, or a folder that holds something else; MachineError where a process
    died."""
    sources = [opened.train, opened.test] if opened.test is not None else [opened.train]
    splits = dict(zip(SPLITS[0] if len(sources) == 2 else SPLITS[1], sources, strict=True))
    what = {
        "version": VERSION,
        "name": opened.name,
        "format": kind,
        "options": asdict(options),
        "classes": opened.classes,
        "splits": {name: _known_again(source) for name, source in splits.items()},
    }
    with _begun(folder, what):
        shards = [
            _Shard(split, number, range(start, min(start + PER_SHARD, len(source))))
            for split, source in splits.items()
            for number, start in enumerate(range(0, len(source), PER_SHARD))
        ]
        notes = _write_shards(folder, splits, shards, options, progress, processes, tell)
        write_text(folder / CLASS_NAMES, "".join(f"{name}\n" for name in opened.classes))
        statistics: dict[str, Statistics] = {}
        arrays: dict[str, NDArray[Any]] = {}
        for split, source in splits.items():
            parts = [notes[shard] for shard in shards if shard.split == split]
            statistics[split] = reduce(Statistics.__add__, (item.statistics for item in parts), Statistics())
            arrays |= index_arrays(split, source, parts)
        document = what | {
            "statistics": {split: asdict(item) for split, item in statistics.items()},
            "shards": {shard.name: (folder / shard.name).stat().st_size for shard in shards},
        }
        write_atomically(folder / INDEX, lambda path: path.write_bytes(index_file(arrays, document)))
    return statistics


def _known_again(source: Source) -> dict[str, Any]:
    """The marks by which an interrupted pack recognises its original: not sizes, as a picture may have been mended."""
    return {key: value for key, value in source.fingerprint().items() if key != "sizes"}


@contextmanager
def _begun(folder: Path, what: dict[str, Any]) -> Iterator[None]:
    """A folder in which nobody else packs, and nothing else is packed; raises ConvoyError where that is not so."""
    unfinished = folder / UNFINISHED
    if folder.exists() and not folder.is_dir():
        raise ConvoyError(f"{shown(folder)} is a file: name a folder for the pack")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        try:
            keep_others_out(lock, f"another process packs into {shown(folder)}: wait for it, or end it")
            if unfinished.is_symlink():
                raise ConvoyError(f"{shown(unfinished)} is a link, not the folder of an unfinished pack: remove it")
            if not unfinished.exists():
                if (folder / INDEX).exists():
                    raise ConvoyError(f"{shown(folder)} is a finished pack: remove it, or name another folder")
                if any(folder.iterdir()):
                    raise ConvoyError(f"{shown(folder)} is not empty: name a new folder for the pack")
                unfinished.mkdir()
            _go_on(folder, unfinished, what)
            yield
            finished = folder / f"{_FINISHED}{uuid.uuid4().hex}"
            unfinished.rename(finished)  # at once, where a removal may stop halfway
        finally:
            os.close(lock)
    shutil.rmtree(finished, ignore_errors=True)


_HALF_WRITTEN = re.compile(r"\.(\w+-\d{6}\.tar|classes\.txt|index\.safetensors)\.\d+\.tmp")
_DIFFERENCES = {"options": "other options", "splits": "other pictures, names or labels", "classes": "other classes"}


def _go_on(folder: Path, unfinished: Path, what: dict[str, Any]) -> None:
    """Refuse what was begun as something else, and remove what was half written."""
    begun, plan = unfinished / "what.json", json.loads(json.dumps(what))
    if begun.exists():
        try:
            old_plan = dict(json.loads(begun.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            raise ConvoyError(
                f"{shown(folder)} holds an unfinished pack of something unknown ({shown(begun)} is damaged): remove it"
            ) from None
        if differ := " and ".join(
            _DIFFERENCES.get(key, f"another {key}") for key in plan if old_plan.get(key) != plan[key]
        ):
            begun_with = PackOptions(**old_plan["options"]) if old_plan.get("options") != plan["options"] else None
            reason = differ if begun_with is None else f"{differ}: it was begun with {begun_with}"
            raise ConvoyError(
                f"{shown(folder)} holds an unfinished pack of something else ({reason}): finish it as it was begun, or "
                "remove it"
            )
    elif any(entry.suffix != ".tmp" for entry in unfinished.iterdir()):
        raise ConvoyError(f"{shown(unfinished)} does not say what is packed there (it has no what.json): remove it")
    else:
        write_json(begun, what)
    for entry in folder.iterdir():
        if _HALF_WRITTEN.fullmatch(entry.name):
            entry.unlink()


@dataclass(frozen=True)
class _Shard:
    """Consecutive samples of a split."""

    split: str
    number: int
    samples: range

    @property
    def name(self) -> str:
        return shard_name(self.split, self.number)

    @property
    def places(self) -> slice:
        return slice(self.samples.start, self.samples.stop)

    def _notes(self, folder: Path) -> Path:
        return folder / UNFINISHED / f"{self.name}.json"

    def known(self, folder: Path) -> Known | None:
        """The notes on a complete shard; None where it or its notes are incomplete or damaged."""
        if not (self._notes(folder).exists() and (folder / self.name).exists()):
            return None
        try:
            checksum, _, text = self._notes(folder).read_bytes().partition(b" ")
            if int(checksum) != zlib.crc32(text):
                return None
            offsets, sizes, sums, statistics = json.loads(text)
        except (TypeError, ValueError):
            return None
        statistics |= {key: tuple(statistics[key]) for key in ("sums", "squares")}
        return Known(self.number, offsets, sizes, sums, Statistics(**statistics))

    def write(self, folder: Path, source: Source, labels: NDArray[np.int64], options: PackOptions) -> Known:
        """Write the tar, and then the notes on it. Raises BadImage."""
        offsets, sizes, sums = [], [], []
        statistics = Statistics()

        def fill(path: Path) -> None:
            nonlocal statistics
            with path.open("wb") as file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                for sample, label in zip(self.samples, labels.tolist(), strict=True):
                    stored = packed_picture(source, sample, options)
                    offsets.append(tar.offset + _TAR_BLOCK)
                    sizes.append(len(stored.data))
                    sums.append(zlib.crc32(stored.data))
                    statistics += stored.statistics
                    _add(tar, f"{sample:09d}{stored.suffix}", stored.data)
                    _add(tar, f"{sample:09d}.cls", str(label).encode())

        write_atomically(folder / self.name, fill)
        text = json.dumps([offsets, sizes, sums, asdict(statistics)])
        write_text(self._notes(folder), f"{zlib.crc32(text.encode())} {text}")
        return Known(self.number, offsets, sizes, sums, statistics)


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
) -> dict[_Shard, Known]:
    notes = {shard: note for shard in shards if (note := shard.known(folder)) is not None}
    total = sum(len(source) for source in splits.values())
    done = sum(len(shard.samples) for shard in notes)
    if done:
        tell(f"going on after {done:,} of {total:,} pictures")
    if progress:
        progress("packing", done, total)
    # A process for each shard, forked in milliseconds: a pool's queues have semaphores, which lie in /dev/shm.
    context, queue = forkserver(__name__), deque(shard for shard in shards if shard not in notes)
    writers: dict[connection.Connection, tuple[_Shard, BaseProcess]] = {}
    try:
        while queue or writers:
            while queue and len(writers) < processes:
                shard = queue.popleft()
                receiver, sender = context.Pipe(duplex=False)
                source = splits[shard.split]
                arguments = sender, shard, folder, source, source.labels[shard.places], options
                writer = context.Process(target=_write, args=arguments, daemon=True)
                writer.start()
                sender.close()
                writers[receiver] = shard, writer
            for result in connection.wait(list(writers)):
                assert isinstance(result, connection.Connection)
                answer: Known | Exception = result.recv()
                if isinstance(answer, Exception):
                    raise answer
                shard, process = writers.pop(result)
                process.join()
                notes[shard] = answer
                done += len(shard.samples)
                if progress:
                    progress("packing", done, total)
    except BadImage as bad:
        raise ConvoyError(
            f"{bad}: mend it, and pack again to go on; or remove it, and pack into a new folder (convoy data PATH "
            "--check names all that cannot be read)"
        ) from None
    except KeyboardInterrupt:
        tell(f"the same command goes on after {done:,} of {total:,} pictures")
        raise
    except EOFError as error:
        raise MachineError(
            f"a process that packs died, perhaps for lack of memory: run the same again to go on in {shown(folder)}"
        ) from error
    finally:
        for _, process in writers.values():
            process.kill()  # at once, not after the shard that it writes
            process.join()
    return notes


def _write(
    sender: connection.Connection,
    shard: _Shard,
    folder: Path,
    source: Source,
    labels: NDArray[np.int64],
    options: PackOptions,
) -> None:
    follow_parent()
    answer: Known | Exception
    try:
        answer = shard.write(folder, source, labels, options)
    except Exception as error:
        answer = error
    sender.send(answer)


def packed_picture(source: Source, sample: int, options: PackOptions) -> _Stored:
    """A picture as the pack keeps it, unchanged where `options` ask for nothing else. Raises BadImage."""
    name = source.name(sample)
    data = b""
    if isinstance(source, EncodedSource):
        data = source.read(sample)
        image = open_picture(data, name)
    else:
        image = source.load(sample)
    size = upright_size(image)
    short = min(size)
    smaller = options.short_side is not None and short > options.short_side
    width, height = size
    if smaller:
        assert options.short_side is not None
        width, height = (max(round(side * options.short_side / short), options.short_side) for side in size)
    image = finish_picture(image, name, (2 * width, 2 * height) if smaller else None)
    if smaller:
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    if options.raw:
        suffix, stored = ".ppm", _plain(image)
    elif smaller:
        suffix, stored = ".jpg", _encoded(image, "JPEG", quality=options.quality)
    elif data:
        suffix, stored = suffix_of(image), data
    else:
        suffix, stored = ".png", _encoded(image, "PNG")
    counts = np.array(image.histogram(), np.int64).reshape(-1, 256) * np.ones((3 // len(image.getbands()), 1), np.int64)
    values = np.arange(256)
    sums, squares = (tuple((counts @ values**power).tolist()) for power in (1, 2))
    return _Stored(stored, suffix, Statistics(1, len(data), len(stored), width * height, sums, squares))


def _plain(image: Image.Image) -> bytes:
    """PPM, or PGM for grey: a line of text, then the pixels."""
    kind = 5 if image.mode == "L" else 6
    return b"P%d\n%d %d\n255\n" % (kind, image.width, image.height) + image.tobytes()


def _encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    with io.BytesIO() as file:
        image.save(file, kind, **options)
        return file.getvalue()


def index_arrays(split: str, source: Source, notes: list[Known]) -> dict[str, NDArray[Any]]:
    """The arrays of a split: where its pictures lie, their labels, checksums and names."""
    names = [source.name(sample).encode("utf-8", "surrogatepass") for sample in range(len(source))]
    shards = np.repeat([shard.number for shard in notes], [len(shard.offsets) for shard in notes])
    return {
        f"{split}.shard": shards.astype(np.int32),
        f"{split}.offset": np.concatenate([shard.offsets for shard in notes]).astype(np.int64),
        f"{split}.size": np.concatenate([shard.sizes for shard in notes]).astype(np.int32),
        f"{split}.crc32": np.concatenate([shard.crc32 for shard in notes]).astype(np.uint32),
        f"{split}.label": source.labels.astype(np.int32),
        f"{split}.name_end": np.cumsum([len(name) for name in names], dtype=np.int64),
        f"{split}.names": np.frombuffer(b"".join(names), np.uint8),
    }


def index_file(arrays: dict[str, NDArray[Any]], document: dict[str, Any]) -> bytes:
    """The content of an index: its arrays with their checksums, and a document on the whole."""
    checksums = {name: zlib.crc32(array.data) for name, array in arrays.items()}
    return bytes(save(arrays, {"convoy.pack": json.dumps(document | {"index": checksums})}))
