"""What all configurations of a study share: recipe, made-up pictures, machine, and how much of it a device is."""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from convoy import models, units
from convoy.bench.ask import Ask
from convoy.bench.configuration import Configuration, check_recipe, configurations
from convoy.bench.emulated import Cluster
from convoy.data import DataSet
from convoy.data.sources import PixelSource
from convoy.errors import ConvoyError
from convoy.launch.cores import own_cores
from convoy.training import choose_device
from convoy.training.division import soonest
from convoy.training.environment import describe
from convoy.training.recipe import Recipe

NAME = "made-up pictures in memory"
_USUAL_SIZE, _USUAL_CLASSES = 224, 1000


@dataclass(frozen=True)
class Made:
    """Made-up pictures: channels, height and width, and the number of classes."""

    shape: tuple[int, int, int]
    num_classes: int


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


def data_of(made: Made | None, recipe: Recipe) -> DataSet | None:
    """The made-up pictures of an update; None where the recipe's data are read."""
    return made_data(made.shape, made.num_classes, recipe.batch) if made is not None else None


def made_data(shape: tuple[int, int, int], num_classes: int, num_images: int) -> DataSet:
    """Random pictures with random labels, the same in every process.

    Args:
        shape: channels, height and width; height and width are equal.
        num_classes: labels are below it.
        num_images: for training; nothing is evaluated.
    """
    channels, size, _ = shape
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (num_images, size, size, channels), dtype=np.uint8)
    labels = random.integers(0, num_classes, num_images)
    train = PixelSource(pixels, labels, NAME)
    return DataSet(
        name=NAME,
        classes=[str(number) for number in range(num_classes)],
        train=train,
        test=PixelSource(pixels[:1], labels[:1], NAME),
        image_size=size,
        channels=channels,
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
        resize=size,
    )


def _classes(model: nn.Module) -> int:
    found = [int(layer.out_features) for layer in model.modules() if isinstance(layer, nn.Linear)]
    return found[-1] if found else _USUAL_CLASSES


GOAL = 0.98
"""Parts that let the devices reach so much of the sum of their speeds are fine enough."""


def reach(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """What devices with so many microbatches each do at most, as a part of the sum of their speeds."""
    slowest = max(count / speed for count, speed in zip(counts, speeds, strict=True))
    return sum(counts) / sum(speeds) / slowest


def best_reach(num: int, speeds: Sequence[float]) -> float:
    """The same of the best parts of so many microbatches; 0 where there are fewer than devices."""
    return reach(soonest(num, [1 / speed for speed in speeds]), speeds) if num >= len(speeds) else 0.0


def too_coarse(batch: int, num: int, speeds: Sequence[float]) -> str:
    """A sentence where microbatches are too few for parts by speed, and what to change; empty where they are not.

    Args:
        batch: samples of an update.
        num: microbatches that it has.
        speeds: of the devices, in any unit.
    """
    now = best_reach(num, speeds)
    if now >= GOAL:
        return ""
    said = (
        f"A batch of {batch} in {units.plural(num, 'microbatch', 'microbatches')} lets devices of speed "
        f"{' : '.join(units.significant(speed / max(speeds), 2) for speed in speeds)} reach "
        f"{units.percent(now, 0)} of the sum of their speeds at most"
    )
    finer = next((more for more in range(num + 1, batch + 1) if best_reach(more, speeds) >= GOAL), None)
    if finer is None:
        return f"{said}: raise --batch."
    return (
        f"{said}; --set microbatches={finer} allows {units.percent(best_reach(finer, speeds), 0)} (another "
        "experiment only where batch norm takes its statistics over microbatches)."
    )


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


_PACKAGES = ("lightning", "accelerate", "timm", "torchvision", "numpy")


def machine_of(device: torch.device) -> dict[str, Any]:
    """The facts, by name."""
    about = describe("", device)
    found: dict[str, Any] = {key: about[key] for key in ("machine", "convoy", "torch", "python")}
    found |= {"cores": len(own_cores()), "device": device.type}
    if device.type == "cuda":
        found |= {"gpus": torch.cuda.device_count(), "cuda": torch.version.cuda}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


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


@dataclass(frozen=True)
class Prepared:
    """A study that can be measured.

    Attributes:
        rows: in the order of the table.
        machine: facts of it, by name.
        cluster: that is to be emulated.
    """

    study: Study
    rows: list[Configuration]
    machine: dict[str, Any]
    cluster: Cluster | None


def prepare(ask: Ask) -> Prepared:
    """The study that is asked for.

    Args:
        ask: checked.

    Raises:
        ConvoyError: there is no such recipe or network, or the machine has too few devices.
    """
    recipe = ask.recipe_of()
    if ask.peers_of():
        check_recipe(recipe)
    device = choose_device(ask.device)
    cluster, text = ask.cluster()
    speeds = tuple(one.speed for one in cluster.devices) if cluster is not None else ()
    on_cpu = device.type == "cpu"
    numbers = ask.numbers(len(speeds) or (len(own_cores()) if on_cpu else torch.cuda.device_count()))
    each = _share(ask, numbers, len(speeds), on_cpu)
    alone = len(speeds) or torch.cuda.device_count()
    unequal = bool(ask.shares) and (not on_cpu or len(set(speeds)) > 1)
    rows = configurations(
        numbers, ask.plans_of(), ask.peers_of(), ask.shares_of(), min(alone, max(numbers)) if unequal else 1
    )
    recipe = _divisible(ask, recipe, max(numbers))
    study = Study(
        recipe=recipe,
        made=made_for(recipe, ask.image_size, ask.classes) if ask.data is None else None,
        weak=ask.batch_per_device is not None,
        device_type=device.type,
        cores_per_device=each,
        cluster=text,
        updates=ask.updates,
        warm_up=ask.warm_up,
        speeds=speeds,
    )
    _check_batches(study, rows)
    return Prepared(study, rows, machine_of(device), cluster)


def _share(ask: Ask, numbers: list[int], emulated: int, on_cpu: bool) -> int:
    """Cores of each device; 0 where that is settled otherwise, as by a cluster of emulated ones."""
    if emulated:
        return 0
    if on_cpu:
        return cores_per_device(numbers, ask.cores_per_device)
    if ask.cores_per_device is not None:
        raise ConvoyError("--cores-per-device has no effect on GPUs: leave it out")
    check_gpus(numbers)
    return 0


def _divisible(ask: Ask, recipe: Recipe, devices: int) -> Recipe:
    """The recipe with microbatches so small that every device can have one, unless the command says how large they are.

    All rows have the same ones: batch norm takes its statistics over them.
    """
    said = any(setting.startswith("microbatch") for setting in ask.settings)
    own = recipe.batch if ask.batch_per_device is not None else recipe.batch // devices
    if said or recipe.microbatch is None or not own:
        return recipe
    return recipe.model_copy(update={"microbatch": min(recipe.microbatch, own)})


def _check_batches(study: Study, rows: list[Configuration]) -> None:
    for row in rows:
        if study.batch(row.devices) < row.devices:
            raise ConvoyError(
                f"a batch of {study.batch(row.devices)} is too small for {row.devices} devices: raise --batch"
            )
