"""What `convoy plan` is asked, checked before anything is measured, and the network that it is asked about."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from convoy import models
from convoy.cli.output_files import check_writable
from convoy.cost.costs import Around
from convoy.errors import ConvoyError
from convoy.planning.link_names import links_named
from convoy.plans.plan import Plan
from convoy.training import Recipe, load_recipe
from convoy.training.parallel_config import check_shares

ASSUMED_SIZE = 224
"""Pixels of an image's sides where neither the request nor the network says."""


@dataclass(frozen=True)
class Files:
    """Where to write what; None for nowhere."""

    out: Path | None
    html: Path | None
    trace: Path | None


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
        command: the line itself.
        devices: that the plan is for.
        image_size, classes: of the images; None for what the network usually has.
        fixes, memory_limit: of a search.
        scores: plans to predict instead.
        link: between devices that are not at hand.
        images_per_second: that the input of one device gives; None for an input that costs nothing.
        cores_per_device: on a CPU; None for its share of all.
        keep: whether what is measured is kept.
    """

    command: str
    recipe: Recipe
    devices: int
    image_size: int | None
    classes: int | None
    fixes: tuple[str, ...]
    scores: tuple[Plan, ...]
    memory_limit: float | None
    link: str | None
    images_per_second: float | None
    cores_per_device: int | None
    files: Files
    keep: bool
    as_json: bool

    def input(self, device: torch.device) -> Around | None:
        """What the input takes: beside the computation on a GPU, from the cores that compute on a CPU."""
        if self.images_per_second is None:
            return None
        return Around(per_sample=1 / self.images_per_second, beside=device.type == "cuda")

    def check(self) -> None:
        """Refuse what can be refused before anything is measured.

        Raises:
            ConvoyError: some of it cannot be.
        """
        for name, number in (
            ("--devices", self.devices),
            ("--image-size", self.image_size),
            ("--classes", self.classes),
            ("--cores-per-device", self.cores_per_device),
        ):
            if number is not None and number < 1:
                raise ConvoyError(f"{name} is {number}: give a whole number of at least 1")
        if self.recipe.batch < self.devices:
            raise ConvoyError(
                f"a batch of {self.recipe.batch} is too small for {self.devices} devices: raise --batch, or plan for "
                "fewer"
            )
        shares = self.recipe.parallel.shares
        check_shares(shares if isinstance(shares, tuple) else None, self.devices)
        if self.scores and self.fixes:
            raise ConvoyError("--fix is for a search, but --score only predicts the plans that it is given: drop one")
        for plan in self.scores:
            size = plan.mesh.num_devices
            if size != self.devices:
                raise ConvoyError(
                    f"--score {plan} is for {size} device{'s' if size > 1 else ''}, but --devices is {self.devices}: "
                    "change one of them"
                )
        if self.link is not None:
            links_named(self.link, on_cpu=True)
        if self.images_per_second is not None and not 0 < self.images_per_second < math.inf:
            raise ConvoyError(
                f"--images-per-second is {self.images_per_second:g}: say how many one device's input gives, e.g. 400"
            )
        for option, path in (("--out", self.files.out), ("--html", self.files.html), ("--trace", self.files.trace)):
            if path is not None:
                check_writable(option, path)


def recipe_of(model: str | None, recipe: str | None, overrides: Sequence[str]) -> Recipe:
    """The recipe of a network, or a recipe by its name or file, with some of its keys set.

    Raises:
        ConvoyError: neither is given, or a key cannot be so.
    """
    if model is None and recipe is None:
        raise ConvoyError("nothing to plan: give a MODEL (convoy models) or a --recipe (convoy recipes)")
    named = [f"model.name={model}"] if model is not None else []
    return load_recipe(recipe or "default", [*named, "data.path=mnist-mini", *overrides])


def plan_of(text: str, devices: int | None) -> Plan:
    """A plan to predict.

    Raises:
        ConvoyError: it is none.
    """
    if text.strip() == "auto":
        raise ConvoyError("--score auto names no plan: leave --score out, and the fastest is searched")
    return Plan.parse(text, num_devices=devices)


def network_of(request: Request, device: torch.device) -> tuple[nn.Module, tuple[int, int, int]]:
    """The network with fresh weights, and the shape of its images."""
    recipe = request.recipe
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


def assumed(request: Request) -> str | None:
    """A sentence on the size of the images, where nobody says it; None where somebody does."""
    name = request.recipe.model.name
    if request.image_size or request.recipe.data.image_size or models.describe(name).input_shape is not None:
        return None
    return (
        f"nobody says how large the images for {name} are: {ASSUMED_SIZE} pixels are assumed, --image-size changes it"
    )
