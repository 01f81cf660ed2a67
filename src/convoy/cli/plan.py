"""`convoy plan`: find the fastest plan for a network on some devices, and explain it."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import click

from convoy.cli import keys, options
from convoy.errors import ConvoyError
from convoy.hardware.catalog import Machine, link_named, machine, read_devices
from convoy.late import waiting_for
from convoy.planner.cost.link import links_named
from convoy.plans.fit import parse_fix
from convoy.plans.plan import Plan
from convoy.training.parallel_config import check_shares
from convoy.training.recipe import Recipe, check_names
from convoy.units import plural


@click.command(
    "plan",
    epilog="""\b
Examples:
  convoy plan alexnet --devices 2 --batch 64
  convoy plan resnet50 --devices 4 --batch 256 --out plan.yaml --html plan.html
  convoy plan vgg11 --devices 4 --batch 64 --fix 'classifier.*=filter' --memory-limit 8GB
  convoy plan alexnet --score sample=2 --score stage=2 --score my.yaml --batch 64
  convoy plan my.networks:small --devices 2 --image-size 28
  convoy plan resnet50 --devices 16 --batch 512 --link 10gbit --trace step.json
  convoy plan vgg16 --on '4x(8xa100-sxm4)' --between infiniband-hdr --batch 2048 --precision bf16
  convoy plan resnet50 --on 2xrtx-4090 --compare 4xrtx-3090 --compare 1xh100-sxm5 --price 0.35,0.20,2.50
