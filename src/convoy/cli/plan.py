"""`convoy plan`: find the fastest plan for a network on some devices, and explain it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from convoy.cli import options
from convoy.cli.options import check_writable
from convoy.errors import ConvoyError
from convoy.late import waiting_for
from convoy.planner.cost.link import links_named
from convoy.plans.fixes import parse_fix
from convoy.plans.plan import Plan
from convoy.training.parallel_config import check_shares
from convoy.training.recipe import Recipe, check_names, load_recipe
from convoy.units import bytes_of

KEYS = {
    "batch": "batch",
    "microbatches": "microbatches",
    "batch_norm": "batch_norm",
    "shares": "parallel.shares",
    "precision": "precision",
    "channels_last": "channels_last",
}
"""Options that set keys of the recipe."""


@dataclass(frozen=True)
class Request:
    """The options of the command line under their names, and `overrides`: the keys of the recipe that it sets."""

    arguments: Sequence[str]
    overrides: Sequence[str]
    model: str | None
    recipe: str | None
    devices: int | None
    image_size: int | None
    classes: int | None
    fix: tuple[str, ...]
    score: tuple[str, ...]
    memory_limit: str | None
    link: str | None
    images_per_second: float | None
    cores_per_device: int | None
    device: str | None
    out: Path | None
    html: Path | None
    trace: Path | None
    no_store: bool
    as_json: bool

    @cached_property
    def plans(self) -> list[Plan]:
        """The plans to predict instead of a search.

        Raises:
            ConvoyError: one of the texts is no plan.
        """
        if any(text.strip() == "auto" for text in self.score):
            raise ConvoyError("--score auto names no plan: leave --score out, and the fastest is searched")
        return [Plan.parse(text, num_devices=self.devices) for text in self.score]

    @property
    def num_devices(self) -> int:
        """The number that is asked for, or that the plans are for."""
        if self.devices is not None:
            return self.devices
        return self.plans[0].mesh.num_devices if self.plans else 1

    @property
    def memory(self) -> float | None:
        """The memory limit in bytes.

        Raises:
            ConvoyError: it is no size.
        """
        return bytes_of(self.memory_limit, "--memory-limit") if self.memory_limit is not None else None

    def check(self) -> None:
        """Refuse what needs neither the network nor the machine to be found wrong.

        Raises:
            ConvoyError: an option is wrong, or contradicts another.
        """
        if self.model is None and self.recipe is None:
            raise ConvoyError("nothing to plan: give a MODEL (convoy models) or a --recipe (convoy recipes)")
        for name, number in (
            ("--devices", self.devices),
            ("--image-size", self.image_size),
            ("--classes", self.classes),
            ("--cores-per-device", self.cores_per_device),
        ):
            if number is not None and number < 1:
                raise ConvoyError(f"{name} is {number}: give a whole number of at least 1")
        _ = self.memory
        if self.score and self.fix:
            raise ConvoyError("--fix is for a search, but --score only predicts the plans that it is given: drop one")
        for fix in self.fix:
            parse_fix(fix)
        number = self.num_devices
        for plan in self.plans:
            if (size := plan.mesh.num_devices) != number:
                first = f"--score {self.plans[0]} for {number}"
                raise ConvoyError(
                    f"--score {plan} is for {size} device{'s' if size > 1 else ''}, but "
                    f"{f'--devices is {number}' if self.devices is not None else first}: change one of them"
                )
        if self.link is not None:
            links_named(self.link, on_cpu=True)
        if self.images_per_second is not None and not 0 < self.images_per_second < math.inf:
            raise ConvoyError(
                f"--images-per-second is {self.images_per_second:g}: say how many one device's input gives, e.g. 400"
            )
        for option, path in (("--out", self.out), ("--html", self.html), ("--trace", self.trace)):
            if path is not None:
                check_writable(option, path)

    def recipe_of(self) -> Recipe:
        """The recipe with the keys that the command line sets.

        Raises:
            ConvoyError: there is none, a value is wrong, or its batch cannot be divided over the devices.
        """
        named = [f"model.name={self.model}"] if self.model is not None else []
        recipe = load_recipe(self.recipe or "default", [*named, "data.path=mnist-mini", *self.overrides])
        if recipe.batch < self.num_devices:
            raise ConvoyError(
                f"a batch of {recipe.batch} is too small for {self.num_devices} devices: raise --batch, or plan for "
                "fewer"
            )
        shares = recipe.parallel.shares
        check_shares(shares if isinstance(shares, tuple) else None, self.num_devices)
        check_names(recipe)
        return recipe


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
@click.option("--out", metavar="FILE", type=options.OutputPath(), help="Write the plan as YAML, for --plan.")
@click.option("--html", metavar="FILE", type=options.OutputPath(), help="Write the explanation as a page.")
@click.option("--trace", metavar="FILE", type=options.OutputPath(), help="Write the timeline for Perfetto.")
@click.option("--no-store", is_flag=True, help="Measure all anew, and keep nothing (convoy profile).")
@options.device
@options.as_json
@options.verbose
@click.pass_obj
def command(arguments: Sequence[str], /, **values: Any) -> int:
    """Find the fastest plan for MODEL on some devices, and say why it is.

    MODEL may be left out where the recipe names it. Layers and links are measured on this machine where it has as many
    cores or GPUs as there are to be devices; otherwise layers are measured on one, and links are those of --link. No
    data is needed.
    """
    keys = {key: values.pop(name) for name, key in KEYS.items()}
    overrides = [f"{key}={value}" for key, value in keys.items() if value is not None]
    request = Request(tuple(arguments), overrides, **values)
    request.check()
    recipe = request.recipe_of()
    with waiting_for("loading PyTorch"):
        from convoy.cli.plan_answer import run  # with torch, for which no mistake is to wait
    return run(request, recipe)
