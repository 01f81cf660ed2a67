"""Trains a network: recipe, optimiser, loop, checkpoints and the folder of a run."""

from typing import TYPE_CHECKING

from convoy.late import lazily

if TYPE_CHECKING:
    from convoy.training.environment import choose_device
    from convoy.training.progress import ConsoleReporter, Reporter
    from convoy.training.ranks.devices import Devices
    from convoy.training.recipe import Recipe, load_recipe, recipe_names
    from convoy.training.run import Outcome, train
    from convoy.training.session import Session
    from convoy.training.storage.run_directory import RunDirectory

__all__ = [
    "ConsoleReporter",
    "Devices",
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
        "ConsoleReporter": "progress",
        "Devices": "ranks.devices",
        "Outcome": "run",
        "Recipe": "recipe",
        "Reporter": "progress",
        "RunDirectory": "storage.run_directory",
        "Session": "session",
        "choose_device": "environment",
        "load_recipe": "recipe",
        "recipe_names": "recipe",
        "train": "run",
    },
)
