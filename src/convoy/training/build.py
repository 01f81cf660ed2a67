"""The network that a recipe names."""

import torch
from torch import nn

from convoy import models
from convoy.data import DataSet
from convoy.training.recipe import Recipe


def build_model(recipe: Recipe, data: DataSet) -> tuple[nn.Module, list[str]]:
    """The recipe's network for the data's classes and channels, initialised from the seed, with its weights loaded.

    Returns:
        The network and notes on what was done to it.
    """
    section, notes = recipe.model, []
    options = dict(section.options)
    if models.accepts(section.name, "image_size"):
        options.setdefault("image_size", data.image_size)
    if section.zero_init_residual:
        if models.accepts(section.name, "zero_init_residual"):
            options["zero_init_residual"] = True
        else:
            notes.append(
                f"{section.name} has no residual blocks to start at zero: model.zero_init_residual does nothing"
            )
    torch.manual_seed(recipe.seed)
    model = models.create(section.name, num_classes=len(data.classes), in_channels=data.channels, **options)
    if section.weights is not None:
        notes += models.load_weights(model, section.weights)
    return model, notes
