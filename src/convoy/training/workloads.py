"""What a recipe's training is to the planner: passes, microbatches, precision, optimizer; and `--plan auto`: its plan
for a run, and the updates in which its best plans race.

How long a rank's samples take to get ready is measured before a plan is made.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import cache, partial

import torch
from torch import nn

from convoy.comm.collectives import Group
from convoy.comm.ranks import Ranks
from convoy.data.loader import num_workers
from convoy.engine.allocation import release_freed_memory
from convoy.errors import ConvoyError, TooLargeError
from convoy.graph.capture import copied
from convoy.planner.cost.costs import HostCost
from convoy.planner.cost.prediction import Scored
from convoy.planner.explanation import Explanation
from convoy.planner.planner import Planned, Question, make_plan
from convoy.planner.profiling import try_out
from convoy.planner.store import Device, device_memory, this_device
from convoy.planner.workload import Workload, workload_of
from convoy.plans.layout import balanced
from convoy.plans.plan import Plan
from convoy.plans.schedule import SCHEDULES, Schedule
from convoy.recipe.recipe import Recipe
from convoy.training.assemble import assemble
from convoy.training.build import TriedNetwork
from convoy.training.division import divide, soonest
from convoy.training.optimizer import optimizer_for
from convoy.training.precision import lowered
from convoy.training.session import ChosenPlan, Prepared
from convoy.training.step import update_seconds, updates_in_a_row, wait_for
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
    tried = TriedNetwork.of(recipe, model, image_shape, device, CHANGE)
    sizes, _ = tried.divisible_sizes(devices)
    merge, _ = tried.microbatches_in_pass(sizes)
    return workload_in_passes(tried, sizes, merge, devices, group)


def workload_in_passes(
    tried: TriedNetwork, sizes: tuple[int, ...], merge: int, devices: int, group: Group = None
) -> Workload:
    """The same where microbatches have these sizes, of which a device takes `merge` in a pass."""
    recipe = tried.recipe
    passes, passes_alone = (math.ceil(len(sizes) / (merge * number)) for number in (devices, 1))
    undivided = workload_of(
        tried.model,
        torch.empty(1, *tried.image_shape, device=tried.device),
        recipe.batch,
        name=recipe.model.name,
        passes=passes,
        channels_last=bool(recipe.channels_last),
        batch_norm=recipe.batch_norm,
        microbatch=sizes[0] if recipe.batch_norm == "microbatch" else 0,
        precision=lowered(recipe),
        recorded=tried.why_not_recorded(devices, group) is None,
        optimizer=partial(optimizer_for, recipe=recipe),
        optimizer_name=recipe.optimizer.name,
        recompute=recipe.recompute,
    )
    assert undivided.in_passes is not None
    divided, shares = undivided.in_passes, recipe.parallel.shares
    given_shares = shares if isinstance(shares, tuple) and len(shares) > 1 else None
    counts = tried.counts_of_passes(sizes, merge, devices)

    @cache
    def through_stages(passes: int) -> Workload:
        staged = in_passes(passes)
        return replace(staged, microbatch=min(staged.microbatch, staged.samples) if len(sizes) >= passes else 0)

    def in_passes(passes: int) -> Workload:
        return replace(divided(passes), counts=counts, in_passes=through_stages, schedules=schedules_of(recipe))

    workload = in_passes(passes)
    if passes_alone != passes:
        workload = replace(workload, alone=in_passes(passes_alone))

    def by_speed(slowdowns: Sequence[float]) -> Workload:
        if given_shares is not None:
            microbatches = divide(sizes, len(given_shares), given_shares).counts
        elif slowdowns and len(slowdowns) <= len(sizes):
            microbatches = soonest(len(sizes), slowdowns)
        else:
            return workload
        uneven = in_passes(math.ceil(max(microbatches) / merge))
        bound, alone = given_shares is not None, workload.alone or workload
        return replace(uneven, shares=microbatches, bound=bound, alone=alone)

    return workload if devices == 1 else replace(workload, by_speed=by_speed)


def schedules_of(recipe: Recipe) -> tuple[Schedule, ...]:
    """The orders of passes through stages that the recipe allows."""
    if recipe.parallel.schedule is not None:
        return (recipe.parallel.schedule,)
    # zero-bubble changes bits
    return tuple(schedule for schedule in SCHEDULES if schedule != "zero-bubble" or not recipe.reproducible)


def measuring(recipe: Recipe, device: torch.device, neighbours: int) -> Device:
    """The device as the planner names it for a recipe, where `neighbours` ranks of the host compute at once."""
    precision = str(lowered(recipe) or torch.float32).removeprefix("torch.")
    channels_last = bool(recipe.channels_last)
    return replace(this_device(device), precision=precision, channels_last=channels_last, neighbours=neighbours)


_LEAST, _LONGEST_S = 4, 3.0  # at least so many batches are measured, for so many seconds at most


def measure_input(ready: Prepared) -> HostCost | None:
    """Seconds of a sample on its way from where it is stored to the device, normalized, with all the workers that there
    may be; of the slowest rank. None where a picture cannot be read: the training will say so.

    All ranks call it, and get their parts of the first batches at the same time, as in training. Beside a GPU its host
    and worker processes load; those of a CPU take their time from the cores that compute.
    """
    recipe, ranks, pipeline = ready.recipe, ready.ranks, ready.new_pipeline()
    workers, _ = num_workers(ready.data, recipe.data)
    data = recipe.data.model_copy(update={"workers": workers})
    ready = replace(ready, recipe=recipe.model_copy(update={"data": data}))
    positions = balanced(recipe.batch, ranks.num)[ranks.rank]
    sample_s: float | None = None
    ranks.barrier()
    with suppress(ConvoyError), closing(ready.batches_of(positions, 0, 1 + max(_LEAST, workers))) as batches:
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
        sample_s = passed / max(1, samples)
    everyone = [seconds for seconds in ranks.gather(sample_s) if seconds is not None]
    if len(everyone) < ranks.num:
        return None
    return HostCost(per_sample=max(everyone), beside=ready.device.type == "cuda")


_ENOUGH, _MOST = 3, 8  # a racer ends when so many measurements are near its fastest, or after so many in any case


def choose_plan(ready: Prepared, rivals: Sequence[Plan], progress: Callable[[str, int, int], None]) -> ChosenPlan:
    """Plan, with a race in which `rivals` take part too; a TooLargeError where no plan fits into the memory of the
    devices. `progress` is told of long work: what, done, total. All ranks call it.
    """
    recipe, ranks, device, sizes = ready.recipe, ready.ranks, ready.device, ready.quantities.sizes
    plain = Plan.by_samples(ranks.num)
    if recipe.reproducible:
        return ChosenPlan(plain, (f"plan auto is {plain}: reproducible runs divide samples alone",))
    merge, _ = ranks.broadcast(ready.microbatches_in_pass(sizes))
    release_freed_memory(device)
    limit, source = device_memory(device, ranks.on_host)
    limit = min(ranks.gather(limit))
    memory_limit = recipe.parallel.memory_bytes
    if memory_limit is not None and memory_limit < limit:
        limit, source = memory_limit, "as --memory-limit says"
    progress("timing the input", 0, 1)
    ahead = measure_input(ready) or HostCost()

    def race(planned: Planned, racer: Scored, ranks: Ranks) -> float:
        """Seconds of an update under a plan, of the slowest rank, with what its input takes."""
        if racer.staging is None:
            try_out(planned.workload, planned.workload.place(racer.plan), ranks.rank)
        chosen = ChosenPlan(racer.plan, shares=planned.shares(racer.plan), staging=racer.staging)
        step = assemble(replace(ready, model=copied(ready.model), ranks=ranks), chosen).step()
        samples = sum(len(piece.parts[step.rank]) for piece in step.passes)
        waits = max(ranks.gather(ahead.seconds(samples)))
        seconds = update_seconds(step, ranks, enough=_ENOUGH, most=_MOST)
        return max(seconds, waits) if ahead.beside else seconds + waits

    try:
        workload = workload_in_passes(ready, sizes, merge, ranks.num, ranks.group)
        question = Question(workload, ranks.num, store=ready.profiles, memory_limit=limit, rivals=rivals, input=ahead)
        planned = make_plan(question, ranks, progress, race)
    except TooLargeError:
        raise
    except ConvoyError as error:
        return ChosenPlan(plain, (f"plan auto is {plain}: {error}",))
    best = planned.best
    verdict = ranks.first(lambda: Explanation(planned).verdict.sentence)
    sentences = _sentences(planned, device, f"within {size(int(limit))} of memory a device, {source}")
    notes = (*sentences, f"{best.plan}: {verdict}", *planned.notes)
    return ChosenPlan(best.plan, notes, best, planned.shares(best.plan), best.staging, planned.serial.seconds)


def _sentences(planned: Planned, device: torch.device, within: str) -> list[str]:
    """What was predicted to be fastest, and what the race took."""
    best, took = planned.best, planned.measured
    predicted = min(planned.candidates, key=lambda scored: scored.seconds)
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
