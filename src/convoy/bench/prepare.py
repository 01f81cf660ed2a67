"""From what is asked for to the study: its recipe, its rows, its machine, and how much of the machine a device is."""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from convoy.bench.ask import Ask
from convoy.bench.configuration import Configuration, check_recipe, configurations
from convoy.bench.emulated import Cluster
from convoy.bench.study import Study, made_for
from convoy.errors import ConvoyError
from convoy.launch.place import own_cores
from convoy.training import Recipe, choose_device
from convoy.training.environment import describe

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
