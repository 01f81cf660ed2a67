"""The tasks, by their names, and that of a recipe and its data."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from convoy.data.imbalance import class_weights
from convoy.training.classification import Classification
from convoy.training.recipe import Recipe
from convoy.training.task import Task


def create_task(recipe: Recipe, classes: Sequence[str], labels: NDArray[np.int64] | None = None) -> Task:
    """The task of a recipe for data with such classes; without the labels to train on, classes have no weights."""
    loss, weights = recipe.loss, None
    if loss.class_weights is not None and labels is not None:
        weights = torch.from_numpy(class_weights(loss.class_weights, labels, classes, "loss.class_weights"))
    return Classification(
        classes,
        aux_weight=loss.aux_weight,
        class_weights=weights,
        label_smoothing=loss.label_smoothing,
        loss_name=loss.name,
        target_threshold=loss.target_threshold,
    )
