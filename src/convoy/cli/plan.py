"""`convoy plan`: find the fastest plan for a network on some devices, and explain it."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import torch

from convoy import launch
from convoy.cli import options
from convoy.cli.plan_answer import answer
from convoy.cli.plan_request import Files, Request, plan_of, recipe_of
from convoy.cli.sizes import bytes_of
from convoy.launch import cores
from convoy.planning import Ranks
from convoy.training import Devices, choose_device

KEYS = {
    "batch": "batch",
    "microbatches": "microbatches",
    "batch_norm": "batch_norm",
    "shares": "parallel.shares",
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
@click.option("--link", metavar="NAME|RATE", help="Devices that are not at hand, linked so: 10gbit; 10gbit,8xnvlink4")
@click.option(
    "--images-per-second",
    metavar="N",
    type=float,
    help="What the input of one device gives, decoded and augmented. [default: input costs nothing]",
)
@click.option("--microbatches", metavar="V", type=int, help="Pieces of the global batch. [default: of 32 samples]")
@click.option(
    "--shares",
    metavar="S,S,…",
    callback=options.shares,
    help="Parts of the batch, as 3,3,2. [default: by measured speed]",
)
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
    images_per_second: float | None,
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
    resolved = recipe_of(model, recipe, overrides)
    scores = [plan_of(text, devices) for text in score]
    number = devices if devices is not None else scores[0].mesh.num_devices if scores else 1
    request = Request(
        command=shlex.join(["convoy", *arguments]),
        recipe=resolved,
        devices=number,
        image_size=image_size,
        classes=classes,
        fixes=fix,
        scores=tuple(scores),
        memory_limit=bytes_of(memory_limit, "--memory-limit") if memory_limit is not None else None,
        link=link,
        images_per_second=images_per_second,
        cores_per_device=cores_per_device,
        files=Files(out, html, trace),
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
            answer(request, Ranks.here(), chosen)
            Devices.leave()
            return launch.ended(place, 0)
    chosen = choose_device(device)
    if number > 1 and link is None and _fits(number, chosen, cores_per_device):
        return launch.start(arguments, number, verbose="-v" in arguments or "--verbose" in arguments)
    if cores_per_device is not None:
        cores.pin(cores.share(cores.own_cores(), 1, 0, cores_per_device))
    answer(request, Ranks(), chosen)
    return 0


def _fits(devices: int, device: torch.device, cores_per_device: int | None) -> bool:
    """Whether this machine has so many devices."""
    if device.type == "cuda":
        return torch.cuda.device_count() >= devices
    return len(cores.own_cores()) >= devices * (cores_per_device or 1)
