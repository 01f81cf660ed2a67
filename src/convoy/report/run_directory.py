"""Reads a run directory into one checked object; whatever a run has not written yet may be missing.

Of `metrics.jsonl` one history is made, even where a resumed run repeats itself.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

from convoy.doctor.diagnosis import Diagnosis
from convoy.documents import read_mapping
from convoy.errors import ConvoyError
from convoy.planner.comparison import Comparison
from convoy.training.records import EvaluationFile, MetricsLine, RunSummary
from convoy.training.run_directory import is_locked

_Model = TypeVar("_Model")


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
    raw = path.read_bytes() if path.exists() else b""
    rows = raw.split(b"\n")
    cut = False
    lines: list[MetricsLine] = []
    for number, row in enumerate(rows, start=1):
        if row.strip():
            try:
                lines.append(_parsed(row, MetricsLine))
            except ValueError as error:
                if number < len(rows):
                    mend = "mend or delete that line and write the report again"
                    raise ConvoyError(f"{path}, line {number}: {_problem(error)}; {mend}.") from None
                cut = True
    return Metrics(*_one_history(lines), raw, cut)


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def _parsed(text: bytes, model: type[_Model]) -> _Model:
    try:
        value: _Model = _adapter(model).validate_python(json.loads(text))
        return value
    except RecursionError:
        raise ValueError("nested too deep") from None


def _problem(error: ValueError) -> str:
    """The first thing that is wrong with a document, as words that name the key or the line."""
    if not isinstance(error, ValidationError):
        return f"this is no JSON ({error})"
    problem = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"][:1].lower() + problem["msg"][1:]
    return f"`{key}`: {message}" if key else message


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


@dataclass(frozen=True)
class Run:
    """Everything that a run directory holds; what comes from a file of its own is empty or None without that file.

    `training` says whether a process trains in it now; None where that cannot be told.
    """

    path: Path
    config_text: str
    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: Metrics
    summary: RunSummary
    evaluation: EvaluationFile
    prediction: Comparison | None = None
    diagnosis: Diagnosis | None = None
    training: bool | None = None

    def setting(self, key: str) -> Any:
        """The value of a dotted key of the configuration, or None."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def read_run(path: Path) -> Run:
    """The run in the directory `path`.

    Raises ConvoyError if it is no run directory (no `config.yaml`) or a file in it is corrupt, naming file and line.
    """
    path = Path(path)
    config_file = path / "config.yaml"
    if not config_file.is_file():
        missing = "has no config.yaml" if path.is_dir() else "does not exist or is no directory"
        raise ConvoyError(f"{path} is not a run directory: it {missing}; give the directory that `--out` named.")
    try:
        return Run(
            path=path,
            config=read_mapping(config_file, "recipe"),
            config_text=config_file.read_text(encoding="utf-8"),
            environment=_read(path / "environment.json", dict[str, Any]) or {},
            metrics=read_metrics(path / "metrics.jsonl"),
            summary=_read(path / "summary.json", RunSummary) or RunSummary(),
            evaluation=_read_evaluation(path / "evaluation.json"),
            prediction=_read(path / "prediction.json", Comparison),
            diagnosis=_read(path / "diagnosis.json", Diagnosis),
            training=is_locked(path),
        )
    except OSError as error:
        raise ConvoyError(
            f"{error.filename or path} cannot be read ({error.strerror}); check the file and its permissions."
        ) from None


def _read(path: Path, model: type[_Model]) -> _Model | None:
    if not path.exists():
        return None
    try:
        return _parsed(path.read_bytes(), model)
    except ValueError as error:
        mend = "restore or delete the file and write the report again"
        raise ConvoyError(f"{path}: {_problem(error)}; {mend}.") from None


def _read_evaluation(path: Path) -> EvaluationFile:
    evaluation = _read(path, EvaluationFile) or EvaluationFile()
    size, table = len(evaluation.classes), evaluation.confusion
    if table and (len(table) != size or any(len(row) != size for row in table)):
        raise ConvoyError(
            f"{path}: `confusion` is not a table of {size} rows and {size} columns, one for each of `classes`; "
            "evaluate the run again."
        )
    return evaluation
