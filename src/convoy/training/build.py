"""The network that a recipe names, and what it is given."""

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from convoy import models
from convoy.data import DataSet
from convoy.data.sources import PixelSource
from convoy.errors import ConvoyError
from convoy.training.recipe import Recipe
from convoy.training.run_directory import RunDirectory


@dataclass(frozen=True)
class NetworkInput:
    """What a network is given: kept with the run, so that other pictures are prepared for it in the same way.

    Attributes:
        classes: names, by label.
        channels: 1 or 3.
        image_size: height and width.
        resize: short side of a picture before its center is taken.
        mean: of each channel, pixels from 0 to 1.
        std: of each channel, pixels from 0 to 1.
        in_memory: the data's pictures were all decoded before, and had their channels before they were resized.
    """

    classes: list[str]
    channels: int
    image_size: int
    resize: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    in_memory: bool = False

    @staticmethod
    def of(data: DataSet) -> "NetworkInput":
        """That of the networks which are trained on some data."""
        in_memory = isinstance(data.train, PixelSource)
        return NetworkInput(data.classes, data.channels, data.image_size, data.resize, data.mean, data.std, in_memory)

    @staticmethod
    def of_run(run: RunDirectory) -> "NetworkInput":
        """That which a run has kept in `environment.json`.

        Raises:
            ConvoyError: the file is missing or damaged.
        """
        try:
            found = json.loads(run.environment.read_text(encoding="utf-8"))["input"]
            lists = {key: tuple(map(float, found[key])) for key in ("mean", "std")}
            return NetworkInput(**{**found, **lists, "classes": list(map(str, found["classes"]))})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConvoyError(
                f"{run.environment} does not say how pictures were prepared: put back the file that the run wrote"
            ) from error

    def as_dict(self) -> dict[str, Any]:
        """As `environment.json` keeps it."""
        return {**asdict(self), "mean": list(self.mean), "std": list(self.std)}


def build_model(recipe: Recipe, given: DataSet | NetworkInput) -> tuple[nn.Module, list[str]]:
    """The recipe's network for some classes and channels, initialized from the seed, with its weights loaded.

    Returns:
        The network and notes on what was done to it.
    """
    section, notes = recipe.model, []
    options = dict(section.options)
    if models.accepts(section.name, "image_size"):
        options.setdefault("image_size", given.image_size)
    if section.zero_init_residual:
        if models.accepts(section.name, "zero_init_residual"):
            options["zero_init_residual"] = True
        else:
            notes.append(
                f"{section.name} has no residual blocks to start at zero: model.zero_init_residual does nothing"
            )
    torch.manual_seed(recipe.seed)
    model = models.create(section.name, num_classes=len(given.classes), in_channels=given.channels, **options)
    if section.weights is not None and recipe.extends is None:  # all weights are those of the other run then
        notes += models.load_weights(model, section.weights)
    return model, notes
