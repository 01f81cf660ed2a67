"""Reads `metrics.jsonl`: one checked object a line, and one history even where a resumed run repeats itself."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from convoy.errors import ConvoyError
from convoy.training.records import MetricsLine


@dataclass(frozen=True)
class Metrics:
    """The history of a run. `cut` says that the last line was half written, as after a kill, and left out."""

    train: list[MetricsLine] = field(default_factory=list)
    test: list[MetricsLine] = field(default_factory=list)
    raw: bytes = b""
    cut: bool = False


def column(lines: Iterable[MetricsLine], name: str) -> np.ndarray:
    """The values `name` of the lines as float64, NaN where there is none."""
    values = [getattr(line, name) for line in lines]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def read_metrics(path: Path) -> Metrics:
    """The history in `path`; empty if there is no such file.

    Raises ConvoyError naming file and line where a line is no object of the schema. A last line that was cut off in
    the middle of writing is no error: it is left out, and `cut` says so.
    """
    if not path.exists():
        return Metrics()
    raw = path.read_bytes()
    rows = raw.split(b"\n")
    cut = False
    lines: list[MetricsLine] = []
    for number, row in enumerate(rows, start=1):
        if not row.strip():
            continue
        try:
            lines.append(_parse(row, path, number))
        except ConvoyError:
            if number < len(rows):
                raise
            cut = True
    train, test = _one_history(lines)
    return Metrics(train, test, raw, cut)


def _parse(row: bytes, path: Path, number: int) -> MetricsLine:
    mend = "mend or delete that line and write the report again"
    try:
        return MetricsLine.model_validate(json.loads(row.decode("utf-8")))
    except ValidationError as error:
        raise ConvoyError(f"{path}, line {number}: {first_problem(error)}; {mend}.") from None
    except (ValueError, RecursionError):
        raise ConvoyError(f"{path}, line {number} is not a JSON object; {mend}.") from None


def first_problem(error: ValidationError) -> str:
    """The first thing that pydantic found, as words that name the key."""
    problem = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in problem["loc"])
    said = problem["msg"][:1].lower() + problem["msg"][1:]
    return f"`{key}`: {said}" if key else said


def _one_history(lines: list[MetricsLine]) -> tuple[list[MetricsLine], list[MetricsLine]]:
    """Training and test lines in order of updates, each update once.

    A run that is killed and resumed goes back to its checkpoint and writes some updates a second time. Training lines
    are written in order, so one that goes back starts anew: what an earlier attempt had written beyond it is dropped.
    """
    train: dict[int, MetricsLine] = {}
    test: dict[int, MetricsLine] = {}
    for line in lines:
        if line.split == "test":
            test[line.step] = line
            continue
        if train and line.step <= max(train):
            train = {step: kept for step, kept in train.items() if step < line.step}
            test = {step: kept for step, kept in test.items() if step < line.step}
        train[line.step] = line
    return list(train.values()), [test[step] for step in sorted(test)]
