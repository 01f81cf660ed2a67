"""A training within a study: by the trainer itself, heard of as it goes, and taken over from the folder of its run."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import numpy as np

from convoy.bench.measurement import MeasurementTask, join
from convoy.bench.processes import Say
from convoy.bench.records import Evaluation, Training
from convoy.comm.position import current
from convoy.doctor.updates import RunDoctor
from convoy.progress import Reporter
from convoy.report.run_directory import column, read_metrics
from convoy.training import Recipe, train
from convoy.training.config import Duration

_BEAT_S = 1.0


def train_run(task: MeasurementTask, out: Path, command: str, keep: bool, say: Say) -> str | None:
    """A rank's part of a training, in the folder `out`; the name of the signal that stopped it, None at its end. All
    ranks call it. `command` repeats the study; `keep` uses times that were measured before, and stores new ones."""
    ranks, device = join(task)
    heard = Heard(say)
    with heard.beating():
        outcome = train(
            task.recipe,
            out,
            resume=True,
            device=device,
            ranks=ranks,
            command=command,
            reporter=heard,
            handed_on=True,
            keep=keep,
            subscribe=RunDoctor,
        )
    return outcome.signal


class Heard(Reporter):
    """The reporter of a training within a study: its latest figures, on the study's own line."""

    def __init__(self, say: Say) -> None:
        self._tell = say
        self._one_at_a_time = threading.Lock()
        self._text, self._total = "beginning", 0
        self._latest = (self._text, 0, 0)

    @contextmanager
    def beating(self) -> Iterator[None]:
        ended = threading.Event()

        def beat() -> None:
            seen = current.moved
            while not ended.wait(_BEAT_S):
                if current.moved != seen:
                    seen = current.moved
                    with self._one_at_a_time:
                        self._tell(*self._latest)

        thread = threading.Thread(target=beat, daemon=True, name="convoy-beat")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def prepare(self, what: str, done: int, total: int) -> None:
        self._say(what, 0)

    def begin(self, done: int, total: int) -> None:
        self._total = total
        self._say(self._text, done)

    def advance(self, done: int, text: str | None = None) -> None:
        self._text = text or self._text
        self._say(self._text, done)

    def _say(self, text: str, done: int) -> None:
        with self._one_at_a_time:
            self._latest = (text, done, self._total)
            self._tell(*self._latest)


_FEW, _OFTEN = 10, Duration(5, "%")  # where a run would be evaluated less often than so many times, it is this often


def recipe_for_training(recipe: Recipe, epochs: float, said: bool) -> Recipe:
    """The recipe of all trainings; `said` is whether the user said how often to evaluate."""
    changes: dict[str, Duration] = {"epochs": Duration(epochs, "ep")}
    every = recipe.evaluate_every
    if not said and every.unit == "ep" and epochs / every.value < _FEW:
        changes["evaluate_every"] = _OFTEN
    return recipe.model_copy(update=changes)


def add_evaluations(kept: Training, run: Path, batch: int) -> None:
    """Take over what a run in a folder has written so far; an update has `batch` images."""
    metrics = read_metrics(run / "metrics.jsonl")
    steps, rates = column(metrics.train, "step"), column(metrics.train, "images_per_s")
    ends = np.cumsum(np.diff(steps, prepend=0) * batch / rates)
    seconds = np.interp(column(metrics.test, "step"), [0, *steps], [0, *ends])
    kept.run = run.name
    kept.images = max((line.images or 0 for line in metrics.test), default=0)
    kept.evaluations = [
        Evaluation(
            step=line.step,
            epoch=line.epoch,
            error=None if line.top1 is None else round(1 - line.top1, 9),
            loss=line.loss,
            train_s=round(float(second), 3),
        )
        for line, second in zip(metrics.test, seconds, strict=True)
    ]
    weights = run / "weights.safetensors"
    kept.sha256 = sha256(weights.read_bytes()).hexdigest() if weights.is_file() else ""
