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

from convoy.bench.configuration import CONVOY, Configuration
from convoy.bench.curves import training_facts, where
from convoy.bench.measurement import MeasurementTask, join
from convoy.bench.processes import RankFailed, RankSlots, Say, run_ranks
from convoy.bench.store import Store
from convoy.bench.study import Study
from convoy.comm.position import current
from convoy.data import open_data
from convoy.errors import ConvoyError
from convoy.report.report import write_report
from convoy.training import Recipe, Reporter, train
from convoy.training.config import Duration
from convoy.training.derived import resolve

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
        study: its recipe is that of the trainings.
        folder: of the study.
        slots: where ranks run.
        timeout: seconds without a word from a run after which it is given up.
        command: that repeats the study.
        progress: is told of the work as a whole, in updates.
        tell: is told what was found, in sentences.
    """

    study: Study
    configurations: Sequence[Configuration]
    store: Store
    folder: Path
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
        rows = [row for row in self.configurations if row.kind == CONVOY and not row.place]
        for row in rows:
            self.store.add_training(row)
        self._began = time.perf_counter()
        updates = resolve(self.study.recipe, len(open_data(self.study.recipe.data).train)).total_updates
        for number, row in enumerate(rows):
            self._train(row, number * updates, len(rows) * updates)
        self.progress("trained", len(rows) * updates, len(rows) * updates)
        failed = [self.store.row(row)["training"]["failed"] for row in rows]
        if rows and all(failed):
            raise ConvoyError(str(failed[0]))

    def _train(self, row: Configuration, before: int, total: int) -> None:
        kept = self.store.row(row)["training"]
        if kept["finished"]:
            return
        out = self.folder / FOLDER / _folder_name(row.key)
        if out.is_dir() and not (out / "config.yaml").is_file():
            shutil.rmtree(out)  # ended before it had begun
        name = where(self.store.row(row))
        recipe = self.study.recipe_for(row, self.store.plan_of(row), self.store.shares_of(row))
        task = MeasurementTask(CONVOY, recipe, None, self.study.device_type, updates=0, warm_up=0)
        began, took = time.perf_counter(), kept["wall_s"]
        try:
            signals: list[str | None] = run_ranks(
                train_run,
                self.slots.of(row.devices),
                task,
                out,
                self.command,
                not self.study.cluster,  # times on emulated devices are not those of this machine
                seconds=self.timeout,
                renewed=True,
                end_softly=True,
                say=lambda said, done, _: self.progress(f"training {name}: {said}", before + done, total),
            )
            kept["finished"] = not any(signals)
        except ConvoyError as error:
            kept["failed"] = str(error)
        except RankFailed as error:
            kept["failed"] = error.reason
        finally:
            kept["wall_s"] = round(took + time.perf_counter() - began, 3)
            if (out / "metrics.jsonl").is_file():
                kept |= training_facts(out, self.study.batch(row.devices))
            self.store.spent_on_training(time.perf_counter() - self._began)
            self.store.save()
        if (out / "config.yaml").is_file():
            try:
                write_report(out)
            except ConvoyError as error:
                self.tell(str(error))
        if kept["failed"]:
            self.tell(f"{name} was not trained: {kept['failed']}")
        elif not kept["finished"]:
            self.tell(f"the training of {name} was stopped by {next(filter(None, signals))}; the same command goes on")


def _folder_name(key: str) -> str:
    name = re.sub(r"[^A-Za-z0-9=.,#-]+", "-", key)
    return name if len(name) <= _LONGEST and "\n" not in key else f"{name[:30]}-{sha256(key.encode()).hexdigest()[:10]}"
