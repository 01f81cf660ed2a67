"""`convoy plan`: find the fastest plan for a network on some devices, and explain it."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import torch
from rich.console import Console
from torch import nn

from convoy import launch, models
from convoy.cli import options
from convoy.cli.planning import Progress, bytes_of, check_writable, written
from convoy.cost.store import ProfileStore
from convoy.cost.trace import events, trace
from convoy.engine.allocation import keep_freed_memory
from convoy.errors import ConvoyError
from convoy.experiments.plan_page import plan_page
from convoy.launch import cores
from convoy.planning import Planned, Ranks, make_plan
from convoy.planning.document import document
from convoy.planning.link_names import links_named
from convoy.planning.text import explanation_text
from convoy.planning.verdict import Explained, explained
from convoy.plans.check_plan import check_patterns
from convoy.plans.place import COMPUTE
from convoy.plans.plan import Plan
from convoy.training import Devices, Recipe, choose_device, load_recipe
from convoy.training.derived import num_microbatches
from convoy.training.numerics import set_numerics
from convoy.training.precision import check_precision
from convoy.training.workloads import workload_of_recipe

KEYS = {
    "batch": "batch",
    "microbatches": "microbatches",
    "batch_norm": "batch_norm",
    "precision": "precision",
    "channels_last": "channels_last",
}


@click.command(
    "plan",
    epilog="""\b
Examples:
  convoy plan alexnet --devices 2 --batch 32
  convoy plan resnet50 --devices 4 --batch 256 --out plan.yaml --html plan.html
  convoy plan vgg11 --devices 4 --batch 64 --fix 'classifier.*=filter' --memory-limit 8GB
  convoy plan alexnet --score sample=2 --score owt=2 --score my.yaml --batch 32
  convoy plan resnet50 --devices 16 --batch 512 --link 10gbit --trace step.json
