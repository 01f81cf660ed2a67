"""`convoy plan --target STUDY`: which batch on how many devices reaches a target soonest, and which cheapest."""

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from typing import Any

import click

from convoy.bench.batches import BatchRow, BatchStudy
from convoy.cli import options
from convoy.cli.plan_run import predicted, workload_at
from convoy.cli.requests import PlanRequest
from convoy.errors import ConvoyError
from convoy.files import expanded
from convoy.recipe.recipe import Recipe
from convoy.units import plural, seconds


def run_target(request: PlanRequest, recipe: Recipe) -> int:
    """Print the best batch for each number of devices, and the best of all; the exit status."""
    study, target = BatchStudy.read(expanded(request.target)), f"--target {request.target}"
    if study.facts["model"] != recipe.model.name:
        raise ConvoyError(f"{target} is a study of {study.facts['model']}, not of {recipe.model.name}: name another")
    if not study.reached():
        raise ConvoyError(f"{target}: no training of it has reached its target yet: go on with it")
    cost = "price" if request.prices else "device_hours"
    ways: list[dict[str, Any]] = [
        {"machine": machine, "devices": devices, "batch": row.batch, "updates": row.updates, "seconds": took_s}
        | {cost: took_s * devices / 3600 * price}
        for row, machine, devices, took_s, price in _ways(request, recipe, study)
    ]
    if not ways:
        raise ConvoyError(f"{target}: none of its batches can be predicted there: ask for more devices")
    if request.as_json:
        click.echo(json.dumps(ways, indent=2, allow_nan=False))
        return 0
    fastest = {(way["machine"], way["devices"]): way for way in sorted(ways, key=lambda way: -way["seconds"])}
    words = {"seconds": seconds, cost: "{:.3g}".format, "updates": "{:,g}".format}
    click.echo(f"{recipe.model.name} to {study.facts['target']:.2%}: the fastest batch\n")
    options.show([fastest[key] for key in sorted(fastest)], False, [*ways[0]][1:6], words)
    for name, key in (("soonest", "seconds"), ("cheapest", cost)):
        way = min(ways, key=lambda way: (way[key], way["seconds"]))
        where = f"{plural(way['devices'], 'device')} of {way['machine']}"
        price = f"{cost.replace('_', ' ')} {way[cost]:.3g}"
        click.echo(f"{name}: a batch of {way['batch']} on {where}, {seconds(way['seconds'])}, {price}")
    return 0


Way = tuple[BatchRow, str, int, float, float]  # a batch, machine and devices; seconds; the price of a device and hour


def _ways(request: PlanRequest, recipe: Recipe, study: BatchStudy) -> Iterator[Way]:
    """On the machine of the study, or on those of --on, as far as it fits into their memory."""
    for row, devices, took_s in study.times() if request.on is None else ():
        yield row, study.facts["machine"], devices, took_s, 1.0
    for machine, price in zip(request.machines, request.prices or [1.0] * len(request.machines), strict=True):
        for row in study.reached():
            at_batch = recipe.model_copy(update={"batch": row.batch})
            with suppress(ConvoyError):
                rate = predicted(request, at_batch, machine, cache(partial(workload_at, request, at_batch))).best
                yield row, machine.label, len(machine.devices), row.updates * row.batch / rate, price
