"""Where `convoy plan` runs: on this device, or on as many as the plan is for, where this machine has them.

The network that `convoy plan` is asked about.

How `convoy plan` answers: plans on this rank, and on the first one prints and writes what came of it.
"""

import json

import click
import torch
from torch import nn

from convoy import launch, models
from convoy.cli.measuring_progress import Progress
from convoy.cli.options import is_verbose, written
from convoy.cli.plan_request import Request
from convoy.comm.groups import leave
from convoy.comm.ranks import Ranks
from convoy.engine.allocation import keep_freed_memory
from convoy.launch import place as cores
from convoy.planner import Planned, make_plan
from convoy.planner.cost.costs import HostCost
from convoy.planner.cost.store import ProfileStore
from convoy.planner.cost.trace import trace
from convoy.planner.search.layers import Layers
from convoy.planner.text import document, explanation_text
from convoy.planner.verdict import Explained, explained
from convoy.plans.fit import check_patterns
from convoy.plans.place import COMPUTE
from convoy.report.plan_page import plan_page
from convoy.terminal import Console
from convoy.training import choose_device
from convoy.training.derived import num_microbatches
from convoy.training.environment import join_ranks
from convoy.training.precision import check_precision, set_numerics
from convoy.training.recipe import Recipe
from convoy.training.workloads import workload_of_recipe

ASSUMED_SIZE = 224
"""Pixels of an image's sides where neither the request nor the network says."""


def network_of(request: Request, recipe: Recipe, device: torch.device) -> tuple[nn.Module, tuple[int, int, int]]:
    """The network with fresh weights, and the shape of its images."""
    name, settings = recipe.model.name, dict(recipe.model.options)
    usual = models.describe(name).input_shape
    size = request.image_size or recipe.data.image_size or (usual[1] if usual is not None else ASSUMED_SIZE)
    if models.accepts(name, "image_size"):
        settings.setdefault("image_size", size)
    torch.manual_seed(recipe.seed)
    model = models.create(name, num_classes=request.classes, in_channels=recipe.data.channels, **settings)
    channels = recipe.data.channels or (usual[0] if usual is not None else models.image_channels(model))
    memory_format = torch.channels_last if recipe.channels_last else torch.contiguous_format
    model.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]
    return model.train(), (channels, size, size)


def assumed(request: Request, recipe: Recipe) -> str | None:
    """A sentence on the size of the images, where nobody says it; None where somebody does."""
    name = recipe.model.name
    if request.image_size or recipe.data.image_size or models.describe(name).input_shape is not None:
        return None
    return (
        f"the size of the images for {name} is not known: {ASSUMED_SIZE}×{ASSUMED_SIZE} pixels are assumed, unless "
        "--image-size says otherwise"
    )


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
    notes = [guess] if guess is not None else []
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
            link=request.link,
            store=ProfileStore() if request.keep else None,
            fixes=request.fixes,
            memory_limit=request.memory,
            plans=scores,
            input=_input(request, device),
            notes=notes,
            progress=progress,
        )
    if ranks.rank == 0:
        _show(request, planned)


def _input(request: Request, device: torch.device) -> HostCost | None:
    """What the input takes: beside the computation on a GPU, from the cores that compute on a CPU."""
    if request.images_per_second is None:
        return None
    return HostCost(per_sample=1 / request.images_per_second, beside=device.type == "cuda")


def _show(request: Request, planned: Planned) -> None:
    found = explained(planned)
    files = request.files
    if files.out is not None:
        written("--out", files.out, _yaml(request, found))
    if files.html is not None:
        written("--html", files.html, plan_page(found, request.command))
    if files.trace is not None:
        written("--trace", files.trace, json.dumps(trace(predicted=found.scored.timeline), allow_nan=False))
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


def run(request: Request, recipe: Recipe) -> int:
    """Plan, and say what came of it.

    Args:
        request: what is asked, checked.
        recipe: of the network.

    Returns:
        The exit status.

    Raises:
        ConvoyError: there is no such device, a fix matches no layer, or no plan.
    """
    number = request.num_devices
    place = launch.find_place()
    if place is not None:
        place.check(number if request.devices is not None or request.scores else None)
        with launch.as_rank(place):
            joined, own = join_ranks()
            cores.take_share(joined.gather, joined.rank, request.cores_per_device)
            chosen = own if request.device is None or own.type == request.device else choose_device(request.device)
            answer(request, recipe, place.num_ranks, Ranks.here(), chosen)
            leave()
            return launch.ended(place, 0)
    chosen = choose_device(request.device)
    if number > 1 and request.link is None and _fits(number, chosen, request.cores_per_device):
        if request.fixes:
            _check_fixes(request, recipe, number)
        return launch.start(request.arguments, number, verbose=is_verbose(request.arguments))
    if request.cores_per_device is not None:
        cores.pin(cores.share(cores.own_cores(), 1, 0, request.cores_per_device))
    answer(request, recipe, number, Ranks(), chosen)
    return 0


def _check_fixes(request: Request, recipe: Recipe, number: int) -> None:
    """Refuse fixes that match no layer before ranks are started, which takes longer than to look at the network."""
    here = torch.device("cpu")
    model, shape = network_of(request, recipe, here)
    Layers(workload_of_recipe(recipe, model, shape, number, here).graph, request.fixes, ())


def _fits(devices: int, device: torch.device, cores_per_device: int | None) -> bool:
    """Whether this machine has so many devices."""
    if device.type == "cuda":
        return torch.cuda.device_count() >= devices
    return len(cores.own_cores()) >= devices * (cores_per_device or 1)
