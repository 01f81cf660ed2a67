"""`labels.csv`: pictures by their paths, each with a class, several labels, numbers, or a mask.

Columns go by their names in the first row (`path`, `label`, and `split` where there is one; or, in the place of
`label`, names of numbers, or of labels as 0 and 1), or without such by position: path, label, split.
"""

import csv
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
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
_PATHS = ("path", "image", "file", "filename", "filepath", "picture", "imagepath", "imagefile", "imagename")
_LABELS = ("label", "labels", "class", "mask", "target")
_INDEX = ("", "unnamed: 0")  # of the rows, as pandas writes it
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class _Row:
    line: int
    path: str
    labels: tuple[str, ...]  # its classes, its mask, or a number for each column; at first as they stand
    split: str  # train, val, test or nothing


def open_table(path: Path, config: DataConfig, progress: Progress | None, task: str = "auto", least: int = 2) -> Opened:
    """The pictures of a table, or a folder with one; masks have `least` classes. A ConvoyError names what is wrong."""
    table = path if path.is_file() else path / TABLE
    columns, rows = _rows(table)
    kind = _kind(table, columns, rows) if task == "auto" else task
    rows, root = _classed(table, kind, columns, rows), table.parent
    first_rows = dict[Path, _Row]()
    for row in rows:
        other = first_rows.setdefault(root / row.path, row)
        if (other.split, other.labels) != (row.split, row.labels):
            here, there = (f"in {one.split} as {brief(', '.join(one.labels))!r}" for one in (row, other))
            raise ConvoyError(
                f"{_place(table, row)}: {brief(row.path)!r} is {here}, and by line {other.line} {there}: take one of "
                "them out"
            )
        for name in (row.path, *row.labels) if kind == "segmentation" else (row.path,):
            if not os.path.isfile(root / name):  # noqa: PTH113 (pathlib raises where a name is too long)
                where = f"paths are relative to {shown(root)}"
                raise ConvoyError(f"{_place(table, row)}: {brief(name)!r} is missing: {where}")
    names = _names(table, kind, columns, rows, config)
    splits = {split: [row for row in rows if row.split == word] for split, word in SPLIT_NAMES.items()}
    train, *held_out = splits.values()
    for part in filter(None, held_out):
        _check_classes(table, kind, train, part)
    sources: dict[str, Source] = {split: _source(root, kind, names, part) for split, part in splits.items() if part}
    if kind == "segmentation":
        checked = [check_masks(one, config.classes, config.ignore_index, progress) for one in sources.values()]
        found, is_one = set().union(*checked), len(checked[0]) < least
        number = max(found, default=0) + 1
        if is_one or (not names and not {*range(number)} <= found | {config.ignore_index}):
            there = ", ".join(map(str, sorted(checked[0] if is_one else found))) or "none"
            raise ConvoyError(
                f"{shown(table)}: the values in the masks to train on are {there}, beside {config.ignore_index}, which "
                "counts nowhere, but classes are numbered 0, 1, 2, …: write them so"
                + (", as two or more are to be told apart" if is_one else ", or name all in data.classes")
            )
        names = names or [str(value) for value in range(number)]
    return Opened(table.parent.name or table.stem, names, sources, task=kind)


def _rows(table: Path) -> tuple[tuple[str, ...], list[_Row]]:
    """The names of the columns of labels, and the rows; those without a split are to train on."""
    try:
        with reading(table), table.open(encoding="utf-8-sig", newline="") as file:
            delimiter = ";" if "," not in (first := file.readline()) and ";" in first else ","
            file.seek(0)
            lines = [*filter(lambda line: any(line[1]), enumerate(csv.reader(file, delimiter=delimiter), 1))]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConvoyError(f"{shown(table)} is no CSV file in UTF-8 ({error}): save it as one") from None
    header = [name.strip() for name in lines[0][1]] if lines else []
    words = [name.lower().replace("_", "") for name in header]
    path_column = next((words.index(name) for name in _PATHS if name in words), None)
    split_column: int | None
    names: tuple[str, ...] = ("label",)
    if path_column is not None:
        lines, split_column = lines[1:], words.index("split") if "split" in words else None
        columns = [n for n, word in enumerate(words) if n not in (path_column, split_column) and word not in _INDEX]
        columns = [place for place in columns if words[place] in _LABELS][:1] or columns
        names = tuple(header[place] for place in columns)
    else:
        path_column, columns, split_column = 0, [1], 2 if len(header) > 2 else None
        if lines and not os.path.isfile(table.parent / header[0]):  # noqa: PTH113
            raise ConvoyError(
                f"{shown(table)} begins with {brief(', '.join(header))!r}, no picture that is there: begin it with "
                "path,label and, if any, split, or say what else is to be read, as by --set data.format=folder"
            )
    if not lines or not columns:
        raise ConvoyError(f"{shown(table)} has no rows of paths and labels: write path,label and, if any, split")
    rows = []
    for number, line in lines:
        if len(line) <= max(path_column, *columns) or any(line[len(header) :]):
            wanted = f"a path and its label are needed, and nothing beyond the {len(header)} of the first line"
            raise ConvoyError(f"{shown(table)}, line {number} has {len(line)} columns: {wanted}")
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
        return "multi-label" if all(_number(label) in (0, 1) for row in rows for label in row.labels) else "regression"
    kinds = dict[str, _Row]()
    for row in filter(lambda row: row.labels[0], rows):
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
    if SEPARATOR in label:
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


