"""Many trainings, one a device at a time: what is finished stays, what was begun goes on, and Ctrl-C ends all of them.

Which trainings there are may depend on those that have ended, as in a search: whoever asks for them is asked again
whenever a device is free.
"""

import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from convoy.bench.course import train_rank
from convoy.bench.measure import MeasurementTask
from convoy.bench.processes import PRELOAD, Places, RankFailed, answer, end_softly, reason_of, start
from convoy.bench.records import CONVOY
from convoy.resources import own_cores
from convoy.training import Recipe, RunDirectory

_SAY_EVERY_S, _END_S, _TIMEOUT_S = 1.0, 10.0, 600.0


@dataclass(frozen=True)
class Job:
    """A training on one device; its run directory has its name."""

    name: str
    recipe: Recipe


@dataclass
class Jobs:
    """Runs trainings, each in a process of its own, pinned to the cores of a device or on a GPU: on all that there
    are."""

    folder: Path  # in which the run directories are
    device_type: str
    cores_per_device: int = 1
    command: str = ""  # repeats them, for their reports
    progress: Callable[[str], None] = lambda text: None  # told in one line how the running ones stand
    _running: dict[Connection, tuple[Job, int, BaseProcess]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        on_gpus = self.device_type == "cuda"
        self.places = Places(0 if on_gpus else self.cores_per_device)
        self.number = torch.cuda.device_count() if on_gpus else len(own_cores()) // self.cores_per_device

    def run(
        self, wanted: Callable[[], Sequence[Job]], ended: Callable[[Job, str | None], None], until: float = math.inf
    ) -> bool:
        """Train until nothing is wanted any more; False where the time, `until` by the monotonic clock, was up before:
        what ran then has saved, and goes on with the next call. `ended` is told of each training that has ended, and
        why it failed, if so.
        """
        had: set[str] = set()
        try:
            while True:
                is_free = len(self._running) < self.number
                job = next((job for job in wanted() if job.name not in had), None) if is_free else None
                if job is not None:
                    had.add(job.name)
                    if RunDirectory(self.folder / job.name).summary().get("status") == "finished":
                        ended(job, None)
                    else:
                        self._start(job)
                elif not self._running:
                    return True
                elif time.monotonic() > until:
                    return False
                else:
                    self._listen(ended)
        finally:
            processes = [process for _, _, process in self._running.values()]
            with suppress(KeyboardInterrupt):
                end_softly(processes)
            for process in processes:
                process.kill()
                process.join()
            for pipe in self._running:
                pipe.close()
            self._running.clear()

    def _start(self, job: Job) -> None:
        taken = {device for _, device, _ in self._running.values()}
        device = next(number for number in range(self.number) if number not in taken)
        out = self.folder / job.name
        if out.is_dir() and not RunDirectory(out).is_run():
            shutil.rmtree(out)  # ended before it had begun
        alone = job.recipe.parallel.model_copy(update={"devices": 1, "plan": None, "shares": None})
        name = f"cuda:{device}" if self.device_type == "cuda" else self.device_type
        task = MeasurementTask(CONVOY, job.recipe.model_copy(update={"parallel": alone}), None, name)
        arguments = task, out, self.command, False, _TIMEOUT_S
        (place,) = self.places.of(1, first=device)
        process, pipe = start(place, 0, {}, True, train_rank, arguments, [*PRELOAD, "convoy.bench.course"])
        self._running[pipe] = job, device, process

    def _listen(self, ended: Callable[[Job, str | None], None]) -> None:
        """Hear what the trainings say, and take out those that have ended."""
        for pipe in wait(list(self._running), timeout=_SAY_EVERY_S):
            assert isinstance(pipe, Connection)
            job, _, process = self._running[pipe]
            try:
                kind, value = answer(pipe, process, job.name)
            except RankFailed as error:
                kind, value = "failed", error
            if kind == "says":
                self.progress(f"{len(self._running)} at a time; {job.name}: {value[0]}")
                continue
            del self._running[pipe]
            pipe.close()
            process.join(_END_S)
            process.kill()
            stopped = f"it was stopped by {value}" if value else None  # the signal
            ended(job, reason_of(value) if kind == "failed" else stopped)