""",
)
@click.argument("model", required=False)
@keys.sets("parallel.devices", metavar="N", text="Plan for so many devices.", default="those of --score, or 1")
@keys.sets("batch", metavar="N", default="128")
@keys.sets("data.image_size", metavar="N", text="Height and width of the images.", default="the network's")
@click.option("--classes", metavar="N", type=int, help="Classes. [default: the network's]")
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
@options.verbose
@click.pass_obj
def command(arguments: Sequence[str], /, **values: Any) -> int:
    """Find the fastest plan for MODEL on some devices, and say why it is.

    MODEL may be left out where the recipe names it. Layers and links are measured on this machine where it has as many
    cores or GPUs as there are to be devices; otherwise layers are measured on one, and links are those of --link. With
    --on nothing is measured: times are predicted for devices of a catalog. No data is needed.
    """
    request = PlanRequest(arguments, values)
    recipe = request.check()
    with waiting_for("loading PyTorch"):  # for which no mistake is to wait
        from convoy.cli.plan_run import run, run_on
    return (run if request.on is None else run_on)(request, recipe)


_ONLY_WITH_ON = ("between", "compare", "price", "images", "catalog")
_NOT_WITH_ON = ("devices", "link", "device", "trace")
# What is not predicted for devices of a catalog, by the key of the recipe: its option, and why.
_NOT_PREDICTED = {
    "parallel.cores_per_device": ("--cores-per-device", "it is for devices at hand, but --on names others"),
    "parallel.shares": ("--shares", "devices of a catalog share the batch by the speed that is predicted"),
    "recompute": ("--recompute", "what is computed twice is not predicted"),
}


class PlanRequest(SimpleNamespace):
    """A command line of `convoy plan`: keys of the recipe are in `overrides`, other options under their names."""

    def __init__(self, arguments: Sequence[str], values: Mapping[str, Any]) -> None:
        super().__init__(**{"overrides": (), **values, "arguments": arguments})

    @cached_property
    def plans(self) -> list[Plan]:
        """The plans to predict instead of a search."""
        if any(text.strip() == "auto" for text in self.score):
            raise ConvoyError("--score auto names no plan: leave --score out, and the fastest is searched")
        return list(map(Plan.parse, self.score))

    @cached_property
    def machines(self) -> list[Machine]:
        """Those of --on and --compare."""
        added = read_devices(self.catalog) if self.catalog is not None else {}
        named = [self.on, *self.compare] if self.on is not None else []
        return [machine(text, self.between, added) for text in named]

    @cached_property
    def prices(self) -> list[float]:
        """Of an hour of one device of each machine."""
        try:
            prices = [float(text) for text in self.price.split(",")] if self.price is not None else []
        except ValueError:
            raise ConvoyError(f"--price {self.price!r} is no list of numbers, such as 0.35,0.20") from None
        if prices and (len(prices) != len(self.machines) or not all(0 <= price < math.inf for price in prices)):
            raise ConvoyError(
                f"--price has {plural(len(prices), 'price')} for {plural(len(self.machines), 'machine')}: give one of "
                "at least 0 for each, that of --on first"
            )
        return prices

    @property
    def num_devices(self) -> int:
        """The number that is asked for, or that the plans are for."""
        if self.machines:
            return len(self.machines[0].devices)
        return int(self.devices or (self.plans[0].mesh.num_devices if self.plans else 1))

    def check(self) -> Recipe:
        """The recipe; what needs neither the network nor the machine to be found wrong is refused."""
        if self.model is None and self.recipe is None:
            raise ConvoyError("nothing to plan: give a MODEL (convoy models) or a --recipe (convoy recipes)")
        named = [f"model.name={self.model}"] if self.model is not None else []
        recipe = keys.loaded(self.recipe, [*named, "data.path=mnist-mini", *self.overrides], self.arguments)
        number, typed = self.num_devices, {override.partition("=")[0] for override in self.overrides}
        for sentence in self._contradictions(typed, recipe.batch, number):
            raise ConvoyError(sentence)
        for fix in self.fix:
            parse_fix(fix)
        for cluster in self.machines:
            if cluster.between:
                link_named(cluster.between)
        if self.link is not None:
            links_named(self.link, on_cpu=True)
        for name in ("out", "html", "trace"):
            if getattr(self, name) is not None:
                options.check_writable(f"--{name}", getattr(self, name))
        _ = self.prices
        check_shares(recipe.parallel.shares, number)
        check_names(recipe)
        if not self.trust_code and self.model is None:
            keys.check_own(recipe, self.recipe, typed)
        return recipe

    def _contradictions(self, keys: Collection[str], batch: int, number: int) -> Iterator[str]:
        """What is wrong with the options, each by itself and beside the others, in sentences."""
        why = "machines that are not at hand: name one with --on"
        if self.on is not None:
            why = "devices at hand, but --on names others: drop one of the two"
        for name in _ONLY_WITH_ON if self.on is None else _NOT_WITH_ON:
            if getattr(self, name) not in (None, ()):
                yield f"--{name} is for {why}"
        for key in _NOT_PREDICTED.keys() & set(keys) if self.on is not None else ():
            yield "{} is not for --on: {}; leave it out".format(*_NOT_PREDICTED[key])
        for name in ("classes", "images"):
            if (value := getattr(self, name)) is not None and value < 1:
                yield f"--{name} is {value}: give a whole number of at least 1"
        if self.images_per_second is not None and not 0 < self.images_per_second < math.inf:
            yield f"--images-per-second is {self.images_per_second:g}: say how many one device's input gives, e.g. 400"
        if self.score and self.fix:
            yield "--fix is for a search, but --score only predicts the plans that it is given: drop one"
        if self.compare and self.score:
            yield "--score is for one machine, but --compare names more: drop one of the two"
        if "parallel.schedule" in keys and self.plans and all(plan.num_stages == 1 for plan in self.plans):
            yield "--schedule is for plans with stages, and --score names none: leave it out"
        if self.between is not None and all(cluster.hosts == 1 for cluster in self.machines):
            mend = f"write several as 4x({self.on})"
            yield f"--between {self.between} is a network between hosts, but {self.on} is one host: {mend}"
        for plan in self.plans:
            if plan.mesh.num_devices != number:
                first = f"--score {self.plans[0]} for {number}" if self.on is None else f"{self.on} has {number}"
                first = f"--devices is {number}" if self.devices is not None else first
                devices = plural(plan.mesh.num_devices, "device")
                yield f"--score {plan} is for {devices}, but {first}: change one of them"
        if batch < number:
            yield f"a batch of {batch} is too small for {number} devices: raise --batch, or plan for fewer"
