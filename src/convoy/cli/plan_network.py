"""The network that `convoy plan` is asked about."""

import torch
from torch import nn

from convoy import models
from convoy.cli.plan_request import Request
from convoy.training.recipe import Recipe

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
