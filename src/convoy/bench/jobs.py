"""Many trainings, one a device at a time: what is finished stays, what was begun goes on, and Ctrl-C ends all of them.

Which trainings there are may depend on those that have ended, as in a search: whoever asks for them is asked again
whenever a device is free.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from convoy.bench.course import train_rank
from convoy.bench.measure import MeasurementTask
from convoy.bench.processes import PRELOAD, Places, RankFailed, answer, end_softly, reason_of, start
from convoy.bench.records import CONVOY
from convoy.training import Recipe, RunDirectory

_SAY_EVERY_S, _END_S = 1.0, 10.0


@dataclass(frozen=True)
class Job:
    """A training on one device; its run directory has its name."""

    name: str
    recipe: Recipe


@dataclass
class _Running:
    job: Job
    device: int
    process: BaseProcess
    text: str = "starting"


@dataclass
class Jobs:
    """Runs trainings, each in a process of its own, pinned to the cores of a device or on a GPU."""

    folder: Path  # in which the run directories are
    device_type: str
    places: Places
    number: int  # of devices, and so of trainings at a time
    command: str = ""  # repeats them, for their reports
    timeout_s: float = 600.0  # in which a training has to move
    progress: Callable[[str], None] = lambda text: None  # told in one line how the running ones stand

    def run(
        self, wanted: Callable[[], Sequence[Job]], ended: Callable[[Job, str | None], None], until: float | None = None
    ) -> bool:
        """Train until nothing is wanted any more; False where the time, `until` by the monotonic clock, was up before:
        what ran then has saved, and goes on with the next call. `ended` is told of each training that has ended, and
        why it failed, if so.
        """
        running: dict[Connection, _Running] = {}
        had: set[str] = set()
        try:
            while True:
                free = [n for n in range(self.number) if all(n != other.device for other in running.values())]
                for job in [job for job in wanted() if job.name not in had] if free else ():
                    had.add(job.name)
                    if RunDirectory(self.folder / job.name).summary().get("status") == "finished":
                        ended(job, None)
                        break  # which may change what is wanted
                    pipe, run = self._start(job, free.pop(0))
                    running[pipe] = run
                    if not free:
                        break
                else:
                    if not running:
                        return True
                    if not self._listen(running, ended, until):
                        return False
        finally:
            with suppress(KeyboardInterrupt):
                end_softly([run.process for run in running.values()])
            for pipe, run in running.items():
                run.process.kill()
                run.process.join()
                pipe.close()

    def _start(self, job: Job, device: int) -> tuple[Connection, _Running]:
        out = self.folder / job.name
        if out.is_dir() and not RunDirectory(out).is_run():
            shutil.rmtree(out)  # ended before it had begun
        recipe = job.recipe.model_copy(
            update={"parallel": job.recipe.parallel.model_copy(update={"devices": 1, "plan": None, "shares": None})}
        )
        name = f"{self.device_type}:{device}" if self.device_type == "cuda" else self.device_type
        arguments = MeasurementTask(CONVOY, recipe, None, name), out, self.command, False, self.timeout_s
        place = self.places.of(1, first=device)[0]
        process, pipe = start(place, 0, {}, True, train_rank, arguments, [*PRELOAD, "convoy.bench.course"])
        return pipe, _Running(job, device, process)

    def _listen(
        self, running: dict[Connection, _Running], ended: Callable[[Job, str | None], None], until: float | None
    ) -> bool:
        """Hear what the trainings say, and take out those that have ended; False where the time is up."""
        patience = _SAY_EVERY_S if until is None else min(_SAY_EVERY_S, until - time.monotonic())
        if patience < 0:
            return False
        for pipe in wait(list(running), timeout=patience):
            assert isinstance(pipe, Connection)
            run = running[pipe]
            try:
                kind, value = answer(pipe, run.process, run.job.name)
            except RankFailed as error:
                kind, value = "failed", error
            if kind == "says":
                run.text = value[0]
                continue
            running.pop(pipe)
            pipe.close()
            run.process.join(_END_S)
            run.process.kill()
            failure = f"it was stopped by {value}" if value else None  # the signal
            ended(run.job, reason_of(value) if kind == "failed" else failure)
        latest = next(iter(running.values()), None)
        if latest is not None:
            self.progress(f"{len(running)} at a time; {latest.job.name}: {latest.text}")
        return True
