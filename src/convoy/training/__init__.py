"""Trains a network: recipe, optimiser, loop, checkpoints and the folder of a run."""

from convoy.training.environment import choose_device
from convoy.training.progress import ConsoleReporter, Reporter
from convoy.training.ranks.devices import Devices
from convoy.training.recipe import Recipe, load_recipe, recipe_names
from convoy.training.session import Session
from convoy.training.storage.run_directory import RunDirectory
from convoy.training.train import Outcome, train

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
