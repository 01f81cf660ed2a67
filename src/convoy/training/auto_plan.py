"""`--plan auto`: the planner's plan for a run, and the updates in which its best plans race.

How long a rank's samples take to get ready, measured before a plan is made.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from convoy.comm.ranks import Ranks
from convoy.data import DataSet, Order, num_workers, training_batches
from convoy.engine.allocation import release_freed_memory
from convoy.errors import ConvoyError, TooLargeError
from convoy.graph.given import copied
from convoy.planner import Planned, Scored, make_plan
from convoy.planner.cost.costs import HostCost
from convoy.planner.cost.pipeline import Staging
from convoy.planner.cost.store import device_memory
from convoy.planner.profiling import try_out
from convoy.planner.verdict import explained
from convoy.plans.layout import balanced
from convoy.plans.plan import Plan
from convoy.training.input import InputPipeline
from convoy.training.recipe import Recipe
from convoy.training.session import Prepared
from convoy.training.step import TrainingStep, update_seconds, updates_in_a_row, wait_for
from convoy.training.workloads import counts_of_passes, workload_in_passes
from convoy.units import size

_LEAST, _LONGEST_S = 4, 3.0  # at least so many batches are measured, for so many seconds at most


def measure_input(recipe: Recipe, data: DataSet, device: torch.device, ranks: Ranks) -> HostCost | None:
    """Seconds of a sample on its way from where it is stored to the device, normalized; of the slowest rank. None where
    a picture cannot be read: the training will say so.

    All ranks call it, and get their parts of the first batches at the same time, as in training. Beside a GPU its host
    and worker processes load; those of a CPU take their time from the cores that compute.
    """
    ranks.barrier()
    try:
        local_s: float | None = _seconds(recipe, data, device, ranks)
    except ConvoyError:
        local_s = None
    everyone = ranks.gather(local_s)
    measured_s = [seconds for seconds in everyone if seconds is not None]
    if len(measured_s) < len(everyone):
        return None
    return HostCost(per_sample=max(measured_s), beside=device.type == "cuda")


def _seconds(recipe: Recipe, data: DataSet, device: torch.device, ranks: Ranks) -> float:
    """Of a sample here, with all the workers that there may be."""
    positions = balanced(recipe.batch, ranks.num)[ranks.rank]
    assert isinstance(positions, range)
    memory_format = torch.channels_last if recipe.channels_last else torch.contiguous_format
    pipeline = InputPipeline(data, device, memory_format)
    workers = num_workers(data, recipe.data)[0]
    batches = training_batches(
        data,
        recipe.data.model_copy(update={"workers": workers}),
        Order(len(data.train), recipe.batch, recipe.seed),
        first_update=0,
        num_updates=1 + max(_LEAST, workers),
        seed=recipe.seed,
        positions=positions,
        pin_memory=device.type == "cuda",
    )
    with closing(batches):
        pipeline(next(batches))  # workers have started, and memory is there
        wait_for(device)
        began, samples, passed = time.perf_counter(), 0, 0.0
        for batch in batches:
            pipeline(batch)
            wait_for(device)
            samples += len(batch.images)
            passed = time.perf_counter() - began
            if passed > _LONGEST_S:
                break
    return passed / max(1, samples)


_ENOUGH, _MOST = 3, 8  # a racer ends when so many measurements are near its fastest, or after so many in any case

# Microbatches of each part of the batch; None: as even as can be, or as the recipe says.
Shares = tuple[int, ...] | None
# The update of a network under a plan, by some devices; it changes the network, and which samples this rank has.
MakeStep = Callable[[nn.Module, Plan, Ranks, Shares, Staging | None], TrainingStep]


@dataclass(frozen=True)
class Chosen:
    """The plan that runs, and sentences about how it came to be."""

    plan: Plan
    planned: Planned | None  # what the planner predicted; None where it could not
    notes: tuple[str, ...]

    @property
    def shares(self) -> Shares:
        """By which devices that are not equally fast end at the same time."""
        return self.planned.shares(self.plan) if self.planned is not None else None

    @property
    def staging(self) -> Staging | None:
        """In which passes, and in which order, it goes through the stages that the planner found."""
        return self.scored.staging if self.scored is not None else None

    @property
    def one_device_s(self) -> float | None:
        """Seconds of an update on one device, as predicted."""
        return self.planned.serial.seconds if self.planned is not None else None

    @property
    def scored(self) -> Scored | None:
        """What was predicted of this plan."""
        return self.planned.best if self.planned is not None else None


@dataclass
class Choice(Prepared):
    """What a plan is chosen for."""

    merge: int  # microbatches that one device takes in a pass
    rivals: Sequence[Plan]  # plans that race beside those that the planner finds
    make_step: MakeStep
    progress: Callable[[str, int, int], None]  # told of long work: what, done, total

    def __call__(self) -> Chosen:
        """Plan, with a race; a TooLargeError where no plan fits into the memory of the devices. All ranks call it."""
        plain = Plan.by_samples(self.ranks.num)
        if self.recipe.reproducible:
            return Chosen(plain, None, (f"plan auto is {plain}: reproducible runs divide samples alone",))
        release_freed_memory(self.device)
        limit, source = device_memory(self.device, self.ranks.on_host)
        limit = min(self.ranks.gather(limit))
        memory_limit = self.recipe.parallel.memory_bytes
        if memory_limit is not None and memory_limit < limit:
            limit, source = memory_limit, "as --memory-limit says"
        self.progress("timing the input", 0, 1)
        ahead = measure_input(self.recipe, self.data, self.device, self.ranks) or HostCost()
        try:
            planned = self._planned(limit, ahead)
        except TooLargeError:
            raise
        except ConvoyError as error:
            return Chosen(plain, None, (f"plan auto is {plain}: {error}",))
        best, took = planned.best, planned.measured
        predicted = min(planned.candidates, key=lambda one: one.seconds)
        within = f"within {size(int(limit))} of memory a device, {source}"
        staging = predicted.staging
        passes = f" in {predicted.passes} passes, schedule {staging.schedule}," if staging is not None else ""
        sentences = [f"{predicted.plan}{passes} is predicted to be fastest, {_each(predicted.seconds)} ({within})"]
        if took:
            result = ", ".join(f"{plan} {_each(seconds)}" for plan, seconds in took.items())
            least, most = (number * updates_in_a_row(self.device) for number in (_ENOUGH, _MOST))
            sentences.append(f"in a race over {least} to {most} updates each: {result}")
        warning = planned.warning(took.get(best.plan, best.seconds))
        sentences[0] = ": ".join(filter(None, ("plan auto", warning, sentences[0])))
        verdict = self.ranks.first(lambda: explained(planned).verdict.sentence)
        return Chosen(best.plan, planned, (*sentences, f"{best.plan}: {verdict}", *planned.notes))

    def _planned(self, limit: float, ahead: HostCost) -> Planned:
        workload = workload_in_passes(
            self.recipe,
            self.model,
            self.image_shape,
            self.quantities.sizes,
            self.merge,
            self.ranks.num,
            self.device,
            counts_of_passes(self.recipe, self.model, self.quantities.sizes, self.merge, self.ranks.num, self.probe),
            self.is_recorded,
        )
        return make_plan(
            workload,
            self.ranks.num,
            self.ranks,
            store=self.profiles,
            memory_limit=limit,
            rivals=self.rivals,
            input=ahead,
            progress=self.progress,
            race=partial(self._race, ahead),
        )

    def _race(self, ahead: HostCost, planned: Planned, racer: Scored, ranks: Ranks) -> float:
        """Seconds of an update under a plan, of the slowest rank, with what its input takes."""
        if racer.staging is None:
            try_out(planned.workload, planned.workload.place(racer.plan), ranks.rank)
        step = self.make_step(copied(self.model), racer.plan, ranks, planned.shares(racer.plan), racer.staging)
        samples = sum(len(piece.parts[step.rank]) for piece in step.passes)
        waits = max(ranks.gather(ahead.seconds(samples)))
        seconds = update_seconds(step, self.image_shape, self.device, ranks, enough=_ENOUGH, most=_MOST)
        return max(seconds, waits) if ahead.beside else seconds + waits


def _each(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms an update"
