"""What a rank does when a configuration has its turn: it is built anew, warmed up, and some updates are timed."""

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from convoy.data import Batch
from convoy.engine.allocation import keep_freed_memory
from convoy.experiments.scaling.configuration import CONVOY
from convoy.experiments.scaling.processes import Say
from convoy.experiments.scaling.stopwatch import INPUT, Lap, Stopwatch
from convoy.experiments.scaling.study import Made, data_of
from convoy.training import Devices, Recipe, choose_device
from convoy.training.ranks.speed import MEASURED, WARM_UP, SpeedTest
from convoy.training.session import Session
from convoy.training.set_up import set_up

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Task:
    """A visit to a configuration.

    Attributes:
        kind: of the configuration.
        recipe: of the configuration, with its devices and its plan.
        made: made-up pictures; None for those of the recipe.
        device_type: `cpu` or `cuda`.
        updates: that are timed.
        warm_up: that come before them.
    """

    kind: str
    recipe: Recipe
    made: Made | None
    device_type: str
    updates: int
    warm_up: int

    @property
    def num_devices(self) -> int:
        """Ranks of the configuration."""
        return self.recipe.parallel.devices or 1


@dataclass(frozen=True)
class RankTimes:
    """What a rank measured.

    Attributes:
        laps: of the timed updates.
        memory: bytes at the peak, beyond what the process had before the network was built.
        loss: this rank's part of the mean loss of the first update; the parts of all ranks add up to it.
        overhead: seconds that taking the time has added to an update.
        without: seconds of updates without exchange of gradients, where that is how the exchange is measured.
        microbatches: of an update, that were this rank's.
    """

    laps: list[Lap]
    memory: int
    loss: float
    overhead: float
    without: list[float] = field(default_factory=list)
    microbatches: int = 0


def visit(task: Task, say: Say) -> RankTimes:
    """A rank's part of a visit. All ranks call it."""
    if task.kind != CONVOY:
        from convoy.experiments.scaling.peer_visit import visit_peer

        return visit_peer(task)
    devices, device = join(task)
    data = data_of(task.made, task.recipe)
    memory = Memory(device)
    session = set_up(task.recipe, device, devices=devices, data=data)
    session.model.train()
    stopwatch = Stopwatch(device)
    losses: list[Tensor] = []
    first = _divide_by_speed(session, losses)
    step = session.step()

    def update(batch: Batch, number: int) -> None:
        result = step(batch, first + number)
        if first + number == 0:
            losses.extend(result.losses)

    with stopwatch.watch():
        batches = session.batches(first, task.warm_up + task.updates)
        run_updates(batches, update, stopwatch, task.warm_up, devices.barrier)
    loss = sum(float(part) for part in losses) if devices.leads else 0.0
    own = session.division.counts[devices.sample_rank]
    return RankTimes(stopwatch.laps(), memory.peak(), loss, stopwatch.overhead, microbatches=own)


def _divide_by_speed(session: Session, losses: list[Tensor]) -> int:
    """With `shares=auto`, measure what a microbatch takes each device, and divide the batch by that.

    Returns:
        How many updates that took.
    """
    if session.recipe.parallel.shares != "auto" or session.devices.num_sample_ranks == 1:
        return 0
    speed, step, updates = SpeedTest(), session.step(), 0
    step.timed = True
    with closing(session.batches(0, WARM_UP + MEASURED)) as batches:
        for batch in batches:
            result = step(batch, updates)
            if updates == 0:
                losses.extend(result.losses)
            speed.add(result.seconds)
            updates += 1
    session.division, _ = speed.shares(session.devices, session.division)
    return updates


def join(task: Task) -> tuple[Devices, torch.device]:
    """The ranks, and this one's device; memory that is freed stays with the process, also on one device."""
    if task.num_devices > 1:
        devices, own = Devices.join()
        return devices, own if task.device_type == "cuda" else torch.device("cpu")
    device = choose_device(task.device_type)
    keep_freed_memory(device)
    return Devices(), device


def run_updates(
    batches: Generator[Batch, None, None],
    update: Callable[[Batch, int], None],
    stopwatch: Stopwatch,
    warm_up: int,
    barrier: Callable[[], None],
) -> None:
    """Do updates as long as there are batches, and take the time of those after the warm-up."""
    number = 0
    with closing(batches):
        while True:
            if number == warm_up:
                barrier()
                stopwatch.clear()
            stopwatch.lap()
            with stopwatch.section(INPUT):
                batch = next(batches, None)
            if batch is None:
                return
            update(batch, number)
            number += 1


class Memory:
    """The most that this process has had since, beyond what it had at the beginning."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._before = self._now("VmRSS")

    def peak(self) -> int:
        """Bytes."""
        return max(0, self._now("VmHWM") - self._before)

    def _now(self, name: str) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) if name == "VmHWM" else 0
        if not _STATUS.exists():
            return 0
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        return 0
