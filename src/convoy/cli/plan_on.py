"""How `convoy plan --on` answers: predictions for machines that are not at hand."""

import json
from functools import cache

import click
import torch

from convoy import models
from convoy.cli.options import command_of, written
from convoy.cli.requests import PlanRequest
from convoy.errors import ConvoyError
from convoy.hardware.catalogue import Machine
from convoy.planner.elsewhere import PRECISIONS, Prediction, lines, predict
from convoy.planner.workload import Workload, workload_of
from convoy.report.machines_page import machines_page
from convoy.training.recipe import Recipe

IMAGENET = 1_281_167
"""Images of an epoch where nobody says."""


def run(request: PlanRequest, recipe: Recipe) -> int:
    """Predict, print and write the result.

    Args:
        request: the command line, checked.
        recipe: of the network.

    Returns:
        The exit status.

    Raises:
        ConvoyError: the network cannot be seen as one graph, or nothing fits into a machine's memory.
    """

    @cache
    def workload(precision: str) -> Workload:
        return _workload(request, recipe, precision)

    found = []
    for number, machine in enumerate(request.machines):
        precision = _precision(recipe, machine)
        found.append(
            predict(
                workload(precision),
                machine,
                precision,
                fixes=request.fix,
                plans=request.plans if number == 0 else (),
                memory_limit=request.memory,
                images_per_second=request.images_per_second,
            )
        )
    images, what = _training(request, recipe)
    name = recipe.model.name
    if request.out is not None:
        written("--out", request.out, f"# {command_of(request.arguments)}\n{found[0].plan.to_yaml()}")
    if request.html is not None:
        page = machines_page(name, found, images, request.prices, what, command_of(request.arguments))
        written("--html", request.html, page)
    if request.as_json:
        click.echo(json.dumps([_document(one, number, request, images) for number, one in enumerate(found)], indent=2))
        return 0
    batch = ", ".join(dict.fromkeys(f"batch {one.batch}, {one.precision}" for one in found))
    click.echo(f"{name}, {batch}: predicted, not measured\n")
    click.echo("\n".join(lines(found, images, request.prices, what)))
    for path, of in ((request.out, "plan"), (request.html, "page")):
        if path is not None:
            click.echo(f"{of}: {path}")
    return 0


def _precision(recipe: Recipe, machine: Machine) -> str:
    """What the recipe says; bf16 on devices that have it, as in training."""
    if recipe.precision in PRECISIONS:
        return str(recipe.precision)
    new = all(device.generation in ("ampere", "ada", "hopper", "blackwell", "tpu") for device in machine.devices)
    return "bf16" if new else "fp32"


def _workload(request: PlanRequest, recipe: Recipe, precision: str) -> Workload:
    """The network at the batch of an update; its weights are not made where it allows that."""
    name, settings = recipe.model.name, dict(recipe.model.options)
    usual = models.describe(name).input_shape
    pixels = request.image_size or recipe.data.image_size or (usual[1] if usual is not None else 224)
    if models.accepts(name, "image_size"):
        settings.setdefault("image_size", pixels)
    try:
        with torch.device("meta"):
            model = models.create(name, num_classes=request.classes, in_channels=recipe.data.channels, **settings)
    except ConvoyError:
        raise
    except Exception:  # a network of the user's that computes with its weights as it is made
        model = models.create(name, num_classes=request.classes, in_channels=recipe.data.channels, **settings)
    channels = recipe.data.channels or (usual[0] if usual is not None else models.image_channels(model))
    return workload_of(
        model.train(),
        torch.empty(1, channels, pixels, pixels),
        recipe.batch,
        name=name,
        precision=PRECISIONS[precision],
    )


def _training(request: PlanRequest, recipe: Recipe) -> tuple[float, str]:
    """Images of the whole training, and the training in words."""
    images = request.images or IMAGENET
    epochs = recipe.epochs
    if epochs.unit == "ba":
        return epochs.value * recipe.batch, f"{epochs.value:,.0f} updates of {recipe.batch} images"
    return epochs.value * images, f"{epochs.value:g} epochs of {images:,} images"


def _document(one: Prediction, number: int, request: PlanRequest, images: float) -> dict[str, object]:
    found = one.document() | {"days": round(one.days(images), 4)}
    if request.prices:
        hours = 24 * one.days(images) * len(one.machine.devices)
        found["price"] = round(hours * request.prices[number], 2)
    return found
