"""How long a rank's samples take to get ready, measured before a plan is made."""

import time
from contextlib import closing

import torch

from convoy.cost.costs import Around
from convoy.data import DataSet, Order, num_workers, training_batches
from convoy.errors import ConvoyError
from convoy.plans.layout import balanced
from convoy.training.ranks.devices import Devices
from convoy.training.recipe import Recipe
from convoy.training.step import InputPipeline

_LEAST, _LONGEST_S = 4, 3.0
"""Batches that are measured, but for as long as that."""


def measure_input(recipe: Recipe, data: DataSet, device: torch.device, devices: Devices) -> Around | None:
    """Seconds of a sample on its way from where it is stored to the device, normalised; of the slowest rank.

    All ranks call it, and get their parts of the first batches at the same time, as in training. Worker processes of a
    GPU work beside it; those of a CPU take their time from the cores that compute.

    Returns:
        What a pass takes, or None where a picture cannot be read: the training will say so.
    """
    devices.barrier()
    try:
        own: float | None = _seconds(recipe, data, device, devices)
    except ConvoyError:
        own = None
    everyone = devices.gather(own)
    known = [seconds for seconds in everyone if seconds is not None]
    if len(known) < len(everyone):
        return None
    beside = device.type == "cuda" and num_workers(data, recipe.data)[0] > 0
    return Around(per_sample=max(known), beside=beside)


def _seconds(recipe: Recipe, data: DataSet, device: torch.device, devices: Devices) -> float:
    """Of a sample here. Workers get batches ready in turns, so that as many as there are workers make a round."""
    positions = balanced(recipe.batch, devices.num)[devices.rank]
    assert isinstance(positions, range)
    memory_format = torch.channels_last if recipe.channels_last else torch.contiguous_format
    pipeline = InputPipeline(data, device, memory_format)
    batches = training_batches(
        data,
        recipe.data,
        Order(len(data.train), recipe.batch, recipe.seed),
        first_update=0,
        num_updates=1 + max(_LEAST, num_workers(data, recipe.data)[0]),
        seed=recipe.seed,
        positions=positions,
        pin_memory=device.type == "cuda",
    )
    with closing(batches):
        pipeline(next(batches))  # workers have started, and memory is there
        _finish(device)
        began, samples, passed = time.perf_counter(), 0, 0.0
        for batch in batches:
            pipeline(batch)
            _finish(device)
            samples += len(batch.images)
            passed = time.perf_counter() - began
            if passed > _LONGEST_S:
                break
    return passed / max(1, samples)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
