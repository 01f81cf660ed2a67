"""Pictures that are made up, where only the speed of training counts: they lie in memory, so that no rank waits."""

from dataclasses import dataclass

import numpy as np
from torch import nn

from convoy import models
from convoy.data import DataSet
from convoy.data.sources import PixelSource
from convoy.training.recipe import Recipe

NAME = "made-up pictures in memory"
_USUAL_SIZE, _USUAL_CLASSES = 224, 1000


@dataclass(frozen=True)
class Made:
    """Made-up pictures: channels, height and width, and the number of classes."""

    shape: tuple[int, int, int]
    num_classes: int


def made_for(recipe: Recipe, image_size: int | None, classes: int | None) -> Made:
    """The pictures that a network takes.

    Raises:
        ConvoyError: there is no such network.
    """
    info = models.describe(recipe.model.name)
    usual = info.input_shape
    size = image_size or recipe.data.image_size or (usual[1] if usual is not None else _USUAL_SIZE)
    channels = recipe.data.channels or (usual[0] if usual is not None else None)
    num_classes = classes or info.num_classes
    if channels is None or num_classes is None:
        settings = dict(recipe.model.options)
        if models.accepts(recipe.model.name, "image_size"):
            settings.setdefault("image_size", size)
        model = models.create(recipe.model.name, num_classes=classes, in_channels=channels, **settings)
        channels = channels or models.image_channels(model)
        num_classes = num_classes or _classes(model)
    return Made((channels, size, size), num_classes)


def assumed(recipe: Recipe, made: Made, image_size: int | None) -> str:
    """A sentence where nobody has said how large the pictures are; empty elsewhere."""
    if image_size or recipe.data.image_size or models.describe(recipe.model.name).input_shape is not None:
        return ""
    channels, height, width = made.shape
    return (
        f"{recipe.model.name} does not say what pictures it takes: {channels}×{height}×{width} and {made.num_classes} "
        "classes are assumed (--image-size and --classes say otherwise)"
    )


def data_of(made: Made | None, recipe: Recipe) -> DataSet | None:
    """The made-up pictures of an update; None where the recipe's data are read."""
    return made_data(made.shape, made.num_classes, recipe.batch) if made is not None else None


def made_data(shape: tuple[int, int, int], num_classes: int, num_images: int) -> DataSet:
    """Random pictures with random labels, the same in every process.

    Args:
        shape: channels, height and width; height and width are equal.
        num_classes: labels are below it.
        num_images: for training; nothing is evaluated.
    """
    channels, size, _ = shape
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (num_images, size, size, channels), dtype=np.uint8)
    labels = random.integers(0, num_classes, num_images)
    train = PixelSource(pixels, labels, NAME)
    return DataSet(
        name=NAME,
        classes=[str(number) for number in range(num_classes)],
        train=train,
        test=PixelSource(pixels[:1], labels[:1], NAME),
        image_size=size,
        channels=channels,
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
        resize=size,
    )


def _classes(model: nn.Module) -> int:
    """As many as the last linear layer gives."""
    found = [int(layer.out_features) for layer in model.modules() if isinstance(layer, nn.Linear)]
    return found[-1] if found else _USUAL_CLASSES
