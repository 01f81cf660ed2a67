"""The tasks, by their names, and that of a recipe and its data."""

from collections.abc import Sequence

from convoy.training.classification import Classification
from convoy.training.own_task import add_own
from convoy.training.recipe import Recipe
from convoy.training.task import Task


def create_task(recipe: Recipe, classes: Sequence[str]) -> Task:
    """The task of a recipe for data with such classes."""
    loss = recipe.loss
    task = Classification(
        classes,
        aux_weight=loss.aux_weight,
        label_smoothing=loss.label_smoothing,
        loss_name=loss.name,
        target_threshold=loss.target_threshold,
    )
    add_own(task, recipe)
    return task
