"""Trains a network: recipe, optimizer, loop, checkpoints and the folder of a run."""

from typing import TYPE_CHECKING

from convoy.late import lazily

if TYPE_CHECKING:
    from convoy.training.environment import choose_device
    from convoy.training.progress import ConsoleReporter, Reporter
    from convoy.training.recipe import Recipe, load_recipe, recipe_names
    from convoy.training.run import Outcome, train
    from convoy.training.run_directory import RunDirectory
    from convoy.training.session import Session

__all__ = [
    "ConsoleReporter",
    "Outcome",
    "Recipe",
    "Reporter",
    "RunDirectory",
    "Session",
    "choose_device",
    "load_recipe",
    "recipe_names",
    "train",
]

__getattr__ = lazily(
    __name__,
    {
        "environment": "choose_device",
        "progress": "ConsoleReporter Reporter",
        "recipe": "Recipe load_recipe recipe_names",
        "run": "Outcome train",
        "run_directory": "RunDirectory",
        "session": "Session",
    },
)
