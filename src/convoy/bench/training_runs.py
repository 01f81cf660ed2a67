"""The trainings of a study: each configuration once, by the trainer itself, stopped and gone on with as any run."""

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from convoy.bench.measurement import MeasurementTask, join
from convoy.bench.processes import RankFailed, RankSlots, Say, reason_of, run_ranks
from convoy.bench.records import CONVOY, Configuration, Evaluation, Training
from convoy.bench.store import Store
from convoy.bench.study import recipe_for
from convoy.comm.position import here
from convoy.data import open_data
from convoy.errors import ConvoyError
from convoy.report.report import write_report
from convoy.report.run_directory import column, read_metrics
from convoy.training import Recipe, train
from convoy.training.config import Duration
from convoy.training.derived import resolve
from convoy.training.progress import Silence

_BEAT_S = 1.0


def train_run(task: MeasurementTask, out: Path, command: str, keep: bool, say: Say) -> str | None:
    """A rank's part of a training. All ranks call it.

    Args:
        task: the configuration; its updates do not count.
        out: the folder of the run.
        command: that repeats the study.
        keep: whether measured times are kept for later plans, and those that are kept are used.
        say: is told how far it has come, in updates.

    Returns:
        The name of the signal that stopped it; None at its end.
    """
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
        )
    return outcome.signal


class Heard(Silence):
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
            seen = here.moved
            while not ended.wait(_BEAT_S):
                if here.moved != seen:
                    seen = here.moved
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


FOLDER = "training"
"""In the folder of a study: the folders of the runs."""

_LONGEST = 80
_FEW, _OFTEN = 10, Duration(5, "%")
"""Where a run would be evaluated less often than so many times, it is this often."""


def recipe_for_training(recipe: Recipe, epochs: float, said: bool) -> Recipe:
    """The recipe of all trainings.

    Args:
        recipe: of the study.
        epochs: that are trained.
        said: the user has said how often to evaluate.
    """
    changes: dict[str, Duration] = {"epochs": Duration(epochs, "ep")}
    every = recipe.evaluate_every
    if not said and every.unit == "ep" and epochs / every.value < _FEW:
        changes["evaluate_every"] = _OFTEN
    return recipe.model_copy(update=changes)


@dataclass
class TrainingRuns:
    """Trains what is not finished yet; the store is saved after every run.

    Attributes:
        recipe: of the trainings.
        slots: where ranks run.
        timeout: seconds without a word from a run after which it is given up.
        command: that repeats the study.
        progress: is told of the work as a whole, in updates.
        tell: is told findings, in sentences.
    """

    recipe: Recipe
    rows: Sequence[Configuration]
    store: Store
    slots: RankSlots
    timeout: float
    command: str
    progress: Say
    tell: Callable[[str], None]

    def __call__(self) -> None:
        """Train.

        Raises:
            ConvoyError: no configuration at all can be trained, through a mistake of the user.
        """
        keys = {row.key for row in self.rows if row.kind == CONVOY and not row.place}
        rows = [row for row in self.store.configurations if row.key in keys]
        trainings = [self.store.add_training(row) for row in rows]
        self._began = time.perf_counter()
        updates = resolve(self.recipe, len(open_data(self.recipe.data).train)).total_updates
        for number, (row, kept) in enumerate(zip(rows, trainings, strict=True)):
            if not kept.finished:
                self._train(row, kept, number * updates, len(rows) * updates)
        self.progress("trained", len(rows) * updates, len(rows) * updates)
        if rows and all(kept.failed for kept in trainings):
            raise ConvoyError(str(trainings[0].failed))

    def _train(self, row: Configuration, kept: Training, before: int, total: int) -> None:
        store, study = self.store, self.store.study
        out = store.path.parent / FOLDER / _folder_name(row.key)
        if out.is_dir() and not (out / "config.yaml").is_file():
            shutil.rmtree(out)  # ended before it had begun
        recipe = recipe_for(self.recipe, study, row, store.plan_of(row), store.shares_of(row))
        task = MeasurementTask(CONVOY, recipe, None, study.device_type, updates=0, warm_up=0)
        began = time.perf_counter()
        signals: list[str | None] = []
        try:
            signals = run_ranks(
                train_run,
                self.slots.of(row.devices),
                task,
                out,
                self.command,
                not study.cluster,  # times on emulated devices are not those of this machine
                seconds=self.timeout,
                lasting=True,
                say=lambda said, done, _: self.progress(f"training {row.where}: {said}", before + done, total),
            )
            kept.finished = not any(signals)
        except (RankFailed, ConvoyError) as error:
            kept.failed = reason_of(error)
        finally:
            kept.wall_s = round(kept.wall_s + time.perf_counter() - began, 3)
            if (out / "metrics.jsonl").is_file():
                add_evaluations(kept, out, study.batch_on(row.devices))
            store.spent_on_training(time.perf_counter() - self._began)
            store.save()
        if (out / "config.yaml").is_file():
            try:
                write_report(out)
            except ConvoyError as error:
                self.tell(str(error))
        if kept.failed:
            self.tell(f"{row.where} was not trained: {kept.failed}")
        elif not kept.finished:
            stopped = next(filter(None, signals))
            self.tell(f"the training of {row.where} was stopped by {stopped}; the same command goes on")


def add_evaluations(kept: Training, run: Path, batch: int) -> None:
    """Take over what a run has written so far.

    Args:
        kept: the training's record.
        run: its folder.
        batch: images of an update.
    """
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


def _folder_name(key: str) -> str:
    name = re.sub(r"[^A-Za-z0-9=.,#-]+", "-", key)
    return name if len(name) <= _LONGEST and "\n" not in key else f"{name[:30]}-{sha256(key.encode()).hexdigest()[:10]}"
