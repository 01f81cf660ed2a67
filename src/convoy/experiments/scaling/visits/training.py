"""What a rank does when a configuration is trained: the trainer's own run, which goes on where it was stopped."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from convoy.engine.position import here
from convoy.experiments.scaling.ranks.processes import Say
from convoy.experiments.scaling.visits.device import join
from convoy.experiments.scaling.visits.task import Task
from convoy.training import train

_BEAT_S = 1.0


def train_run(task: Task, out: Path, command: str, keep: bool, say: Say) -> str | None:
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
    devices, device = join(task)
    heard = Heard(say)
    with heard.beating():
        outcome = train(
            task.recipe,
            out,
            resume=True,
            device=device,
            devices=devices,
            command=command,
            reporter=heard,
            handed_on=True,
            keep=keep,
        )
    return outcome.signal


class Heard:
    """The reporter of a training within a study: its latest figures, on the study's own line."""

    def __init__(self, say: Say) -> None:
        self._tell = say
        self._one_at_a_time = threading.Lock()
        self._text, self._total = "beginning", 0
        self._latest = (self._text, 0, 0)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """While entered, the latest is said again as long as this process moves: in an evaluation nobody reports."""
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

    def say(self, text: str) -> None:
        """Sentences are kept in the run's folder."""

    def prepare(self, what: str, done: int, total: int) -> None:
        """Long work before the first update."""
        self._say(what, 0)

    def begin(self, done: int, total: int) -> None:
        """The first update comes."""
        self._total = total
        self._say(self._text, done)

    def advance(self, done: int, text: str | None = None) -> None:
        """So many are done."""
        self._text = text or self._text
        self._say(self._text, done)

    def end(self) -> None:
        """Nothing is open."""

    def _say(self, text: str, done: int) -> None:
        with self._one_at_a_time:
            self._latest = (text, done, self._total)
            self._tell(*self._latest)
