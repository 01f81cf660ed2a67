"""The tasks, by their names, and that of a recipe and its data."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from convoy.data.imbalance import class_weights
from convoy.errors import ConvoyError
from convoy.recipe.recipe import LossConfig, Recipe
from convoy.tasks.classification import Classification
from convoy.tasks.multi_label import MultiLabel
from convoy.tasks.regression import Regression
from convoy.tasks.segmentation import Segmentation
from convoy.tasks.task import Task

TASKS: dict[str, type[Task]] = {task.name: task for task in (Classification, MultiLabel, Regression, Segmentation)}
_USUAL = LossConfig.model_fields["name"].default  # of a recipe that says nothing


def create_task(
    recipe: Recipe, classes: Sequence[str], name: str = "classification", labels: NDArray[np.int64] | None = None
) -> Task:
    """The task of a recipe for data with such classes, whose targets are of the task with this name; a ConvoyError
    where the recipe asks for what this task cannot have. Without the labels to train on, classes have no weights."""
    for problem in _contradictions(recipe, name):
        raise ConvoyError(problem)
    kind, loss = TASKS[name], recipe.loss
    options: dict[str, Any] = {"aux_weight": loss.aux_weight}
    if loss.class_weights is not None and labels is not None:
        of_samples = labels if kind is Classification else None
        weights = class_weights(loss.class_weights, of_samples, classes, "loss.class_weights")
        options["class_weights"] = torch.from_numpy(weights)
    if kind is MultiLabel:
        return MultiLabel(classes, threshold=loss.threshold, **options)
    options["loss_name"] = loss.name if loss.name in kind.losses else kind.losses[0]
    if kind is Classification:
        options |= {"label_smoothing": loss.label_smoothing, "target_threshold": loss.target_threshold}
    return kind(classes, **options)


def _contradictions(recipe: Recipe, name: str) -> Iterator[str]:
    """A sentence for each key that means nothing with the task."""
    loss, kind = recipe.loss, TASKS[name]
    if loss.name not in (*kind.losses, _USUAL):
        yield f"loss.name={loss.name} is no loss of {name}: choose {' or '.join(kind.losses)}"
    if loss.threshold != LossConfig.model_fields["threshold"].default and kind is not MultiLabel:
        yield f"loss.threshold={loss.threshold:g} is for multi-label data, and these are of {name}: leave it out"
    if kind is Classification:
        return
    if loss.class_weights is not None and kind is Regression:
        yield f"loss.class_weights is for classes, and these data are of {name}: leave it out"
    one_label = {"target": recipe.target, "data.sampling": recipe.data.sampling}
    one_label |= {f"data.mix.{key}": getattr(recipe.data.mix, key) for key in ("mixup", "cutmix")}
    one_label |= {f"loss.{key}": getattr(loss, key) for key in ("label_smoothing", "target_threshold")}
    for key in filter(one_label.get, one_label):
        yield f"{key} is for one-label classes, and these data are of {name}: leave it out"
    if kind is Segmentation and recipe.evaluation_views > 1:
        yield "evaluation_views would average masks that lie otherwise: leave it out for segmentation"
    for key in ("function", "rand_augment", "trivial_augment"):
        if kind is Segmentation and getattr(recipe.data.augment, key):
            yield f"data.augment.{key} changes pictures and not their masks: leave it out for segmentation"
