"""What `convoy plan` is asked, and what can be refused of it without torch and the network."""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from convoy.cli.options import check_writable, command_of
from convoy.errors import ConvoyError
from convoy.planner.cost.link import links_named
from convoy.plans.fixes import parse_fix
from convoy.plans.plan import Plan
from convoy.training.parallel_config import check_shares
from convoy.training.recipe import Recipe, check_names, load_recipe
from convoy.units import bytes_of


@dataclass(frozen=True)
class Files:
    """Where to write what; None for nowhere."""

    out: Path | None
    html: Path | None
    trace: Path | None


@dataclass(frozen=True)
class Request:
    """What the command line asks for; None where it says nothing.

    Attributes:
        arguments: the words of the line.
        model: the network's name.
        recipe: a recipe, by its name or file.
        overrides: keys of the recipe with their values.
        devices: number of devices that the plan is for.
        image_size, classes: the images' size and classes; None for what the network usually has.
        fixes, memory_limit: constraints of a search.
        scores: plans to predict instead.
        link: between devices that are not at hand.
        images_per_second: rate at which one device's input is ready; None for an input that costs nothing.
        cores_per_device: CPU cores of each; None for its share of all.
        device: the kind of the devices, or one of them.
        keep: whether what is measured is kept.
    """

    arguments: tuple[str, ...]
    model: str | None
    recipe: str | None
    overrides: tuple[str, ...]
    devices: int | None
    image_size: int | None
    classes: int | None
    fixes: tuple[str, ...]
    scores: tuple[str, ...]
    memory_limit: str | None
    link: str | None
    images_per_second: float | None
    cores_per_device: int | None
    device: str | None
    files: Files
    keep: bool
    as_json: bool

    @property
    def command(self) -> str:
        """The line, as a plan keeps it."""
        return command_of(self.arguments)

    @cached_property
    def plans(self) -> list[Plan]:
        """Those that are to be predicted.

        Raises:
            ConvoyError: one of the texts is none.
        """
        return [plan_of(text, self.devices) for text in self.scores]

    @property
    def num_devices(self) -> int:
        """As it says, or as many as the plans are for."""
        if self.devices is not None:
            return self.devices
        plans = self.plans
        return plans[0].mesh.num_devices if plans else 1

    @property
    def memory(self) -> float | None:
        """The limit in bytes.

        Raises:
            ConvoyError: it is no size.
        """
        return bytes_of(self.memory_limit, "--memory-limit") if self.memory_limit is not None else None

    def check(self) -> None:
        """Refuse what cannot be, whatever the network and the machine.

        Raises:
            ConvoyError: some of it cannot.
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
        if self.memory_limit is not None:
            bytes_of(self.memory_limit, "--memory-limit")
        if self.scores and self.fixes:
            raise ConvoyError("--fix is for a search, but --score only predicts the plans that it is given: drop one")
        for fix in self.fixes:
            parse_fix(fix)
        self._check_plans()
        if self.link is not None:
            links_named(self.link, on_cpu=True)
        if self.images_per_second is not None and not 0 < self.images_per_second < math.inf:
            raise ConvoyError(
                f"--images-per-second is {self.images_per_second:g}: say how many one device's input gives, e.g. 400"
            )
        for option, path in (("--out", self.files.out), ("--html", self.files.html), ("--trace", self.files.trace)):
            if path is not None:
                check_writable(option, path)

    def _check_plans(self) -> None:
        for plan in self.plans:
            size, number = plan.mesh.num_devices, self.num_devices
            if size != number:
                other = (
                    f"--devices is {number}" if self.devices is not None else f"--score {self.plans[0]} for {number}"
                )
                raise ConvoyError(
                    f"--score {plan} is for {size} device{'s' if size > 1 else ''}, but {other}: change one of them"
                )


def plan_of(text: str, devices: int | None) -> Plan:
    """A plan to predict.

    Raises:
        ConvoyError: it is none.
    """
    if text.strip() == "auto":
        raise ConvoyError("--score auto names no plan: leave --score out, and the fastest is searched")
    return Plan.parse(text, num_devices=devices)


def recipe_of(request: Request) -> Recipe:
    """The recipe of a network, or a recipe by its name or file, with some of its keys set.

    Raises:
        ConvoyError: there is none, a key cannot be so, or its batch cannot be divided over the devices.
    """
    named = [f"model.name={request.model}"] if request.model is not None else []
    recipe = load_recipe(request.recipe or "default", [*named, "data.path=mnist-mini", *request.overrides])
    if recipe.batch < request.num_devices:
        raise ConvoyError(
            f"a batch of {recipe.batch} is too small for {request.num_devices} devices: raise --batch, or plan for "
            "fewer"
        )
    shares = recipe.parallel.shares
    check_shares(shares if isinstance(shares, tuple) else None, request.num_devices)
    check_names(recipe)
    return recipe
