"""What a recipe's training is to the planner: passes, microbatches, precision, optimizer."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import nn
from torch.optim import Optimizer

from convoy.comm.collectives import Group
from convoy.engine import Probe, microbatch_sizes
from convoy.planner import Workload, workload_of
from convoy.planner.cost.store import Device, this_device
from convoy.plans.schedule import PARTS_PER_STAGE, SCHEDULES, Schedule
from convoy.training.build import divisible_sizes, is_recorded, merged, probed, why_not_recorded
from convoy.training.derived import num_microbatches
from convoy.training.division import divide, soonest
from convoy.training.optimizers import create_optimizer, learning_rate
from convoy.training.precision import lowered
from convoy.training.recipe import Recipe

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
    return this_device(device, precision=precision, channels_last=bool(recipe.channels_last), neighbours=neighbours)


def optimizer_for(parameters: list[nn.Parameter], recipe: Recipe) -> Optimizer:
    """That of a recipe, for some parameters."""
    return create_optimizer(
        nn.ParameterList(parameters), recipe.optimizer, learning_rate(recipe.optimizer, recipe.batch)
    )
