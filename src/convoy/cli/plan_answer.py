"""How `convoy plan` answers: plans on this rank, and on the first one prints and writes what came of it."""

import json
from dataclasses import replace

import click
import torch

from convoy.cli.measuring_progress import Progress
from convoy.cli.output_files import written
from convoy.cli.plan_network import assumed, network_of
from convoy.cli.plan_request import Request
from convoy.cost.costs import Around
from convoy.cost.store import ProfileStore
from convoy.cost.trace import events, trace
from convoy.engine.allocation import keep_freed_memory
from convoy.experiments.plan_page import plan_page
from convoy.planning import Planned, Ranks, make_plan
from convoy.planning.document import document
from convoy.planning.link_names import links_named
from convoy.planning.remembered import remember
from convoy.planning.text import explanation_text
from convoy.planning.verdict import Explained, explained
from convoy.plans.check_plan import check_patterns
from convoy.plans.place import COMPUTE
from convoy.terminal import Console
from convoy.training.recipe import Recipe
from convoy.training.derived import num_microbatches
from convoy.training.numerics import set_numerics
from convoy.training.optimization.precision import check_precision
from convoy.training.planning.device_memory import device_memory
from convoy.training.planning.workloads import measuring, workload_of_recipe


def answer(request: Request, recipe: Recipe, devices: int, ranks: Ranks, device: torch.device) -> None:
    """Plan on this rank, and on the first one print and write what came of it. All ranks call it.

    Args:
        request: what is asked.
        recipe: of the network.
        devices: that the plan is for.
        ranks: that measure.
        device: this rank's.

    Raises:
        ConvoyError: there is no such plan, or the network cannot be planned for.
    """
    if devices > 1:
        keep_freed_memory(device)  # as it will be in training
    set_numerics(recipe)
    check_precision(recipe.precision, device)
    model, shape = network_of(request, recipe, device)
    guess = assumed(request, recipe)
    if ranks.rank == 0 and guess is not None:
        click.echo(guess, err=True)
    workload = workload_of_recipe(recipe, model, shape, devices, device)
    layers = [call.layer for call in workload.graph.calls if call.op in COMPUTE]
    scores = request.plans
    for plan in scores:
        check_patterns(plan, layers, [name for name, _ in model.named_modules()])
    links, notes = None, [guess] if guess is not None else []
    if request.link is not None:
        links, note = links_named(request.link, device.type == "cpu")
        notes.append(note)
    pieces = num_microbatches(recipe)
    if recipe.batch_norm == "microbatch" and pieces < devices:
        notes.append(
            f"the batch is {pieces} microbatch{'' if pieces == 1 else 'es'}, which stay whole, so no plan divides the "
            f"samples over {devices} devices: --microbatches {devices} would let it"
        )
    if devices > ranks.num:
        notes.append(f"each device is taken to be as this one: {_describe(device)}")
    with Progress(Console(stderr=True, highlight=False, quiet=ranks.rank > 0)) as progress:
        planned = make_plan(
            workload,
            devices,
            ranks,
            links=links,
            store=ProfileStore() if request.keep else None,
            fixes=request.fixes,
            memory_limit=request.memory,
            room=min(ranks.gather(device_memory(device, ranks.on_host)[0])),
            plans=scores,
            input=_input(request, device),
            progress=progress,
        )
    if ranks.rank == 0:
        if request.keep and ranks.num == devices > 1:
            here = measuring(recipe, device, ranks.on_host)
            remember(ProfileStore(), here, devices, recipe.optimizer.name, planned.costs)
        _show(request, replace(planned, notes=(*notes, *planned.notes)))


def _input(request: Request, device: torch.device) -> Around | None:
    """What the input takes: beside the computation on a GPU, from the cores that compute on a CPU."""
    if request.images_per_second is None:
        return None
    return Around(per_sample=1 / request.images_per_second, beside=device.type == "cuda")


def _show(request: Request, planned: Planned) -> None:
    found = explained(planned)
    files = request.files
    if files.out is not None:
        written("--out", files.out, _yaml(request, found))
    if files.html is not None:
        written("--html", files.html, plan_page(found, request.command))
    if files.trace is not None:
        written("--trace", files.trace, json.dumps(trace(predicted=events(found.scored.timeline)), allow_nan=False))
    if request.as_json:
        click.echo(json.dumps(document(found), indent=2, allow_nan=False))
        return
    click.echo(explanation_text(found), nl=False)
    for path, what in ((files.out, "plan"), (files.html, "page"), (files.trace, "trace")):
        if path is not None:
            click.echo(f"{what}: {path}")


def _yaml(request: Request, found: Explained) -> str:
    """The plan with a word on where it comes from."""
    seconds = found.scored.seconds
    said = [
        f"# {line}"
        for line in (
            request.command.replace("\n", " "),
            f"predicted: {1e3 * seconds:.4g} ms an update, {found.speedup:.3g} times as fast as one device",
        )
    ]
    return "\n".join([*said, found.scored.plan.to_yaml()])


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    number = torch.get_num_threads()
    return f"{number} core{'s' if number > 1 else ''} of this machine"
