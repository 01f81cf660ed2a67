"""What the formats share: a source of single pictures, how the files of one are read, which split a file belongs to,
labels and classes, and errors that name the file."""

import gzip
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from convoy.data.config import DataConfig
from convoy.data.decode import BadImage, finish_picture, open_picture
from convoy.data.processes import SharedArray
from convoy.errors import ConvoyError
from convoy.terminal import printable

Progress = Callable[[str, int, int], None]  # called with the name of long work, the number done, and the total


class Source(ABC):
    """Labelled pictures, numbered from 0."""

    labels: NDArray[np.int64]  # int64 [N]: classes, by which a split is stratified
    # What is learnt in their place: float32 [N, outputs], or masks that have the numbers of their pictures.
    values: NDArray[np.float32] | None = None
    masks: "EncodedSource | None" = None
    mend = "mend or remove it"  # what to do about one that is bad
    is_packed = False

    def __len__(self) -> int:
        return len(self.labels)

    def __getstate__(self) -> dict[str, Any]:
        """For a worker process, which needs no copy of the labels."""
        return self.__dict__ | {"labels": range(len(self)), "values": None}

    @abstractmethod
    def name(self, sample: int) -> str:
        """The sample's name in messages: a file name, or a file and a number in it."""

    def fingerprint(self) -> dict[str, Any]:
        """The marks by which the samples are recognised, as JSON: the number of `samples`, CRC-32 of their `labels` and
        `names` in their order, and either that of the `contents` of all, or the `sizes` of a few files."""
        targets = zlib.crc32(self.labels.astype(np.int64).data)
        if self.values is not None:
            targets = zlib.crc32(np.ascontiguousarray(self.values).data, targets)
        if self.masks is not None:
            targets = zlib.crc32(repr(self.masks.fingerprint()).encode(), targets)
        return {"samples": len(self), "labels": targets, **self._marks()}

    def _marks(self) -> dict[str, Any]:
        return {}

    def names(self, samples: NDArray[np.int64]) -> str:
        names, more = ", ".join(self.name(int(sample)) for sample in samples[:3]), len(samples) - 3
        return f"{names} and {more} more" if more > 0 else names

    @abstractmethod
    def open(self, sample: int) -> Image.Image:
        """The picture, perhaps not decoded yet: `decode.finish_picture` makes it L or RGB. Raises BadImage."""

    @abstractmethod
    def subset(self, samples: NDArray[np.int64]) -> "Source":
        """Some of the samples, in this order."""

    def taking_targets(self, source: "Source", samples: NDArray[np.int64] | slice = slice(None)) -> Self:
        """This source, with the targets of another one's samples."""
        self.values = None if source.values is None else source.values[samples]
        if source.masks is not None:
            self.masks = source.masks if isinstance(samples, slice) else source.masks.subset(samples)
        return self

    def load(self, sample: int) -> Image.Image:
        """The picture, 8 bit, mode L or RGB, upright. Raises BadImage."""
        return finish_picture(self.open(sample), self.name(sample))


class EncodedSource(Source):
    """Pictures as the bytes of picture files; a subclass says where the bytes are."""

    @abstractmethod
    def read(self, sample: int) -> bytes:
        """The bytes of a picture file. Raises BadImage."""

    def open(self, sample: int) -> Image.Image:
        return open_picture(self.read(sample), self.name(sample))

    def settled(self, progress: Progress | None) -> "EncodedSource":
        """The source to load from: this one, or a faster one with the same pictures."""
        return self

    def subset(self, samples: NDArray[np.int64]) -> "EncodedSource":
        return _Subset(self, samples).taking_targets(self, samples)


class _Subset(EncodedSource):
    def __init__(self, source: EncodedSource, samples: NDArray[np.int64]) -> None:
        self.source, self.mend, self.is_packed = source, source.mend, source.is_packed
        self._samples = SharedArray.of(samples)
        self.labels = source.labels[samples]

    def read(self, sample: int) -> bytes:
        return self.source.read(int(self._samples.array[sample]))

    def name(self, sample: int) -> str:
        return self.source.name(int(self._samples.array[sample]))


def spread(number: int, most: int = 64) -> list[int]:
    """At most `most` samples, evenly spread; by default as many as those whose sizes a fingerprint contains."""
    samples: list[int] = np.linspace(0, number - 1, min(most, number)).astype(int).tolist()
    return samples


def refusal(bad: BadImage, source: Source) -> ConvoyError:
    """The error for a picture that cannot be read when bad ones are not to be skipped."""
    skip = "set data.bad_images=skip (--bad-images skip); convoy data PATH --check names all of them"
    return ConvoyError(f"{bad}: {source.mend}, or {skip}")


@dataclass
class Opened:
    """The sources in the files of a format."""

    name: str
    classes: list[str]  # by label; empty where the format only numbers them
    sources: dict[str, Source]  # by split: train and, where there are such, validation and test, in this order
    notes: tuple[str, ...] = ()
    task: str = "classification"
    short_side: int | None = None

    @property
    def train(self) -> Source:
        return self.sources["train"]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn a failure of the operating system, or damage that gzip finds, into a ConvoyError that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise ConvoyError(f"{shown(path)} is missing: the data set is incomplete, fetch or unpack it again") from None
    except PermissionError:
        raise ConvoyError(f"{shown(path)} may not be read: give yourself permission (chmod u+r)") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        reason = printable(str(error))
        raise ConvoyError(f"{shown(path)} is cut off or is no gzip file ({reason}): fetch it again") from None
    except OSError as error:
        raise ConvoyError(f"{shown(path)} cannot be read: {error.strerror or error}") from None