""",
)
@click.argument("model", required=False)
@click.option("--devices", metavar="N", type=int, help="Plan for so many devices. [default: those of --score, or 1]")
@click.option("--batch", metavar="N", type=int, help="Global batch: samples of one weight update. [default: 128]")
@click.option("--image-size", metavar="N", type=int, help="Height and width of the images. [default: the network's]")
@click.option("--classes", metavar="N", type=int, help="Classes. [default: the network's]")
@click.option("--recipe", metavar="NAME|FILE", help="Take model, batch, precision and the like from a recipe.")
@click.option("--fix", metavar="PATTERN=STRATEGY", multiple=True, help="What layers must have; repeatable.")
@click.option("--score", metavar="PLAN|FILE", multiple=True, help="Predict this plan, without a search; repeatable.")
@click.option("--memory-limit", metavar="SIZE", help="Memory of each device for the network, e.g. 8GB.")
@click.option("--link", metavar="NAME|RATE", help="Devices that are not at hand, linked so: 10gbit, pcie4, nvlink4 …")
@click.option("--microbatches", metavar="V", type=int, help="Pieces of the global batch. [default: of 32 samples]")
@click.option("--batch-norm", metavar="MODE", help="Statistics over: microbatch, sync (global batch) or local.")
@click.option("--precision", metavar="TYPE", help="fp32, bf16 or fp16.")
@click.option("--channels-last/--channels-first", "channels_last", default=None, help="Memory format of the network.")
@click.option("--cores-per-device", metavar="N", type=int, help="CPU cores of each. [default: its share of all]")
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), help="Write the plan as YAML, for --plan.")
@click.option("--html", metavar="FILE", type=click.Path(path_type=Path), help="Write the explanation as a page.")
@click.option("--trace", metavar="FILE", type=click.Path(path_type=Path), help="Write the timeline for Perfetto.")
@click.option("--no-store", is_flag=True, help="Measure all anew, and keep nothing (convoy profile).")
@options.device
@options.as_json
@options.verbose
@click.pass_obj
def command(
    arguments: Sequence[str],
    /,
    model: str | None,
    devices: int | None,
    image_size: int | None,
    classes: int | None,
    recipe: str | None,
    fix: tuple[str, ...],
    score: tuple[str, ...],
    memory_limit: str | None,
    link: str | None,
    cores_per_device: int | None,
    out: Path | None,
    html: Path | None,
    trace: Path | None,
    no_store: bool,
    device: str | None,
    as_json: bool,
    **values: str | int | bool | None,
) -> int:
    """Find the fastest plan for MODEL on some devices, and say why it is.

    MODEL may be left out where the recipe names it. Layers and links are measured on this machine where it has as many
    cores or GPUs as there are to be devices; otherwise layers are measured on one, and links are those of --link. No
    data is needed.
    """
    overrides = [f"{KEYS[name]}={value}" for name, value in values.items() if value is not None]
    resolved = _recipe(model, recipe, overrides)
    scores = [_plan(text, devices) for text in score]
    number = devices if devices is not None else scores[0].mesh.num_devices if scores else 1
    request = _Request(
        command=shlex.join(["convoy", *arguments]),
        recipe=resolved,
        devices=number,
        image_size=image_size,
        classes=classes,
        fixes=fix,
        scores=tuple(scores),
        memory_limit=bytes_of(memory_limit, "--memory-limit") if memory_limit is not None else None,
        link=link,
        files=_Files(out, html, trace),
        keep=not no_store,
        as_json=as_json,
    )
    request.check()
    place = launch.find_place()
    if place is not None:
        place.check(number if devices is not None or scores else None)
        request = replace(request, devices=place.num_ranks)
        with launch.as_rank(place):
            joined, own = Devices.join()
            cores.take_share(joined.gather, joined.rank, cores_per_device)
            chosen = own if device is None or own.type == device else choose_device(device)
            _run(request, joined.ranks, chosen)
            Devices.leave()
            return launch.ended(place, 0)
    chosen = choose_device(device)
    if number > 1 and link is None and _fits(number, chosen, cores_per_device):
        return launch.start(arguments, number, verbose="-v" in arguments or "--verbose" in arguments)
    if cores_per_device is not None:
        cores.pin(cores.share(cores.own_cores(), 1, 0, cores_per_device))
    _run(request, Ranks(), chosen)
    return 0


@dataclass(frozen=True)
class _Files:
    """Where to write what; None for nowhere."""

    out: Path | None
    html: Path | None
    trace: Path | None


@dataclass(frozen=True)
class _Request:
    """What the command line asks for."""

    command: str
    recipe: Recipe
    devices: int
    image_size: int | None
    classes: int | None
    fixes: tuple[str, ...]
    scores: tuple[Plan, ...]
    memory_limit: float | None
    link: str | None
    files: _Files
    keep: bool
    as_json: bool

    def check(self) -> None:
        """Refuse what can be refused before anything is measured.

        Raises:
            ConvoyError: some of it cannot be.
        """
        for name, number in (
            ("--devices", self.devices),
            ("--image-size", self.image_size),
            ("--classes", self.classes),
        ):
            if number is not None and number < 1:
                raise ConvoyError(f"{name} is {number}: give a whole number of at least 1")
        if self.recipe.batch < self.devices:
            raise ConvoyError(
                f"a batch of {self.recipe.batch} is too small for {self.devices} devices: raise --batch, or plan for "
                "fewer"
            )
        if self.scores and (self.fixes or self.memory_limit is not None):
            other = "--fix" if self.fixes else "--memory-limit"
            raise ConvoyError(
                f"{other} is for a search, but --score only predicts the plans that it is given: drop one"
            )
        for plan in self.scores:
            size = plan.mesh.num_devices
            if size != self.devices:
                raise ConvoyError(
                    f"--score {plan} is for {size} device{'s' if size > 1 else ''}, but --devices is {self.devices}: "
                    "change one of them"
                )
        if self.link is not None:
            links_named(self.link, on_cpu=True)
        for option, path in (("--out", self.files.out), ("--html", self.files.html), ("--trace", self.files.trace)):
            if path is not None:
                check_writable(option, path)


def _run(request: _Request, ranks: Ranks, device: torch.device) -> None:
    """Plan on this rank, and on the first one print and write what came of it."""
    recipe, devices = request.recipe, request.devices
    if devices > 1:
        keep_freed_memory(device)  # as it will be in training
    set_numerics(recipe)
    check_precision(recipe.precision, device)
    model, shape = _model(request, device)
    workload = workload_of_recipe(recipe, model, shape, devices, device)
    layers = [call.layer for call in workload.graph.calls if call.op in COMPUTE]
    for plan in request.scores:
        check_patterns(plan, layers, [name for name, _ in model.named_modules()])
    links, notes = None, []
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
            memory_limit=request.memory_limit,
            plans=request.scores,
            progress=progress,
        )
    if ranks.rank == 0:
        _show(request, replace(planned, notes=(*notes, *planned.notes)))


def _show(request: _Request, planned: Planned) -> None:
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


def _yaml(request: _Request, found: Explained) -> str:
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


def _recipe(model: str | None, recipe: str | None, overrides: Sequence[str]) -> Recipe:
    if model is None and recipe is None:
        raise ConvoyError("nothing to plan: give a MODEL (convoy models) or a --recipe (convoy recipes)")
    named = [f"model.name={model}"] if model is not None else []
    return load_recipe(recipe or "default", [*named, "data.path=mnist-mini", *overrides])


def _plan(text: str, devices: int | None) -> Plan:
    if text.strip() == "auto":
        raise ConvoyError("--score auto names no plan: leave --score out, and the fastest is searched")
    return Plan.parse(text, num_devices=devices)


def _model(request: _Request, device: torch.device) -> tuple[nn.Module, tuple[int, int, int]]:
    """The network with fresh weights, and the shape of its images."""
    recipe = request.recipe
    name, settings = recipe.model.name, dict(recipe.model.options)
    usual = models.describe(name).input_shape
    size = request.image_size or recipe.data.image_size or (usual[1] if usual is not None else 224)
    if models.accepts(name, "image_size"):
        settings.setdefault("image_size", size)
    torch.manual_seed(recipe.seed)
    model = models.create(name, num_classes=request.classes, in_channels=recipe.data.channels, **settings)
    channels = recipe.data.channels or (usual[0] if usual is not None else _channels(model))
    memory_format = torch.channels_last if recipe.channels_last else torch.contiguous_format
    model.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]
    return model.train(), (channels, size, size)


def _channels(model: nn.Module) -> int:
    """What a network of which nothing is known takes: as many channels as its first convolution."""
    found = (int(layer.in_channels) for layer in model.modules() if isinstance(layer, nn.Conv2d))
    return next(found, 3)


def _fits(devices: int, device: torch.device, cores_per_device: int | None) -> bool:
    """Whether this machine has so many devices."""
    if device.type == "cuda":
        return torch.cuda.device_count() >= devices
    return len(cores.own_cores()) >= devices * (cores_per_device or 1)


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    number = torch.get_num_threads()
    return f"{number} core{'s' if number > 1 else ''} of this machine"
