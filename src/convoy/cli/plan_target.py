"""`convoy plan --target STUDY`: which batch on how many devices reaches a target soonest, and which cheapest."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial

import click

from convoy.bench.batches import BatchStudy
from convoy.cli.plan_run import predicted, workload_at
from convoy.cli.requests import PlanRequest
from convoy.errors import ConvoyError
from convoy.files import expanded
from convoy.plans.plan import Plan
from convoy.training.recipe import Recipe
from convoy.units import plural, seconds, table


@dataclass(frozen=True)
class Way:
    """A batch on some devices, and what the target takes there; the price is in device hours where none is named."""

    machine: str
    devices: int
    batch: int
    updates: float
    seconds: float
    price: float
    measured: bool

    def __str__(self) -> str:
        return f"a batch of {self.batch} on {plural(self.devices, 'device')} of {self.machine}, {seconds(self.seconds)}"


def run_target(request: PlanRequest, recipe: Recipe) -> int:
    """Print the best batch for each number of devices, and the best of all; the exit status."""
    study = BatchStudy.read(expanded(request.target))
    if study.facts.model != recipe.model.name:
        raise ConvoyError(f"--target {request.target} is a study of {study.facts.model}, not of {recipe.model.name}")
    fewest = study.fewest()
    if not fewest:
        raise ConvoyError(f"--target {request.target}: no training of it has reached its target yet: go on with it")
    ways = list(_here(study, fewest) if request.on is None else _on(request, recipe, fewest))
    if not ways:
        raise ConvoyError(
            f"--target {request.target}: none of its batches can be predicted there: ask for more devices"
        )
    if request.as_json:
        click.echo(json.dumps([asdict(way) for way in ways], indent=2, allow_nan=False))
        return 0
    best: dict[tuple[str, int], Way] = {}
    for way in sorted(ways, key=lambda way: -way.seconds):
        best[way.machine, way.devices] = way
    cost = "price" if request.prices else "device hours"
    heads = ["machine", "devices", "batch", "updates", "time", cost, ""]
    rows = sorted(best.values(), key=lambda way: (way.machine, way.devices))
    cells = ([w.machine, str(w.devices), str(w.batch), f"{w.updates:,g}", seconds(w.seconds)] for w in rows)
    ends = ([f"{w.price:.3g}", "measured" if w.measured else "predicted"] for w in rows)
    lines = table(heads, [[*c, *e] for c, e in zip(cells, ends, strict=True)], heads[1:6])
    click.echo("\n".join([f"{recipe.model.name} to {study.facts.target:.2%}: the fastest batch", "", *lines, ""]))
    click.echo(f"soonest: {min(ways, key=lambda way: way.seconds)}")
    cheapest = min(ways, key=lambda way: (way.price, way.seconds))
    click.echo(f"cheapest: {cheapest}, {cost} {cheapest.price:.3g}")
    return 0


def _here(study: BatchStudy, fewest: dict[int, float]) -> Iterator[Way]:
    """As the study has measured and predicted updates."""
    for step in study.step_times:
        if step.batch in fewest:
            took_s, name = fewest[step.batch] * step.seconds, str(study.machine.get("machine", "this machine"))
            hours = took_s * step.devices / 3600
            yield Way(name, step.devices, step.batch, fewest[step.batch], took_s, hours, step.measured)


def _on(request: PlanRequest, recipe: Recipe, fewest: dict[int, float]) -> Iterator[Way]:
    """On 1, 2, 4, … of the devices of each machine, under data parallelism, as far as it fits into their memory."""
    for machine, hour in zip(request.machines, request.prices or [1.0] * len(request.machines), strict=True):
        count = len(machine.devices)
        for number in sorted({1 << power for power in range(count.bit_length())} | {count}):
            part = machine.first(number)
            for batch in fewest if part is not None else ():
                at_batch = recipe.model_copy(update={"batch": batch})
                plans = [Plan.by_samples(number)] if number > 1 else []
                try:
                    assert part is not None
                    rate = predicted(
                        request, at_batch, part, cache(partial(workload_at, request, at_batch)), plans
                    ).best
                except ConvoyError:
                    continue
                took_s = fewest[batch] * batch / rate
                yield Way(machine.label, number, batch, fewest[batch], took_s, took_s * number * hour / 3600, False)
