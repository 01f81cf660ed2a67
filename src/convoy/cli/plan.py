"""`convoy plan`: find the fastest plan for a network on some devices, and explain it."""

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from convoy.cli import keys, options
from convoy.cli.requests import PlanRequest
from convoy.terminal import waiting_for
from convoy.units import plural


@options.verb(
    "plan",
    """
  convoy plan alexnet --devices 2 --batch 64
  convoy plan resnet50 --devices 4 --batch 256 --out plan.yaml --html plan.html
  convoy plan vgg11 --devices 4 --batch 64 --fix 'classifier.*=filter' --memory-limit 8GB
  convoy plan alexnet --score sample=2 --score stage=2 --score my.yaml --batch 64
  convoy plan my.networks:small --devices 2 --image-size 28
  convoy plan resnet50 --devices 16 --batch 512 --link 10gbit --trace step.json
  convoy plan vgg16 --on '4x(8xa100-sxm4)' --between infiniband-hdr --batch 2048 --precision bf16
  convoy plan lenet --target runs/batches-lenet --on 8xa100-sxm4 --price 1.50
  convoy plan resnet50 --on 2xrtx-4090 --compare 4xrtx-3090 --compare 1xh100-sxm5 --price 0.35,0.20,2.50
""",
)
@click.argument("model", required=False)
@keys.sets("parallel.devices", metavar="N", text="Plan for so many devices.", default="those of --score, or 1")
@keys.sets("batch", metavar="N", default="128")
@keys.sets("data.image_size", metavar="N", text="Height and width of the images.", default="the network's")
@click.option("--classes", metavar="N", type=int, help="Classes. [default: the network's]")
@click.option("--data", hidden=True)  # is refused, in words
@click.option("--recipe", metavar="NAME|FILE", help="Take model, batch, precision and the like from a recipe.")
@click.option("--fix", metavar="PATTERN=STRATEGY", multiple=True, help="What layers must have; repeatable.")
@click.option("--score", metavar="PLAN|FILE", multiple=True, help="Predict this plan, without a search; repeatable.")
@keys.sets("parallel.memory_limit", metavar="SIZE", text="Memory of each device for the network, e.g. 8GB.")
@click.option("--link", metavar="NAME|RATE", help="Devices that are not at hand, linked so: 10gbit; 10gbit,8xnvlink4")
@click.option("--on", metavar="MACHINE", help="Devices that are not at hand: 8xv100-sxm2, 4x(8xa100-sxm4), 2xt4+1xl4.")
@click.option("--between", metavar="NAME|RATE", help="Network between the hosts of --on. [default: 10gbit]")
@click.option("--compare", metavar="MACHINE", multiple=True, help="Another machine beside that of --on; repeatable.")
@click.option("--price", metavar="P,P,…", help="Of a device and hour, for --on and each --compare, in your currency.")
@click.option("--images", metavar="N", type=int, help="Images of an epoch, for --on. [default: 1,281,167, ImageNet's]")
@click.option(
    "--target",
    metavar="STUDY",
    type=options.OutputPath(),
    help="Study of convoy bench --batches: which batch on how many devices reaches its target soonest, and cheapest.",
)
@click.option(
    "--catalog", metavar="FILE", type=options.OutputPath(), help="YAML with devices beside those that --on knows."
)
@click.option(
    "--images-per-second",
    metavar="N",
    type=float,
    help="What the input of one device gives, decoded and augmented. [default: input costs nothing]",
)
@keys.microbatches
@keys.sets(
    "parallel.shares",
    metavar="S,S,…",
    as_yaml=keys.shares_as_yaml,
    text="Parts of the batch, as 3,3,2.",
    default="by measured speed",
)
@keys.batch_norm
@keys.freeze
@keys.precision
@keys.channels_last
@keys.recompute
@keys.schedule
@keys.cores_per_device
@click.option("--out", metavar="FILE", type=options.OutputPath(), help="Write the plan as YAML, for --plan.")
@click.option("--html", metavar="FILE", type=options.OutputPath(), help="Write the explanation as a page.")
@click.option("--trace", metavar="FILE", type=options.OutputPath(), help="Write the timeline for Perfetto.")
@click.option("--no-store", is_flag=True, help="Measure all anew, and keep nothing (convoy profile).")
@options.device
@options.as_json
@options.trust_code
@click.pass_obj
def command(arguments: Sequence[str], /, **values: Any) -> int:
    """Find the fastest plan for MODEL on some devices, and say why it is.

    MODEL may be left out where the recipe names it. Layers and links are measured on this machine where it has as many
    cores or GPUs as there are to be devices; otherwise layers are measured on one, and links are those of --link. With
    --on nothing is measured: times are predicted for devices of a catalog. No data is needed.
    """
    request = PlanRequest(arguments, values)
    recipe = request.check()
    if request.on is request.target is None and sys.stderr.isatty() and "RANK" not in os.environ:
        click.echo(f"planning for {recipe.model.name} on {plural(request.num_devices, 'device')} …", err=True)
    with waiting_for("loading PyTorch"):  # for which no mistake is to wait
        from convoy.cli.plan_run import run, run_on
    if request.target is not None:
        from convoy.cli.plan_target import run_target

        return run_target(request, recipe)
    return (run if request.on is None else run_on)(request, recipe)
