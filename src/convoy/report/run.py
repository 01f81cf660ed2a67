"""Reads a run directory into one checked object; whatever a run has not written yet may be missing."""

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
from convoy.run.directory import RunDirectory, is_locked
from convoy.run.records import LARGEST_TABLE, EvaluationFile, MetricsLine, RunSummary

_Model = TypeVar("_Model")


@dataclass(frozen=True)
class Metrics:
    """The history of a run. `cut` says that the last line was half written, as after a kill, and left out."""

    train: list[MetricsLine] = field(default_factory=list)
    test: list[MetricsLine] = field(default_factory=list)
    raw: bytes = b""
    cut: bool = False
    split: str = "test"  # that the evaluations are of


def column(lines: Iterable[MetricsLine], name: str) -> np.ndarray:
    """The values `name` of the lines as float64, NaN where there is none."""
    values = [getattr(line, name, None) for line in lines]
    return np.array([x if isinstance(x, int | float) else np.nan for x in values], dtype=np.float64)


def counts_of(evaluation: EvaluationFile) -> np.ndarray:
    """How often a class was taken for another, [true class, predicted class]; empty where that is not known."""
    size = len(evaluation.classes) if evaluation.confusion else 0
    table = np.array(evaluation.confusion, dtype=np.int64)
    if size <= LARGEST_TABLE or table.shape[1] == size:
        return table.reshape(size, size)
    counts = np.zeros((size, size), dtype=np.int64)
    counts[table[:, 0], table[:, 1]] = table[:, 2]
    return counts


def read_metrics(path: Path) -> Metrics:
    """The history in `path`; empty if there is no such file.

    Raises ConvoyError naming file and line where a line is no object of the schema. A last line that was cut off in
    the middle of writing is no error: it is left out, and `cut` says so.
    """
    raw = path.read_bytes() if path.exists() else b""
    *rows, last = raw.split(b"\n")
    mend = "mend or delete that line"
    lines = [
        _checked(row, MetricsLine, f"{path}, line {number}", mend) for number, row in enumerate(rows, 1) if row.strip()
    ]
    cut = False
    if last.strip():
        try:
            lines.append(_checked(last, MetricsLine, str(path), mend))
        except ConvoyError:
            cut = True
    train: list[MetricsLine] = []
    test: list[MetricsLine] = []
    for line in lines:
        (train if line.split == "train" else test).append(line)
    split = "validation" if any(line.split == "validation" for line in test) else "test"
    # without the last look at the test split, with the weights that are delivered, here or in a run that this extends
    return Metrics(train, [line for line in test if line.split == split], raw, cut, split)


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def _checked(text: bytes, model: type[_Model], where: str, mend: str = "restore or delete the file") -> _Model:
    """A JSON text as an object of the schema; the ConvoyError names the key or the line that is wrong."""
    try:
        # Not by pydantic's own reader, which refuses names of files that are no UTF-8.
        value: _Model = _adapter(model).validate_python(json.loads(text))
        return value
    except (ValueError, RecursionError) as error:
        words = f"this is no JSON ({error})"
        if isinstance(error, ValidationError):
            problem = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in problem["loc"])
            words = f"{f'`{key}`: ' if key else ''}{problem['msg'][:1].lower()}{problem['msg'][1:]}"
        raise ConvoyError(f"{where}: {words}; {mend} and write the report again.") from None


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

    @property
    def task(self) -> str:
        """What the network is trained for."""
        network_input = self.environment.get("input")
        task = network_input.get("task") if isinstance(network_input, dict) else None
        return task if isinstance(task, str) else "classification"

    @property
    def results(self) -> dict[str, float]:
        """The latest metrics by name, the one that says which is best first; of classification those of `named`."""
        metrics = {**self.summary.metrics, **self.evaluation.metrics}
        names = sorted(metrics, key=lambda name: (name != self.summary.best_metric, name == "loss"))
        numbers = {name: number for name in names if (number := metrics[name]) is not None}
        shown = self.named if self.task == "classification" else numbers
        return {name: numbers[name] for name in shown if name in numbers}

    @property
    def named(self) -> list[str]:
        """The metrics with curves by their names: the one that says which is best, and the user's; not the accuracy."""
        own = [name.rpartition(":")[2].rpartition(".")[2] for name in map(str, self.setting("metrics") or ())]
        names = [self.summary.best_metric or "top1", *own]
        return [name for name in dict.fromkeys(names) if self.task != "classification" or name not in ("top1", "loss")]

    @property
    def decides(self) -> bool:
        """Whether one of `results` says which weights are best, and not the accuracy."""
        return bool(self.results) and (self.task != "classification" or self.summary.best_metric in self.results)

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
    run = RunDirectory(Path(path))
    run.check_run()
    try:
        return Run(
            path=run.path,
            config=read_mapping(run.config, "recipe"),
            config_text=run.config.read_text(encoding="utf-8"),
            environment=_read(run.environment, dict[str, Any]) or {},
            metrics=read_metrics(run.metrics),
            summary=_read(run.summary_file, RunSummary) or RunSummary(),
            evaluation=_read(run.evaluation, EvaluationFile) or EvaluationFile(),
            prediction=_read(run.prediction, Comparison),
            diagnosis=_read(run.diagnosis, Diagnosis),
            training=is_locked(run.path),
        )
    except OSError as error:
        raise ConvoyError(
            f"{error.filename or path} cannot be read ({error.strerror}); check the file and its permissions."
        ) from None


def _read(path: Path, model: type[_Model]) -> _Model | None:
    return _checked(path.read_bytes(), model, str(path)) if path.exists() else None