def _classed(table: Path, kind: str, columns: Sequence[str], rows: list[_Row]) -> list[_Row]:
    """The rows with the classes that they name."""

    def classes(row: _Row) -> Iterable[str]:
        if len(columns) == 1:
            return filter(None, map(str.strip, row.labels[0].split(SEPARATOR)))
        if bad := [label for label in row.labels if _number(label) not in (0, 1)]:
            raise ConvoyError(
                f"{_place(table, row)}: {brief(bad[0])!r} is not 0 or 1, as columns of labels are: mend it"
            )
        return compress(columns, map(float, row.labels))

    if kind == "multi-label":
        return [replace(row, labels=tuple(classes(row))) for row in rows]
    if len(columns) > 1 and kind != "regression":
        raise ConvoyError(
            f"{shown(table)}: {kind} takes one column, not {brief(', '.join(columns))}: call that one label"
        )
    return rows


def _names(table: Path, kind: str, columns: Sequence[str], rows: Sequence[_Row], config: DataConfig) -> list[str]:
    """The names of the network's outputs, in their order; none yet for masks whose classes have no names."""
    if kind in ("classification", "multi-label"):
        labels = {label: row for row in reversed(rows) for label in row.labels}
        if kind == "classification" and "" in labels:
            where = _place(table, labels[""])
            raise ConvoyError(f"{where} has no label: write one, or where there may be none, say --task multi-label")
        if config.classes is not None:
            for label in (label for label in labels if label not in config.classes):
                raise ConvoyError(f"{_place(table, labels[label])}: {brief(label)!r} is none of data.classes")
            return list(config.classes)
        if len(columns) > 1:
            return list(columns)
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
                advice = (
                    "mend it" if len(columns) == 1 else "mend it, or call the one column that is to be learnt label"
                )
                raise ConvoyError(f"{_place(table, row)}: {brief(label)!r} is {what}, as regression needs: {advice}")
    names = list(config.classes or columns)
    if len(names) != len(columns):
        raise ConvoyError(f"data.classes names {len(names)} outputs, but {shown(table)} has {len(columns)}")
    return names


def _check_classes(table: Path, kind: str, train: Sequence[_Row], test: Sequence[_Row]) -> None:
    """Refuse a class that only one split has."""
    if kind not in ("classification", "multi-label"):
        return
    sides = [{label: row for row in reversed(part) for label in row.labels} for part in (train, test)]
    for (here, there), word in ((sides, "held-out"), (sides[::-1], "training")):
        for label in here:
            if label not in there:
                raise ConvoyError(
                    f"{_place(table, here[label])}: no {word} row has the class {brief(label)!r}: give both splits "
                    "rows of it, or take these out"
                )


def _source(root: Path, kind: str, names: Sequence[str], rows: Sequence[_Row]) -> FolderSource:
    below = partial(os.path.join, root)  # names are to stay as they are written
    numbers = {name: number for number, name in enumerate(names)}
    labels = np.zeros(len(rows), np.int64)
    if kind == "classification":
        labels = np.array([numbers[row.labels[0]] for row in rows], np.int64)
    source = FolderSource(root, [below(row.path) for row in rows], labels)
    if kind == "multi-label":
        source.values = np.zeros((len(rows), len(names)), np.float32)
        for place, row in enumerate(rows):
            source.values[place, [numbers[label] for label in row.labels]] = 1
    elif kind == "regression":
        source.values = np.array([[float(label) for label in row.labels] for row in rows], np.float32)
    elif kind == "segmentation":
        source.masks = FolderSource(root, [below(row.labels[0]) for row in rows], labels)
    return source


def _place(table: Path, row: _Row) -> str:
    return f"{shown(table)}, line {row.line}"
