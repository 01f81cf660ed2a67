"""Parquet files in the Hugging Face image layout: a column of picture bytes and a column of labels.

The format knows nothing smaller than a row group, so reading one picture means reading a hundred or more. Files that
fit into a part of the memory are therefore read once; of larger ones, groups are read when they are needed.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from convoy.data.config import DataConfig
from convoy.data.decode import BadImage
from convoy.data.processes import SharedBytes
from convoy.data.sources import EncodedSource, Opened, Progress, Source, reading, shards, shown, spread
from convoy.errors import ConvoyError
from convoy.resources import host_memory
from convoy.terminal import printable

_SHARE_OF_MEMORY = 8
_MAX_BYTES = 4 * 2**30


class MemorySource(EncodedSource):
    """The pictures of another source, still encoded, in memory."""

    def __init__(self, source: EncodedSource, pieces: Iterable[bytes]) -> None:
        self._source = source
        self._pieces = SharedBytes(pieces)
        self.labels = source.labels

    def name(self, sample: int) -> str:
        return self._source.name(sample)

    def read(self, sample: int) -> bytes:
        return self._pieces[sample]


def fits_in_memory(num_bytes: int) -> bool:
    """Whether that many bytes may be kept: an eighth of the host's memory for all its ranks, 4 GiB at most."""
    ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE") or 1), 1)
    return num_bytes <= min(host_memory() // _SHARE_OF_MEMORY, _MAX_BYTES) // ranks


_NAMES = {
    "label": ("label", "labels", "fine_label", "class", "target"),
    "image": ("image", "images", "img", "picture", "photo"),
}


class ParquetSource(EncodedSource):
    """The rows of some parquet files; `column` is the path of the bytes in the schema, `sizes` are those of groups."""

    def __init__(
        self, files: list[Path], column: str, labels: NDArray[np.int64], groups: NDArray[np.int64], sizes: list[int]
    ) -> None:
        self._files = [str(file) for file in files]
        self._names = [printable(file.name) for file in files]
        self._column = column
        self.labels = labels
        # One row for each row group: file, group in the file, first row in the file, first sample.
        self._groups = groups
        self._sizes = sizes

    def _place(self, sample: int) -> tuple[int, int, int, int]:
        """File, row group, row in the group, row in the file."""
        index = int(np.searchsorted(self._groups[:, 3], sample, side="right")) - 1
        file, group, first_row, first_sample = self._groups[index].tolist()
        return file, group, sample - first_sample, first_row + sample - first_sample

    def _marks(self) -> dict[str, Any]:
        sizes = [self._sizes[group] for group in spread(len(self._sizes))]
        return {"names": zlib.crc32(self._groups.data), "sizes": sizes}  # rows have no names but their numbers

    def name(self, sample: int) -> str:
        file, _, _, row = self._place(sample)
        return f"{self._names[file]}, row {row}"

    def read(self, sample: int) -> bytes:
        file, group, row, _ = self._place(sample)
        try:
            value = _row_group(self._files[file], group, self._column)[row].as_py()
        except (pa.ArrowException, OSError, IndexError) as error:
            raise BadImage(self.name(sample), f"cannot be read ({printable(str(error))})") from None
        if value is None:
            raise BadImage(self.name(sample), "has no bytes in the file")
        return bytes(value)

    def settled(self, progress: Progress | None) -> EncodedSource:
        if not fits_in_memory(sum(self._sizes)):
            return self
        return MemorySource(self, self._everything(progress))

    def _everything(self, progress: Progress | None) -> Iterator[bytes]:
        num_done = 0
        for file, group, _, _ in self._groups.tolist():
            with _arrow(Path(self._files[file])):
                pictures = _row_group.__wrapped__(self._files[file], group, self._column)
            yield from (picture or b"" for picture in pictures.to_pylist())
            num_done += len(pictures)
            if progress:
                progress("reading parquet", num_done, len(self))


@lru_cache(maxsize=64)
def _file(path: str) -> pq.ParquetFile:
    return pq.ParquetFile(path)


@lru_cache(maxsize=1)
def _row_group(path: str, group: int, column: str) -> Any:
    table = _file(path).read_row_group(group, columns=[column], use_threads=False)
    array = table.column(0).combine_chunks()
    array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
    if len(array) != _file(path).metadata.row_group(group).num_rows:
        raise pa.ArrowInvalid("a row group has another number of rows than it says")
    return array.field(0) if pa.types.is_struct(array.type) else array


def open_parquet(path: Path, config: DataConfig) -> Opened:
    """One file, or a folder of files whose names say train, val or test. Raises ConvoyError where a file is damaged or
    differs from the rest, its columns are not clear, or a label occurs in the test alone."""
    splits = shards(path, ".parquet", config)
    with _arrow(splits["train"][0]):
        layout = _Layout.of(splits["train"][0], config)
    sources: dict[str, Source] = {split: layout.open(files) for split, files in splits.items()}
    classes = layout.classes or []
    if layout.text:
        names = np.unique(sources["train"].labels)
        for split, source in sources.items():
            if len(unknown := np.setdiff1d(source.labels, names)):
                raise ConvoyError(
                    f"{shown(splits[split][0])} has label {str(unknown[0])!r}, which no training sample has: mend "
                    "that, or go without its split by naming the files to train on (--set data.train=…)"
                )
            source.labels = np.searchsorted(names, source.labels).astype(np.int64)
        classes = names.tolist()
    return Opened(path.stem if path.is_file() else path.resolve().name, classes, sources, layout.notes)


@dataclass(frozen=True)
class _Layout:
    """Which columns of the first file are pictures and labels, and the names of the classes if its metadata says."""

    image: str
    label: str
    text: bool
    classes: list[str] | None
    schema: pa.Schema
    notes: tuple[str, ...]

    @classmethod
    def of(cls, file: Path, config: DataConfig) -> "_Layout":
        schema = pq.ParquetFile(file).schema_arrow
        features = _features(schema)
        kinds = {name: feature.get("_type") for name, feature in features.items()}
        labels = [name for name in schema.names if kinds.get(name) == "ClassLabel"]
        labels = labels or [name for name in schema.names if name.lower() in _NAMES["label"]]
        label = _column(file, "label", labels, schema, config)
        images = [name for name in schema.names if _bytes_path(schema, name) and name != label]
        images = [name for name in images if kinds.get(name) == "Image"] or images
        image = _column(file, "image", images, schema, config)
        path = _bytes_path(schema, image)
        if path is None:
            raise ConvoyError(f"column {printable(image)} of {shown(file)} holds no bytes of pictures: name another")
        kind = _plain(schema.field(label).type)
        text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if not (pa.types.is_integer(kind) or pa.types.is_boolean(kind) or text):
            raise ConvoyError(
                f"column {printable(label)} of {shown(file)} is {kind}, but a label is a whole number or a name"
            )
        notes = tuple(
            f"{printable(column)} is taken of the columns {', '.join(map(printable, names))}: data.{key}_column chooses"
            for key, column, names in (("image", image, images), ("label", label, labels))
            if len(names) > 1 and getattr(config, f"{key}_column") is None
        )
        names = features.get(label, {}).get("names")
        classes = [printable(str(name)) for name in names] if isinstance(names, list) and names else None
        return cls(path, label, text, classes, schema, notes)

    def open(self, files: list[Path]) -> ParquetSource:
        """The source, whose labels are still names where they are text."""
        labels: list[NDArray[Any]] = []
        groups: list[tuple[int, int, int, int]] = []
        sizes: list[int] = []
        for index, path in enumerate(files):
            with _arrow(path):
                file = pq.ParquetFile(path)
                if not file.schema_arrow.equals(self.schema):
                    columns = ", ".join(map(printable, file.schema_arrow.names))
                    raise ConvoyError(
                        f"{shown(path)} has other columns ({columns}) than the first file, or other types: keep one "
                        "data set in the folder, or name its files by data.train"
                    )
                column = file.read(columns=[self.label], use_threads=False).column(0)
                column = column.cast(_plain(column.type))
                if column.null_count:
                    raise ConvoyError(
                        f"{shown(path)} has {column.null_count} rows without a label: remove them, or name the files "
                        "to train on (--set data.train=…)"
                    )
                values = column.to_numpy()
                metas = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
                ends = np.cumsum([0, *(meta.num_rows for meta in metas)]).tolist()
                if ends[-1] != len(values):
                    raise pa.ArrowInvalid("row groups have other numbers of rows than the file")
                first = sum(map(len, labels))
                groups += [(index, group, row, first + row) for group, row in enumerate(ends[:-1])]
                sizes += [meta.total_byte_size for meta in metas]
                labels.append(np.array([*map(printable, values)], object) if self.text else values.astype(np.int64))
        if not sum(map(len, labels)):
            raise ConvoyError(f"{shown(files[0])} holds no rows: fetch it again")
        return ParquetSource(files, self.image, np.concatenate(labels), np.array(groups, np.int64), sizes)


@contextmanager
def _arrow(path: Path) -> Iterator[None]:
    """Turn a failure of Arrow or of the operating system into a ConvoyError that names the file."""
    with reading(path):
        try:
            yield
        except (pa.ArrowException, OSError, IndexError, UnicodeDecodeError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ConvoyError(f"{shown(path)} is no parquet file, or is cut off or damaged: fetch it again") from None


def _features(schema: pa.Schema) -> dict[str, Any]:
    """The columns' features by the schema's metadata; empty where it is missing or unreadable."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: value for name, value in features.items() if isinstance(value, dict)}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _column(file: Path, key: str, candidates: list[str], schema: pa.Schema, config: DataConfig) -> str:
    """The column that the recipe names, the only candidate in `found`, or the only one with a usual name; raises
    ConvoyError where that is not clear."""
    request, columns = getattr(config, f"{key}_column"), ", ".join(map(printable, schema.names))
    if request is not None and request not in schema.names:
        raise ConvoyError(f"data.{key}_column is no column of {shown(file)}: its columns are {columns}")
    matches = [request] if request is not None else candidates
    for names in ((key,), _NAMES[key]):
        if len(matches) > 1:
            matches = [name for name in matches if name.lower() in names] or matches
    if len(matches) == 1:
        return matches[0]
    if not matches:
        what = "pictures (binary, or a struct with `bytes`)" if key == "image" else f"labels ({', '.join(_NAMES[key])})"
        raise ConvoyError(
            f"{shown(file)} has no column of {what}: its columns are {columns}; set data.{key}_column to one"
        )
    listing = ", ".join(map(printable, matches))
    raise ConvoyError(
        f"{shown(file)} has several columns of {key}s: say which by --set data.{key}_column=…, of {listing}"
    )


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type of the values that a dictionary type encodes."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _bytes_path(schema: pa.Schema, name: str) -> str | None:
    kind = _plain(schema.field(name).type)
    if pa.types.is_struct(kind):
        return f"{name}.bytes" if any(field.name == "bytes" and _is_binary(field.type) for field in kind) else None
    return name if _is_binary(kind) else None


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
