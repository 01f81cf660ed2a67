"""The recipe and the network that `convoy plan` is asked about."""

import torch
from torch import nn

from convoy import models
from convoy.cli.plan_request import Request
from convoy.errors import ConvoyError
from convoy.training import Recipe, load_recipe
from convoy.training.parallel_config import check_shares

ASSUMED_SIZE = 224
"""Pixels of an image's sides where neither the request nor the network says."""


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
    return recipe


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
        f"nobody says how large the images for {name} are: {ASSUMED_SIZE} pixels are assumed, --image-size changes it"
    )
