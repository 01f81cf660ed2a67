"""`convoy plan --target STUDY`: which batch on how many devices reaches a target soonest, and which cheapest."""

import json
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import click

from convoy.bench.batches import BatchStudy
from convoy.cli import options
from convoy.cli.plan_run import predicted, workload_at
from convoy.cli.requests import PlanRequest
from convoy.errors import ConvoyError
from convoy.files import expanded
from convoy.plans.plan import Plan
from convoy.training.recipe import Recipe
from convoy.units import plural, seconds

Way = dict[str, Any]  # a batch on some devices: what the target takes there


def run_target(request: PlanRequest, recipe: Recipe) -> int:
    """Print the best batch for each number of devices, and the best of all; the exit status."""
    study, target = BatchStudy.read(expanded(request.target)), f"--target {request.target}"
    if study.facts["model"] != recipe.model.name:
        raise ConvoyError(f"{target} is a study of {study.facts['model']}, not of {recipe.model.name}: name another")
    if not study.reached():
        raise ConvoyError(f"{target}: no training of it has reached its target yet: go on with it")
    ways = list(_here(study) if request.on is None else _on(request, recipe, study))
    if not ways:
        raise ConvoyError(f"{target}: none of its batches can be predicted there: ask for more devices")
    if request.as_json:
        click.echo(json.dumps(ways, indent=2, allow_nan=False))
        return 0
    fastest = {(way["machine"], way["devices"]): way for way in sorted(ways, key=lambda way: -way["seconds"])}
    cost = "price" if request.prices else "device_hours"
    words = {"seconds": seconds, cost: "{:.3g}".format, "updates": "{:,g}".format}
    click.echo(f"{recipe.model.name} to {study.facts['target']:.2%}: the fastest batch\n")
    options.show([fastest[key] for key in sorted(fastest)], False, [*ways[0]][1:6], words)
    for name, key in (("soonest", "seconds"), ("cheapest", cost)):
        way = min(ways, key=lambda way: (way[key], way["seconds"]))
        where = f"{plural(way['devices'], 'device')} of {way['machine']}"
        click.echo(f"{name}: a batch of {way['batch']} on {where}, {seconds(way['seconds'])}, {cost} {way[cost]:.3g}")
    return 0


def _here(study: BatchStudy) -> Iterator[Way]:
    """As the study has measured and predicted updates."""
    updates = {row.batch: row.updates for row in study.reached()}
    for step in study.step_times:
        if step.batch in updates:
            way = {"machine": study.facts["machine"], "devices": step.devices, "batch": step.batch}
            yield _way(way, updates[step.batch], step.seconds, None, "measured" if step.measured else "predicted")


def _on(request: PlanRequest, recipe: Recipe, study: BatchStudy) -> Iterator[Way]:
    """On 1, 2, 4, … of the devices of each machine, under data parallelism, as far as it fits into their memory."""
    for place, machine in enumerate(request.machines):
        count, price = len(machine.devices), request.prices[place] if request.prices else None
        for number in sorted({1 << power for power in range(count.bit_length())} | {count}):
            part = machine.first(number)
            plans = [Plan.by_samples(number)] if number > 1 else []
            asked = PlanRequest(request.arguments, {**vars(request), "plans": plans})
            for row in study.reached() if part is not None else ():
                at_batch = recipe.model_copy(update={"batch": row.batch})
                try:
                    assert part is not None
                    rate = predicted(asked, at_batch, part, cache(partial(workload_at, request, at_batch))).best
                except ConvoyError:
                    continue
                way = {"machine": machine.label, "devices": number, "batch": row.batch}
                yield _way(way, row.updates, row.batch / rate, price, "predicted")


def _way(way: Way, updates: float, update_s: float, price: float | None, how: str) -> Way:
    took_s = updates * update_s
    hours = took_s * way["devices"] / 3600
    cost = {"device_hours": hours} if price is None else {"price": hours * price}
    return way | {"updates": updates, "seconds": took_s} | cost | {"how": how}
