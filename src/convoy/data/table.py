"""`labels.csv`: pictures by their paths, each with a class, several labels, numbers, or a mask.

Columns go by their names in the first row (`path`, `label`, and `split` where there is one; or, in the place of
`label`, any names of numbers), or without such by position: path, label, split.
"""

import csv
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convoy.data.config import DataConfig
from convoy.data.decode import suffixes
from convoy.data.folder import FolderSource
from convoy.data.masks import check_masks
from convoy.data.sources import SPLIT_NAMES, Opened, Progress, Source, reading, shown, split_of
from convoy.errors import ConvoyError
from convoy.terminal import brief

TABLE = "labels.csv"  # in a folder
SEPARATOR = ";"  # of the labels of a picture
_PATHS = ("path", "image", "file", "filename", "file_name", "picture")
_LABELS = ("label", "labels", "class", "mask", "target")
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class _Row:
    line: int
    path: str
    labels: tuple[str, ...]  # one, or one for each column of numbers
    split: str  # train, val, test or nothing


def find_table(path: Path) -> bool:
    """Whether a folder holds a table whose first row names a column of paths."""
    table = path / TABLE
    if not table.is_file():
        return False
    with reading(table), table.open(encoding="utf-8-sig", errors="replace") as file:
        return not {name.strip().lower() for name in file.readline(1000).split(",")}.isdisjoint(_PATHS)


def open_table(path: Path, config: DataConfig, progress: Progress | None, task: str = "auto") -> Opened:
    """The pictures of a table, or of a folder that holds one. A ConvoyError names the first row that cannot be."""
    table = path if path.is_file() else path / TABLE
    columns, rows = _rows(table)
    kind = _kind(table, columns, rows) if task == "auto" else task
    root = table.parent
    first_rows = dict[Path, _Row]()
    for row in rows:
        if (other := first_rows.setdefault(root / row.path, row)).split != row.split:
            raise ConvoyError(
                f"{_place(table, row)}: {brief(row.path)!r} is in {row.split}, and by line {other.line} in "
                f"{other.split}: take one of them out"
            )
        for name in (row.path, row.labels[0]) if kind == "segmentation" else (row.path,):
            if not (root / name).is_file():
                where = f"paths are relative to {shown(root)}"
                raise ConvoyError(f"{_place(table, row)}: {brief(name)!r} is missing: {where}")
    names = _names(table, kind, columns, rows, config)
    splits = {split: [row for row in rows if row.split == word] for split, word in SPLIT_NAMES.items()}
    train, *held_out = splits.values()
    for part in filter(None, held_out):
        _check_classes(table, kind, train, part)
    sources: dict[str, Source] = {split: _source(root, kind, names, part) for split, part in splits.items() if part}
    if kind == "segmentation":
        checked = (check_masks(one, config.classes, config.ignore_index, progress) for one in sources.values())
        found = set().union(*checked)
        number = max(found, default=0) + 1
        if not names and (number < 2 or not {*range(number)} <= found | {config.ignore_index}):
            there = ", ".join(map(str, sorted(found))) or "none"
            raise ConvoyError(
                f"{shown(table)}: the values in the masks are {there}, beside {config.ignore_index}, which counts "
                "nowhere, but classes are numbered 0, 1, 2, …: write them so, or name all in data.classes"
            )
        names = names or [str(value) for value in range(number)]
    return Opened(table.parent.name or table.stem, names, sources, task=kind)


