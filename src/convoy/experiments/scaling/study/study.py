"""What all configurations of a study share."""

from dataclasses import dataclass, replace
from typing import Any

from convoy.experiments.scaling.study.configuration import Configuration
from convoy.experiments.scaling.study.made_data import Made
from convoy.training.recipe import Recipe

IMAGENET = 1_281_167


@dataclass(frozen=True)
class Study:
    """What is the same for every row.

    Attributes:
        recipe: how the network is trained; its batch is that of a device where `weak`.
        made: the pictures, where they are made up; None for those of the recipe.
        weak: the batch grows with the devices.
        device_type: `cpu` or `cuda`.
        cores_per_device: on a CPU; 0 on others, and in an emulated cluster.
        cluster: the text of the emulated cluster's file; empty without one.
        speeds: of its devices, as shares of a core; empty without one.
        updates: that are timed in a round of a configuration; None to choose.
        warm_up: updates before them.
    """

    recipe: Recipe
    made: Made | None
    weak: bool
    device_type: str
    cores_per_device: int
    cluster: str
    updates: int | None
    warm_up: int
    speeds: tuple[float, ...] = ()

    @property
    def on_cpu(self) -> bool:
        """Whether devices are cores, or shares of them."""
        return self.device_type == "cpu"

    def batch(self, devices: int) -> int:
        """Samples of an update on all of some devices."""
        return self.recipe.batch * (devices if self.weak else 1)

    def recipe_for(self, row: Configuration, plan: str | None, shares: str = "") -> Recipe:
        """The recipe of a row, under a plan and with shares, as a row has them."""
        changes: dict[str, Any] = {"devices": row.devices, "plan": plan, **in_recipe(shares)}
        parallel = self.recipe.parallel.model_copy(update=changes)
        return self.recipe.model_copy(update={"batch": self.batch(row.devices), "parallel": parallel})

    def with_updates(self, updates: int) -> "Study":
        """The same with a number of updates."""
        return replace(self, updates=updates)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, and to tell whether two studies can share a file."""
        recipe = self.recipe.model_dump(mode="json")
        recipe["parallel"] = {key: value for key, value in recipe["parallel"].items() if key not in ("devices", "plan")}
        if self.made is not None:
            recipe["data"] = {key: recipe["data"][key] for key in ("augment", "mix", "workers")}
        return {
            "model": self.recipe.model.name,
            "recipe": recipe,
            "images": {"shape": list(self.made.shape), "classes": self.made.num_classes} if self.made else None,
            "weak": self.weak,
            "batch": self.recipe.batch,
            "device_type": self.device_type,
            "cores_per_device": self.cores_per_device,
            "cluster": self.cluster,
            "speeds": list(self.speeds),
            "updates": self.updates,
            "warm_up": self.warm_up,
        }


def in_recipe(shares: str) -> dict[str, Any]:
    """The shares of a row as a recipe has them; nothing where the row leaves them to the study's recipe."""
    if not shares:
        return {}
    return {"shares": shares if shares == "auto" else tuple(float(part) for part in shares.split(","))}
