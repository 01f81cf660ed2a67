"""What a recipe's training is to the planner: passes, microbatches, precision, optimizer; and `--plan auto`: its plan
for a run, and the updates in which its best plans race.

How long a rank's samples take to get ready is measured before a plan is made.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import nn
from torch.optim import Optimizer

from convoy.comm.collectives import Group
from convoy.comm.ranks import Ranks
from convoy.data import num_workers
from convoy.engine import Probe, microbatch_sizes
from convoy.engine.allocation import release_freed_memory
from convoy.errors import ConvoyError, TooLargeError
from convoy.graph.given import copied
from convoy.planner import Planned, Scored, Workload, make_plan, workload_of
from convoy.planner.cost.costs import HostCost
from convoy.planner.cost.pipeline import Staging
from convoy.planner.cost.store import Device, device_memory, this_device
from convoy.planner.profiling import try_out
from convoy.planner.verdict import Explained
from convoy.plans.layout import balanced
from convoy.plans.plan import Plan
from convoy.plans.schedule import PARTS_PER_STAGE, SCHEDULES, Schedule
from convoy.training.build import divisible_sizes, is_recorded, merged, probed, why_not_recorded
from convoy.training.derived import num_microbatches
from convoy.training.division import divide, soonest
from convoy.training.optimizers import create_optimizer, learning_rate
from convoy.training.precision import lowered
from convoy.training.recipe import Recipe
from convoy.training.session import Prepared
from convoy.training.step import TrainingStep, update_seconds, updates_in_a_row, wait_for
from convoy.units import size

CHANGE = "--image-size, the microbatches or the model"  # what a user could change where a network cannot be planned for


def workload_of_recipe(
    recipe: Recipe,
    model: nn.Module,
    image_shape: tuple[int, int, int],
    devices: int,
    device: torch.device,
    group: Group = None,
) -> Workload:
    """One weight update of a settled recipe on some number of devices; the data are not read, and the model is left as
    it is, on this process's `device`. A ConvoyError where the network does not take such images (channels, height,
    width), or cannot be seen as one graph.
    """
    sizes = microbatch_sizes(recipe.batch, num_microbatches(recipe))
    probe = probed(model, recipe, image_shape, sizes, device, CHANGE)
    sizes, _ = divisible_sizes(recipe, model, devices, probe)
    merge, _ = merged(recipe, probe, sizes, device)
    counts = counts_of_passes(recipe, model, sizes, merge, devices, probe)
    recorded = is_recorded(recipe, device, why_not_recorded(recipe, probe, devices, device, group))
    return workload_in_passes(recipe, model, image_shape, sizes, merge, devices, device, counts, recorded)


def counts_of_passes(
    recipe: Recipe, model: nn.Module, sizes: tuple[int, ...], merge: int, devices: int, found: Probe
) -> tuple[int, ...]:
    """Into how many passes through stages an update may be divided, of `merge` microbatches at a time: none where the
    batch has given parts, or the network is compiled.
    """
    asked = recipe.parallel.shares
    if devices == 1 or recipe.compile or (isinstance(asked, tuple) and len(asked) > 1):
        return ()
    finest, _ = divisible_sizes(recipe, model, devices, found, useful=recipe.batch)
    together = merge * max(sizes) // max(finest) * devices
    counts = {-(-len(finest) // number) for number in range(1, min(len(finest), together) + 1)}
    if len(finest) == recipe.batch:  # of any size, so that the trainer makes as many as are usual for a plan
        usual = {PARTS_PER_STAGE * stages for stages in range(2, devices + 1) if devices % stages == 0}
        counts |= {number for number in usual if max(len(sizes), min(counts)) <= number <= len(finest)}
    return tuple(sorted(counts))


def workload_in_passes(
    recipe: Recipe,
    model: nn.Module,
    image_shape: tuple[int, int, int],
    sizes: tuple[int, ...],
    merge: int,
    devices: int,
    device: torch.device,
    counts: Sequence[int] = (),
    recorded: bool = False,
) -> Workload:
    """The same where microbatches have these sizes, of which a device takes `merge` in a pass; an update goes through
    stages in any of `counts` passes."""
    together, alone = (math.ceil(len(sizes) / (merge * number)) for number in (devices, 1))
    first = workload_of(
        model,
        torch.empty(1, *image_shape, device=device),
        recipe.batch,
        name=recipe.model.name,
        passes=together,
        channels_last=bool(recipe.channels_last),
        batch_norm=recipe.batch_norm,
        microbatch=sizes[0] if recipe.batch_norm == "microbatch" else 0,
        precision=lowered(recipe),
        recorded=recorded,
        optimizer=partial(optimizer_for, recipe=recipe),
        optimizer_name=recipe.optimizer.name,
        recompute=recipe.recompute,
    )
    assert first.in_passes is not None
    divided = first.in_passes

    @cache
    def through_stages(passes: int) -> Workload:
        found = in_passes(passes)
        return replace(found, microbatch=min(found.microbatch, found.samples) if len(sizes) >= passes else 0)

    schedules = schedules_of(recipe)

    def in_passes(passes: int) -> Workload:
        return replace(divided(passes), counts=tuple(counts), in_passes=through_stages, schedules=schedules)

    even = in_passes(together)
    even = even if alone == together else replace(even, alone=in_passes(alone))

    def by_speed(slowdowns: Sequence[float]) -> Workload:
        asked = recipe.parallel.shares
        bound = isinstance(asked, tuple) and len(asked) > 1
        if isinstance(asked, tuple) and bound:
            counts = divide(sizes, len(asked), asked).counts
        elif slowdowns and len(slowdowns) <= len(sizes):
            counts = soonest(len(sizes), slowdowns)
        else:
            return even
        return replace(in_passes(math.ceil(max(counts) / merge)), shares=counts, bound=bound, alone=even.alone or even)

    return even if devices == 1 else replace(even, by_speed=by_speed)


def schedules_of(recipe: Recipe) -> tuple[Schedule, ...]:
    """The orders of passes through stages that the recipe allows."""
    if recipe.parallel.schedule is not None:
        return (recipe.parallel.schedule,)
    return tuple(one for one in SCHEDULES if one != "zero-bubble" or not recipe.reproducible)  # whose bits it changes


def measuring(recipe: Recipe, device: torch.device, neighbours: int) -> Device:
    """The device as the planner names it for a recipe, where `neighbours` ranks of the host compute at once."""
    precision = str(lowered(recipe) or torch.float32).removeprefix("torch.")
    channels_last = bool(recipe.channels_last)
    return replace(this_device(device), precision=precision, channels_last=channels_last, neighbours=neighbours)


def optimizer_for(parameters: list[nn.Parameter], recipe: Recipe) -> Optimizer:
    """That of a recipe, for some parameters."""
    return create_optimizer(
        nn.ParameterList(parameters), recipe.optimizer, learning_rate(recipe.optimizer, recipe.batch)
    )


_LEAST, _LONGEST_S = 4, 3.0  # at least so many batches are measured, for so many seconds at most


def measure_input(ready: Prepared) -> HostCost | None:
    """Seconds of a sample on its way from where it is stored to the device, normalized; of the slowest rank. None where
    a picture cannot be read: the training will say so.

    All ranks call it, and get their parts of the first batches at the same time, as in training. Beside a GPU its host
    and worker processes load; those of a CPU take their time from the cores that compute.
    """
    ready.ranks.barrier()
    local_s: float | None = None
    with suppress(ConvoyError):
        local_s = _seconds(ready)
    everyone = ready.ranks.gather(local_s)
    measured_s = [seconds for seconds in everyone if seconds is not None]
    if len(measured_s) < len(everyone):
        return None
    return HostCost(per_sample=max(measured_s), beside=ready.device.type == "cuda")


def _seconds(ready: Prepared) -> float:
    """Of a sample here, with all the workers that there may be."""
    positions = balanced(ready.recipe.batch, ready.ranks.num)[ready.ranks.rank]
    assert isinstance(positions, range)
    pipeline = ready.new_pipeline()
    workers = num_workers(ready.data, ready.recipe.data)[0]
    with closing(ready.batches_of(positions, 0, 1 + max(_LEAST, workers), workers=workers)) as batches:
        pipeline(next(batches))  # workers have started, and memory is there
        wait_for(ready.device)
        began, samples, passed = time.perf_counter(), 0, 0.0
        for batch in batches:
            pipeline(batch)
            wait_for(ready.device)
            samples += len(batch.images)
            passed = time.perf_counter() - began
            if passed > _LONGEST_S:
                break
    return passed / max(1, samples)


_ENOUGH, _MOST = 3, 8  # a racer ends when so many measurements are near its fastest, or after so many in any case

# Microbatches of each part of the batch; None: as even as can be, or as the recipe says.
Shares = tuple[int, ...] | None
# The update of a network under a plan, by some devices; it changes the network, and which samples this rank has.
MakeStep = Callable[[nn.Module, Ranks, Plan, Shares, Staging | None], TrainingStep]


@dataclass(frozen=True)
class Chosen:
    """The plan that runs, sentences about how it came to be, and what the planner predicted of it, if it could."""

    plan: Plan
    notes: tuple[str, ...]
    scored: Scored | None = None
    shares: Shares = None  # by which devices that are not equally fast end at the same time
    staging: Staging | None = None  # in which passes, and in which order, it goes through the stages
    one_device_s: float | None = None  # predicted seconds of an update on one device


def choose_plan(
    ready: Prepared,
    merge: int,
    rivals: Sequence[Plan],
    make_step: MakeStep,
    progress: Callable[[str, int, int], None],
) -> Chosen:
    """Plan, with a race in which `rivals` take part too; a TooLargeError where no plan fits into the memory of the
    devices. A device takes `merge` microbatches in a pass; `progress` is told of long work: what, done, total. All
    ranks call it.
    """
    recipe, ranks, device = ready.recipe, ready.ranks, ready.device
    plain = Plan.by_samples(ranks.num)
    if recipe.reproducible:
        return Chosen(plain, (f"plan auto is {plain}: reproducible runs divide samples alone",))
    release_freed_memory(device)
    limit, source = device_memory(device, ranks.on_host)
    limit = min(ranks.gather(limit))
    memory_limit = recipe.parallel.memory_bytes
    if memory_limit is not None and memory_limit < limit:
        limit, source = memory_limit, "as --memory-limit says"
    progress("timing the input", 0, 1)
    ahead = measure_input(ready) or HostCost()
    sizes = ready.quantities.sizes
    counts = counts_of_passes(recipe, ready.model, sizes, merge, ranks.num, ready.probe)

    def race(planned: Planned, racer: Scored, ranks: Ranks) -> float:
        """Seconds of an update under a plan, of the slowest rank, with what its input takes."""
        if racer.staging is None:
            try_out(planned.workload, planned.workload.place(racer.plan), ranks.rank)
        step = make_step(copied(ready.model), ranks, racer.plan, planned.shares(racer.plan), racer.staging)
        samples = sum(len(piece.parts[step.rank]) for piece in step.passes)
        waits = max(ranks.gather(ahead.seconds(samples)))
        seconds = update_seconds(step, ranks, enough=_ENOUGH, most=_MOST)
        return max(seconds, waits) if ahead.beside else seconds + waits

    try:
        workload = workload_in_passes(
            recipe, ready.model, ready.image_shape, sizes, merge, ranks.num, device, counts, ready.is_recorded
        )
        planned = make_plan(
            workload,
            ranks.num,
            ranks,
            store=ready.profiles,
            memory_limit=limit,
            rivals=rivals,
            input=ahead,
            progress=progress,
            race=race,
        )
    except TooLargeError:
        raise
    except ConvoyError as error:
        return Chosen(plain, (f"plan auto is {plain}: {error}",))
    best = planned.best
    verdict = ranks.first(lambda: Explained(planned).verdict.sentence)
    sentences = _sentences(planned, device, f"within {size(int(limit))} of memory a device, {source}")
    notes = (*sentences, f"{best.plan}: {verdict}", *planned.notes)
    return Chosen(best.plan, notes, best, planned.shares(best.plan), best.staging, planned.serial.seconds)


def _sentences(planned: Planned, device: torch.device, within: str) -> list[str]:
    """What was predicted to be fastest, and what the race took."""
    best, took = planned.best, planned.measured
    predicted = min(planned.candidates, key=lambda one: one.seconds)
    staging = predicted.staging
    passes = f" in {predicted.passes} passes, schedule {staging.schedule}," if staging is not None else ""
    sentence = f"{predicted.plan}{passes} is predicted to be fastest, {_each(predicted.seconds)} ({within})"
    warning = planned.warning(took.get(best.plan, best.seconds))
    sentences = [": ".join(filter(None, ("plan auto", warning, sentence)))]
    if took:
        result = ", ".join(f"{plan} {_each(seconds)}" for plan, seconds in took.items())
        least, most = (number * updates_in_a_row(device) for number in (_ENOUGH, _MOST))
        sentences.append(f"in a race over {least} to {most} updates each: {result}")
    return sentences


def _each(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms an update"