def _rows(table: Path) -> tuple[tuple[str, ...], list[_Row]]:
    """The names of the columns of labels, and the rows; those without a split are to train on."""
    try:
        with reading(table), table.open(encoding="utf-8-sig", newline="") as file:
            lines = [(number, line) for number, line in enumerate(csv.reader(file), 1) if any(line)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConvoyError(f"{shown(table)} is no CSV file in UTF-8 ({error}): save it as one") from None
    header = [name.strip().lower() for name in lines[0][1]] if lines else []
    path_column = next((header.index(name) for name in _PATHS if name in header), None)
    split_column: int | None
    names: tuple[str, ...] = ("label",)
    if path_column is not None:
        lines, split_column = lines[1:], header.index("split") if "split" in header else None
        columns = [place for place in range(len(header)) if place not in (path_column, split_column)]
        columns = [place for place in columns if header[place] in _LABELS][:1] or columns
        names = tuple(header[place] for place in columns)
    else:
        path_column, columns, split_column = 0, [1], 2 if len(header) > 2 else None
    if not lines or not columns:
        raise ConvoyError(f"{shown(table)} has no rows of paths and labels: write path,label and, if any, split")
    rows = []
    for number, line in lines:
        if len(line) <= max(path_column, *columns):
            raise ConvoyError(f"{shown(table)}, line {number} has {len(line)} columns: a path and its label are needed")
        word = line[split_column].strip() if split_column is not None and split_column < len(line) else ""
        split = split_of(word) if word else "train"
        if split is None:
            raise ConvoyError(f"{shown(table)}, line {number}: {brief(word)!r} is no split: write train, val or test")
        rows.append(_Row(number, line[path_column].strip(), tuple(line[place].strip() for place in columns), split))
    if not any(row.split == "train" for row in rows):
        raise ConvoyError(f"{shown(table)} has no row to train on: write train into its column split")
    return names, rows


def _kind(table: Path, columns: Sequence[str], rows: Sequence[_Row]) -> str:
    """The task that the labels are of; a ConvoyError where some are of one kind and some of another."""
    if len(columns) > 1:
        return "regression"
    kinds = dict[str, _Row]()
    for row in rows:
        kinds.setdefault(_kind_of(row.labels[0]), row)
    if "list" in kinds and not {"number", "mask"} & set(kinds):
        return "multi-label"
    if set(kinds) <= {"number", "whole"}:
        return "regression" if "number" in kinds else "classification"
    if len(kinds) > 1:
        (kind, row), (other, other_row), *_ = kinds.items()
        raise ConvoyError(
            f"{shown(table)} mixes kinds of labels: {brief(row.labels[0])!r} in line {row.line} is {_WORDS[kind]}, "
            f"{brief(other_row.labels[0])!r} in line {other_row.line} {_WORDS[other]}: mend one, or say what they are "
            "by --task"
        )
    return {"mask": "segmentation", "text": "classification"}[next(iter(kinds))]


_WORDS = {"number": "a number", "whole": "a whole number", "mask": "a picture", "text": "a name", "list": "a list"}


def _kind_of(label: str) -> str:
    if SEPARATOR in label or not label:
        return "list"
    if Path(label).suffix.lower() in suffixes():
        return "mask"
    try:
        return "whole" if int(label) >= 0 else "number"
    except ValueError:
        return "text" if _number(label) is None else "number"


def _number(label: str) -> float | None:
    try:
        number = float(label)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _labels(row: _Row, kind: str) -> list[str]:
    """The classes that a row names."""
    if kind == "multi-label":
        return [label.strip() for label in row.labels[0].split(SEPARATOR) if label.strip()]
    return [row.labels[0]]


def _names(table: Path, kind: str, columns: Sequence[str], rows: Sequence[_Row], config: DataConfig) -> list[str]:
    """The names of the network's outputs, in their order; none yet for masks whose classes have no names."""
    if kind in ("classification", "multi-label"):
        labels = {label: row for row in reversed(rows) for label in _labels(row, kind)}
        if kind == "classification" and "" in labels:
            raise ConvoyError(f"{_place(table, labels[''])} has no label: write one, or take the row out")
        if config.classes is not None:
            for label in (label for label in labels if label not in config.classes):
                raise ConvoyError(f"{_place(table, labels[label])}: {brief(label)!r} is none of data.classes")
            return list(config.classes)
        if not labels:
            raise ConvoyError(f"{shown(table)} has no labels: write them behind the paths")
        digits = {label: label.lstrip("0") for label in labels if label.isdecimal()}  # int() takes 4,300 of them
        return sorted(labels, key=lambda x: (0, len(digits[x]), digits[x]) if x in digits else (1, 0, x))
    if kind == "segmentation":
        return list(config.classes or ())
    for row in rows:
        for label in row.labels:
            number = _number(label)
            if number is None or abs(number) > _LARGEST:
                what = "no number" if number is None else f"beyond {_LARGEST:.3g}, the largest number of float32"
                raise ConvoyError(f"{_place(table, row)}: {brief(label)!r} is {what}, as regression needs: mend it")
    names = list(config.classes or columns)
    if len(names) != len(columns):
        raise ConvoyError(f"data.classes names {len(names)} outputs, but {shown(table)} has {len(columns)}")
    return names


def _check_classes(table: Path, kind: str, train: Sequence[_Row], test: Sequence[_Row]) -> None:
    """Refuse a class that only one split has."""
    if kind not in ("classification", "multi-label"):
        return
    sides = [{label: row for row in reversed(part) for label in _labels(row, kind)} for part in (train, test)]
    for (here, there), word in ((sides, "held-out"), (sides[::-1], "training")):
        for label in here:
            if label not in there:
                raise ConvoyError(
                    f"{_place(table, here[label])}: no {word} row has the class {brief(label)!r}: give both splits "
                    "rows of it, or take these out"
                )


def _source(root: Path, kind: str, names: Sequence[str], rows: Sequence[_Row]) -> FolderSource:
    def files(paths: Iterable[str]) -> list[str]:
        return [os.path.join(root, path) for path in paths]  # noqa: PTH118 (names are to stay as they are written)

    numbers = {name: number for number, name in enumerate(names)}
    labels = np.zeros(len(rows), np.int64)
    if kind == "classification":
        labels = np.array([numbers[row.labels[0]] for row in rows], np.int64)
    source = FolderSource(root, files(row.path for row in rows), labels)
    if kind == "multi-label":
        source.values = np.zeros((len(rows), len(names)), np.float32)
        for place, row in enumerate(rows):
            source.values[place, [numbers[label] for label in _labels(row, kind)]] = 1
    elif kind == "regression":
        source.values = np.array([[float(label) for label in row.labels] for row in rows], np.float32)
    elif kind == "segmentation":
        source.masks = FolderSource(root, files(row.labels[0] for row in rows), labels)
    return source


def _place(table: Path, row: _Row) -> str:
    return f"{shown(table)}, line {row.line}"
