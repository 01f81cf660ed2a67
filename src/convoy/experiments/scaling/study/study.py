"""What all configurations of a study share: the network, the work, and how much of the machine a device is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from convoy import models
from convoy.data import DataSet
from convoy.errors import ConvoyError
from convoy.experiments.scaling.study.configuration import Configuration
from convoy.experiments.scaling.study.made_data import made_data
from convoy.launch.cores import own_cores
from convoy.training.recipe import Recipe

IMAGENET = 1_281_167
_USUAL_SIZE, _USUAL_CLASSES = 224, 1000


@dataclass(frozen=True)
class Made:
    """Made-up pictures: channels, height and width, and the number of classes."""

    shape: tuple[int, int, int]
    num_classes: int


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


def data_of(made: Made | None, recipe: Recipe) -> DataSet | None:
    """The made-up pictures of an update; None where the recipe's data are read."""
    return made_data(made.shape, made.num_classes, recipe.batch) if made is not None else None


def made_for(recipe: Recipe, image_size: int | None, classes: int | None) -> Made:
    """The pictures that a network takes.

    Raises:
        ConvoyError: there is no such network.
    """
    info = models.describe(recipe.model.name)
    usual = info.input_shape
    size = image_size or recipe.data.image_size or (usual[1] if usual is not None else _USUAL_SIZE)
    channels = recipe.data.channels or (usual[0] if usual is not None else None)
    num_classes = classes or info.num_classes
    if channels is None or num_classes is None:
        settings = dict(recipe.model.options)
        if models.accepts(recipe.model.name, "image_size"):
            settings.setdefault("image_size", size)
        model = models.create(recipe.model.name, num_classes=classes, in_channels=channels, **settings)
        channels = channels or models.image_channels(model)
        num_classes = num_classes or _classes(model)
    return Made((channels, size, size), num_classes)


def assumed(recipe: Recipe, made: Made, image_size: int | None) -> str:
    """A sentence where nobody has said how large the pictures are; empty elsewhere."""
    if image_size or recipe.data.image_size or models.describe(recipe.model.name).input_shape is not None:
        return ""
    channels, height, width = made.shape
    return (
        f"{recipe.model.name} does not say what pictures it takes: {channels}×{height}×{width} and {made.num_classes} "
        "classes are assumed (--image-size and --classes say otherwise)"
    )


def _classes(model: nn.Module) -> int:
    """As many as the last linear layer gives."""
    found = [int(layer.out_features) for layer in model.modules() if isinstance(layer, nn.Linear)]
    return found[-1] if found else _USUAL_CLASSES


def cores_per_device(devices: Sequence[int], asked: int | None) -> int:
    """CPU cores of each device, the same in every configuration: all divided by the largest number of devices.

    Raises:
        ConvoyError: there are too few.
    """
    num, largest = len(own_cores()), max(devices)
    if largest > num:
        raise ConvoyError(
            f"--devices {largest} needs {largest} cores, but here are {num}: devices that take turns on a core say "
            "nothing of real ones; use at most as many, or --emulate a cluster"
        )
    if asked is not None and asked * largest > num:
        raise ConvoyError(
            f"--cores-per-device {asked} on {largest} devices needs {asked * largest} cores, but here are {num}: use "
            f"at most {num // largest}, or fewer devices"
        )
    return asked or num // largest


def check_gpus(devices: Sequence[int]) -> None:
    """Refuse more devices than there are GPUs.

    Raises:
        ConvoyError: there are too few.
    """
    num = torch.cuda.device_count()
    if max(devices) > num:
        raise ConvoyError(
            f"--devices {max(devices)} needs {max(devices)} GPUs, but here {'is' if num == 1 else 'are'} {num}: use "
            f"at most {num}, or --device cpu"
        )
