"""Reads a run directory into one checked object; whatever a run has not written yet may be missing.

Of `metrics.jsonl` one history is made, even where a resumed run repeats itself.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

from convoy.doctor.diagnosis import Diagnosis
from convoy.documents import parse
from convoy.errors import ConvoyError
from convoy.planner.comparison import Comparison
from convoy.training.records import EvaluationFile, MetricsLine, RunSummary
from convoy.training.run_directory import is_locked


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


@dataclass(frozen=True)
class Run:
    """Everything that a run directory holds; what comes from a file of its own is None without that file.

    `training` says whether a process trains in it now; None where that cannot be told.
    """

    path: Path
    config_text: str
    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: Metrics
    summary: RunSummary | None
    evaluation: EvaluationFile | None
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
        text, config = _read_yaml(config_file)
        return Run(
            path=path,
            config_text=text,
            config=config,
            environment=_read_json(path / "environment.json") or {},
            metrics=read_metrics(path / "metrics.jsonl"),
            summary=_read_model(path / "summary.json", RunSummary),
            evaluation=_read_evaluation(path / "evaluation.json"),
            prediction=_read_model(path / "prediction.json", Comparison),
            diagnosis=_read_model(path / "diagnosis.json", Diagnosis),
            training=is_locked(path),
        )
    except OSError as error:
        raise ConvoyError(
            f"{error.filename or path} cannot be read ({error.strerror}); check the file and its permissions."
        ) from None


def _read_text(path: Path, mend: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConvoyError(f"{path}, line {line} is not UTF-8 text; {mend}.") from None


def _read_yaml(path: Path) -> tuple[str, dict[str, Any]]:
    mend = "restore the file that the run wrote"
    text = _read_text(path, mend)
    try:
        config = parse(text, str(path))
    except ConvoyError as error:
        raise ConvoyError(f"{error}; {mend}.") from None
    if not isinstance(config, dict):
        raise ConvoyError(f"{path}, line 1: the configuration is not a mapping of keys to values; {mend}.")
    return text, config


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    mend = "restore or delete it and write the report again"
    text = _read_text(path, mend)
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConvoyError(f"{path}, line {error.lineno} is not valid JSON ({error.msg}); {mend}.") from None
    except (ValueError, RecursionError):
        raise ConvoyError(f"{path}, line 1 is not valid JSON (numbers too long or nested too deep); {mend}.") from None
    if not isinstance(document, dict):
        raise ConvoyError(f"{path}, line 1 is not a JSON object; {mend}.")
    return document


_Model = TypeVar("_Model")


def _read_model(path: Path, model: type[_Model]) -> _Model | None:
    document = _read_json(path)
    if document is None:
        return None
    try:
        return TypeAdapter(model).validate_python(document)
    except ValidationError as error:
        raise ConvoyError(
            f"{path}: {first_problem(error)}; restore or delete the file and write the report again."
        ) from None


def _read_evaluation(path: Path) -> EvaluationFile | None:
    evaluation = _read_model(path, EvaluationFile)
    if evaluation is not None and evaluation.confusion:
        size = len(evaluation.classes)
        if len(evaluation.confusion) != size or any(len(row) != size for row in evaluation.confusion):
            raise ConvoyError(
                f"{path}: `confusion` is not a table of {size} rows and {size} columns, one for each of `classes`; "
                "evaluate the run again."
            )
    return evaluation
