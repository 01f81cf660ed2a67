"""Trains a network: recipe, optimizer, loop, checkpoints and the folder of a run."""

from typing import TYPE_CHECKING

from convoy.late import lazily

if TYPE_CHECKING:
    from convoy.training.environment import choose_device as choose_device
    from convoy.training.recipe import Recipe as Recipe
    from convoy.training.recipe import load_recipe as load_recipe
    from convoy.training.recipe import recipe_names as recipe_names
    from convoy.training.run import Outcome as Outcome
    from convoy.training.run import Trainer as Trainer
    from convoy.training.run_directory import RunDirectory as RunDirectory
    from convoy.training.session import Session as Session

__getattr__ = lazily(
    __name__,
    {
        "environment": "choose_device",
        "recipe": "Recipe load_recipe recipe_names",
        "run": "Outcome Trainer",
        "run_directory": "RunDirectory",
        "session": "Session",
    },
)