def shown(path: Path) -> str:
    """A path for a message, control characters escaped."""
    return printable(str(path))


_WORDS = {
    "train": ("train", "training", "trn"),
    "val": ("val", "valid", "validation", "dev", "eval", "evaluation", "holdout", "heldout"),
    "test": ("test", "testing", "tst"),
}
_SPLITS = {
    word + of + plural: split
    for split, words in _WORDS.items()
    for word in words
    for of in ("", "data", "dataset", "set", "split", "image", "img", "picture", "photo", "sample", "folder", "dir")
    for plural in ("", "s")
}
SPLIT_NAMES = {"train": "train", "validation": "val", "test": "test"}
_WORD_ENDS = re.compile(r"(?<=[a-z])(?=[A-Z])|[\W\d_]+")


def split_of(name: str) -> str | None:
    """train, val or test, by the words of a name in any case, alone or beside a noun, as in `seg_train` and `TestSet`;
    None for a name without such a word, or with words of two splits."""
    words = _WORD_ENDS.split(re.sub(r"(?i)(h[oe]ld)[\W_]+(?=out)", r"\1", name))
    splits = {_SPLITS[word.lower()] for word in words if word.lower() in _SPLITS}
    return splits.pop() if len(splits) == 1 else None


def shards(path: Path, suffix: str, config: DataConfig) -> dict[str, list[Path]]:
    """The files with this suffix of each split, those to train on first, sorted by name, as the recipe or their names
    say; raises ConvoyError if unclear."""
    if path.is_file():
        return {"train": [path]}
    paths = sorted(file for file in path.rglob(f"*{suffix}") if file.is_file() and not file.name.startswith("."))
    if not paths:
        raise ConvoyError(f"{shown(path)} holds no {suffix} file: set data.path to the folder of the shards")
    if config.train is not None:
        patterns = (config.train, config.test)
        groups = [[entry for entry in paths if of and _matches(entry.relative_to(path), of)] for of in patterns]
        for key, pattern, files in zip(("train", "test"), patterns, groups, strict=True):
            if pattern and not files:
                raise ConvoyError(f"data.{key}={pattern} is no {suffix} file below {shown(path)}")
        return {"train": groups[0], **({"test": groups[1]} if groups[1] else {})}
    splits: dict[str, list[Path]] = {}
    for file in paths:
        parts = map(split_of, reversed(file.relative_to(path).parts))
        splits.setdefault(next(filter(None, parts), "none"), []).append(file)
    if len(splits) == 1 and "none" in splits:
        return {"train": paths}
    if "none" in splits:
        raise ConvoyError(
            f"{shown(splits['none'][0])} belongs to no split while other files of {shown(path)} do: "
            "put train, val or test into its name, or move it away, or name the files to train on (--set data.train=…)"
        )
    if "train" not in splits:
        raise ConvoyError(
            f"{shown(path)} has no {suffix} file for training: put train into the names of its training files, or name "
            "them (--set data.train=…)"
        )
    return {name: splits[key] for name, key in SPLIT_NAMES.items() if key in splits}


def _matches(file: Path, pattern: str) -> bool:
    """Whether a file, or a folder that it lies in, has this name; `.` is any."""
    return pattern == "." or any(part.match(pattern) for part in (file, *file.parents) if part.name)


_MAX_CLASSES = 1_000_000


def relabel(sources: Iterable[Source], classes: Sequence[str], all_classes: Sequence[str]) -> None:
    """Give each source once the labels of its `classes` in `all_classes`."""
    table = np.array([all_classes.index(name) for name in classes], np.int64)
    for source in {id(source): source for source in sources}.values():
        source.labels = table[source.labels]


def check_labels(path: Path, contents: Opened) -> None:
    """Name classes "0", "1", … up to the largest label to train on where the format names none, and refuse labels that
    are no class, as where the test alone has them; the ConvoyError names the first sample."""
    if not contents.classes:
        largest_label = int(contents.train.labels.max())
        if largest_label >= _MAX_CLASSES:
            raise ConvoyError(f"{shown(path)} has label {largest_label}, out of range: classes are numbered from 0")
        contents.classes = [str(number) for number in range(largest_label + 1)]
    if len(contents.sources) == 3 and (contents.sources["test"].labels == -1).all():
        del contents.sources["test"]
        contents.notes += ("left out: the test split, whose labels are withheld",)
    for source in contents.sources.values():
        bad_samples = np.flatnonzero((source.labels < 0) | (source.labels >= len(contents.classes)))
        if len(bad_samples):
            sample = int(bad_samples[0])
            withheld = " (-1 marks a withheld label: use the validation split)" if source.labels[sample] == -1 else ""
            raise ConvoyError(
                f"{source.name(sample)} in {shown(path)} has label {source.labels[sample]}, out of range: the classes "
                f"to train on are 0 to {len(contents.classes) - 1}{withheld}"
            )
