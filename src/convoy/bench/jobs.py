"""Trainings side by side, each on some of the devices at hand: what is finished stays, what was begun goes on, and on
Ctrl-C all of them save.

Which trainings there are may depend on how others ended, as in a search: whoever wants them is asked again whenever one
has ended.
"""

import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from convoy.bench.measure import MeasurementTask
from convoy.bench.processes import Group, Places, RankFailed, Say, end_softly, give_up, reason_of
from convoy.bench.records import CONVOY
from convoy.comm.joining import meeting_store
from convoy.doctor.updates import RunDoctor
from convoy.errors import ConvoyError
from convoy.progress import Reporter
from convoy.recipe.recipe import Recipe
from convoy.resources import own_cores
from convoy.run.directory import RunDirectory
from convoy.training import Trainer
from convoy.training.finite import ADVICE
from convoy.training.watchdog import Watchdog, collective_limit_s
from convoy.units import plural


@dataclass(frozen=True)
class Job:
    """A training, on as many devices as its recipe says, else on one."""

    out: Path  # its run directory
    recipe: Recipe

    @property
    def devices(self) -> int:
        return self.recipe.parallel.devices or 1


@dataclass(frozen=True)
class Outcome:
    """How a training ended: its `summary.json`, and why it failed or was stopped, if so."""

    summary: dict[str, Any]
    failure: str | None = None


STOPPED = "was stopped by"
Running = dict[Path, tuple[Job, Group, range]]  # by run directory, with their processes and devices


@dataclass
class Jobs:
    """Runs trainings in processes of their own, each on a block of the devices."""

    places: Places
    number: int  # of devices
    device_type: str
    command: str = ""  # repeats them, for their reports
    keeps_times: bool = True  # whether times that were measured before are used, and new ones stored
    timeout_s: float = 600.0  # in which nothing of a training moves until it is given up
    say: Callable[[Job, str, int, int], None] = lambda job, what, done, total: None  # hears of each, in updates

    @staticmethod
    def here(device_type: str, cores_per_device: int = 1, command: str = "") -> "Jobs":
        """On all devices of this machine; on a CPU one is so many cores."""
        if device_type == "cuda":
            return Jobs(Places(0), torch.cuda.device_count(), device_type, command)
        return Jobs(Places(cores_per_device), len(own_cores()) // cores_per_device, device_type, command)

    def train(self, wanted: Callable[[Mapping[Path, Outcome]], Iterable[Job]]) -> dict[Path, Outcome]:
        """Train until nothing is wanted that has no outcome; those, by run directory. `wanted` is given the outcomes so
        far, and names the trainings that can be done now, the most urgent first; others may be among them. A training
        that has failed is tried again with the next call, unless its loss was not finite.
        """
        outcomes: dict[Path, Outcome] = {}
        running: Running = {}
        try:
            while True:
                jobs = {job.out: job for job in wanted(outcomes)}
                waiting = [job for out, job in jobs.items() if out not in outcomes and out not in running]
                if earlier := {job.out: outcome for job in waiting if (outcome := kept(job.out)) is not None}:
                    outcomes |= earlier
                    continue  # which may say more
                for job in waiting:
                    if not self._start(job, running):
                        break
                if not running:
                    return outcomes
                self._listen(running, outcomes)
        finally:
            groups = [group for _, group, _ in running.values()]
            with suppress(KeyboardInterrupt):
                end_softly(groups)
            for group in groups:
                group.close()

    def _start(self, job: Job, running: Running) -> bool:
        """Begin a training, or go on with it, if enough devices that lie side by side are free."""
        if job.devices > self.number:
            there = plural(self.number, "device")
            raise ConvoyError(f"{job.out.name} is for {job.devices} devices, but here are {there}: give it fewer")
        busy = {number for _, _, block in running.values() for number in block}
        blocks = (range(first, first + job.devices) for first in range(self.number - job.devices + 1))
        block = next((block for block in blocks if busy.isdisjoint(block)), None)
        if block is None:
            return False
        if job.out.is_dir() and not RunDirectory(job.out).is_run():
            shutil.rmtree(job.out)  # ended before it had begun
        task = MeasurementTask(CONVOY, job.recipe, None, self.device_type)
        arguments = task, job.out, self.command, self.keeps_times, self.timeout_s
        _, group, _ = running[job.out] = job, Group(), block
        places, quiet = self.places.of(job.devices, first=block.start), job.devices < self.number
        group.start(train_rank, places, arguments, quiet)
        return True

    def _listen(self, running: Running, outcomes: dict[Path, Outcome]) -> None:
        """Hear what the trainings say, and take out those that have ended."""
        ready = wait([pipe for _, group, _ in running.values() for pipe in group.waiting])
        for out, (job, group, _) in list(running.items()):
            failure = None
            try:
                for pipe in group.waiting:
                    if pipe in ready:
                        group.hear(pipe, partial(self.say, job))
            except (RankFailed, ConvoyError) as error:
                failure = reason_of(error)
            if failure is None and group.waiting:
                continue
            if failure is None and (signal := next(filter(None, group.results), None)):
                failure = f"{STOPPED} {signal}"
            group.close()
            del running[out]
            outcomes[out] = Outcome(RunDirectory(out).summary(), failure)


def kept(out: Path) -> Outcome | None:
    """The outcome of a training that ended in an earlier call, or on another host, for good."""
    summary = RunDirectory(out).summary()
    failure = str(summary.get("error")) if summary.get("status") == "failed" else None
    if summary.get("status") == "finished" or (failure is not None and ADVICE in failure):
        return Outcome(summary, failure)
    return None


class _Told(Reporter):
    """Tells a training's progress, at most once in a second."""

    def __init__(self, say: Say) -> None:
        self._tell, self._text, self._total, self._at = say, "training", 0, 0.0

    def prepare(self, what: str, done: int, total: int) -> None:
        self._tell(what, 0, 0)

    def begin(self, done: int, total: int) -> None:
        self._total = total

    def advance(self, done: int, text: str | None = None) -> None:
        self._text = text or self._text
        if time.monotonic() - self._at >= 1:
            self._at = time.monotonic()
            self._tell(self._text, done, self._total)


def train_rank(task: MeasurementTask, out: Path, command: str, keep: bool, timeout_s: float, say: Say) -> str | None:
    """A rank's part of a training, in the folder `out`; the name of the signal that stopped it, None at its end. All
    ranks call it. `command` repeats the study; `keep` uses times that were measured before, and stores new ones."""
    ranks, device = task.join(collective_limit_s(timeout_s))
    options: dict[str, Any] = {"command": command, "handed_on": True, "keep": keep, "subscribe": RunDoctor}
    with Watchdog(ranks, meeting_store(), give_up, timeout_s) as watchdog:
        options |= {"watchdog": watchdog, "reporter": _Told(say)}
        return Trainer(task.recipe, out, resume=True, device=device, ranks=ranks, **options).run().signal
