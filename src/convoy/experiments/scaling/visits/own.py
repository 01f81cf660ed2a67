"""A visit to a configuration of Convoy: the trainer's own step under its plan."""

from contextlib import closing

from torch import Tensor

from convoy.data import Batch
from convoy.experiments.scaling.study.made_data import data_of
from convoy.experiments.scaling.visits.device import join
from convoy.experiments.scaling.visits.memory import Memory
from convoy.experiments.scaling.visits.stopwatch import Stopwatch
from convoy.experiments.scaling.visits.task import RankTimes, Task
from convoy.experiments.scaling.visits.updates import run_updates
from convoy.training.ranks.speed import MEASURED, WARM_UP, SpeedTest
from convoy.training.session import Session
from convoy.training.set_up import set_up


def visit_own(task: Task) -> RankTimes:
    """A rank's part of a visit to a configuration of Convoy. All ranks call it."""
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
