"""Reading the files of a data set: which split a file belongs to, labels and classes, and errors that name the file."""

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from convoy.data.config import DataConfig
from convoy.data.sources import Source
from convoy.errors import ConvoyError
from convoy.terminal import printable

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
_WORD_ENDS = re.compile(r"(?<=[a-z])(?=[A-Z])|[\W\d_]+")


@dataclass
class Opened:
    """The sources in the files of a format."""

    name: str
    classes: list[str]  # by label; empty where the format only numbers them
    train: Source
    test: Source | None = None
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    short_side: int | None = field(default=None, kw_only=True)


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


def split_of(name: str) -> str | None:
    """train, val or test, by the words of a name in any case, alone or beside a noun, as in `seg_train` and `TestSet`;
    None for a name without such a word, or with words of two splits."""
    words = _WORD_ENDS.split(re.sub(r"(?i)(h[oe]ld)[\W_]+(?=out)", r"\1", name))
    splits = {_SPLITS[word.lower()] for word in words if word.lower() in _SPLITS}
    return splits.pop() if len(splits) == 1 else None


def shards(path: Path, suffix: str, config: DataConfig) -> tuple[list[Path], list[Path]]:
    """The files with this suffix to train on and to test on, sorted by name, as the recipe or their names say; raises
    ConvoyError if unclear. Files of `val` are preferred to those of `test`, whose labels are often withheld."""
    if path.is_file():
        return [path], []
    paths = sorted(file for file in path.rglob(f"*{suffix}") if file.is_file() and not file.name.startswith("."))
    if not paths:
        raise ConvoyError(f"{shown(path)} holds no {suffix} file: set data.path to the folder of the shards")
    if config.train is not None:
        patterns = (config.train, config.test)
        groups = [[entry for entry in paths if of and _matches(entry.relative_to(path), of)] for of in patterns]
        for key, pattern, files in zip(("train", "test"), patterns, groups, strict=True):
            if pattern and not files:
                raise ConvoyError(f"data.{key}={pattern} is no {suffix} file below {shown(path)}")
        return groups[0], groups[1]
    splits: dict[str, list[Path]] = {}
    for file in paths:
        parts = map(split_of, reversed(file.relative_to(path).parts))
        splits.setdefault(next(filter(None, parts), "none"), []).append(file)
    if len(splits) == 1 and "none" in splits:
        return paths, []
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
    return splits["train"], splits.get("val") or splits.get("test", [])


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
    for source in filter(None, (contents.train, contents.test)):
        bad_samples = np.flatnonzero((source.labels < 0) | (source.labels >= len(contents.classes)))
        if len(bad_samples):
            sample = int(bad_samples[0])
            withheld = " (-1 marks a withheld label: use the validation split)" if source.labels[sample] == -1 else ""
            raise ConvoyError(
                f"{source.name(sample)} in {shown(path)} has label {source.labels[sample]}, out of range: the classes "
                f"to train on are 0 to {len(contents.classes) - 1}{withheld}"
            )
