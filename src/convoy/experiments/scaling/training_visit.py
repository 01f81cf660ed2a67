"""What a rank does when a configuration is trained: the trainer's own run, which goes on where it was stopped."""

from pathlib import Path

from convoy.experiments.scaling.processes import Say
from convoy.experiments.scaling.visit import Task, join
from convoy.training import train


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
    outcome = train(
        task.recipe,
        out,
        resume=True,
        device=device,
        devices=devices,
        command=command,
        reporter=_Heard(say),
        handed_on=True,
        keep=keep,
    )
    return outcome.signal


class _Heard:
    """The reporter of a training within a study: its latest figures, on the study's own line."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._total = 0
        self._text = "beginning"

    def say(self, text: str) -> None:
        """Sentences are kept in the run's folder."""

    def prepare(self, what: str, done: int, total: int) -> None:
        """Long work before the first update."""
        self._say(what, 0, self._total)

    def begin(self, done: int, total: int) -> None:
        """The first update comes."""
        self._total = total
        self._say(self._text, done, total)

    def advance(self, done: int, text: str | None = None) -> None:
        """So many are done."""
        self._text = text or self._text
        self._say(self._text, done, self._total)

    def end(self) -> None:
        """Nothing is open."""
