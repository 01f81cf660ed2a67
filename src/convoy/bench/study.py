"""The set-up of a study: recipe, made-up pictures, machine, and the cores of a device."""

import contextlib
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from convoy import models, units
from convoy.bench.ask import Ask, configurations, parts_of
from convoy.bench.emulated import Cluster
from convoy.bench.records import Configuration, Made, StudyFacts
from convoy.data.dataset import DataSet, open_data
from convoy.data.pixels import PixelSource
from convoy.data.sources import Progress
from convoy.errors import ConvoyError
from convoy.plans.plan import Plan
from convoy.recipe.recipe import Recipe
from convoy.resources import own_cores, share
from convoy.training import choose_device
from convoy.training.derived import num_microbatches
from convoy.training.division import soonest
from convoy.training.environment import describe
from convoy.training.precision import settle

NAME = "made-up pictures in memory"
_USUAL_SIZE, _USUAL_CLASSES = 224, 1000


def made_for(recipe: Recipe, image_size: int | None, classes: int | None) -> Made:
    """The pictures that a network takes."""
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
        layers = [int(layer.out_features) for layer in model.modules() if isinstance(layer, nn.Linear)]
        num_classes = num_classes or (layers[-1] if layers else _USUAL_CLASSES)
    return Made(shape=(channels, size, size), classes=num_classes)


def data_of(made: Made | None, recipe: Recipe) -> DataSet | None:
    """Random pictures of an update with random labels, the same in every process, of which nothing is evaluated; None
    where the recipe's data are read."""
    if made is None:
        return None
    channels, size, _ = made.shape
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (recipe.batch, size, size, channels), dtype=np.uint8)
    labels = random.integers(0, made.classes, recipe.batch)
    return DataSet(
        name=NAME,
        classes=[str(number) for number in range(made.classes)],
        train=PixelSource(pixels, labels, NAME),
        test=PixelSource(pixels[:1], labels[:1], NAME),
        image_size=size,
        channels=channels,
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
        resize=size,
    )


def opened(recipe: Recipe, progress: Progress | None = None) -> DataSet:
    """The data of a recipe, as a training opens them."""
    return open_data(recipe.data, progress, selects=recipe.selects, task=recipe.task)


GOAL = 0.98  # parts that let the devices reach so much of the sum of their speeds are fine enough


def best_reach(num: int, speeds: Sequence[float]) -> float:
    """The largest speed of devices among which so many microbatches are divided in the best way, as a part of the sum
    of their speeds; 0 where there are fewer microbatches than devices."""
    if num < len(speeds):
        return 0.0
    counts = soonest(num, [1 / speed for speed in speeds])
    return num / sum(speeds) / max(count / speed for count, speed in zip(counts, speeds, strict=True))


def too_coarse(batch: int, num: int, speeds: Sequence[float]) -> str:
    """A sentence where an update has too few microbatches for parts by the speeds of devices (in any unit), and what to
    change; empty where they are enough."""
    if best_reach(num, speeds) >= GOAL:
        return ""
    sentence = (
        f"A batch of {batch} in {units.plural(num, 'microbatch', 'microbatches')} lets devices of speed "
        f"{' : '.join(units.significant(speed / max(speeds), 2) for speed in speeds)} reach "
        f"{units.percent(best_reach(num, speeds), 0)} of the sum of their speeds at most"
    )
    finer = next((more for more in range(num + 1, batch + 1) if best_reach(more, speeds) >= GOAL), None)
    if finer is None:
        return f"{sentence}: raise --batch."
    return (
        f"{sentence}; --set microbatches={finer} allows {units.percent(best_reach(finer, speeds), 0)} (another "
        "experiment only where batch norm takes its statistics over microbatches)."
    )


def recipe_for(recipe: Recipe, study: StudyFacts, row: Configuration, plan: str | None, shares: str = "") -> Recipe:
    """The recipe of a row, under a plan and with shares, as a row has them."""
    parsed = Plan.parse(plan) if plan is not None else None
    parallel = recipe.parallel.model_copy(update={"devices": row.devices, "plan": parsed, **in_recipe(shares)})
    return recipe.model_copy(update={"batch": study.batch_on(row.devices), "parallel": parallel})


def in_recipe(shares: str) -> dict[str, Any]:
    """The shares of a row as a recipe has them; nothing where the row leaves them to the study's recipe."""
    if not shares:
        return {}
    return {"shares": shares if shares == "auto" else tuple(float(part) for part in shares.split(","))}


def plain_recipe(recipe: Recipe, made: Made | None) -> dict[str, Any]:
    """A recipe as a study keeps it: without what its rows decide, and what made-up pictures do not ask."""
    document = recipe.model_dump(mode="json")
    document["parallel"] = {key: value for key, value in document["parallel"].items() if key not in ("devices", "plan")}
    if made is not None:
        document["data"] = {key: document["data"][key] for key in ("augment", "mix", "workers")}
    return document


_PACKAGES = ("lightning", "accelerate", "timm", "torchvision", "numpy")


def machine_facts(device: torch.device) -> dict[str, Any]:
    """The machine of a study, and the versions of what is measured."""
    about = describe("", device)
    facts: dict[str, Any] = {key: about[key] for key in ("machine", "convoy", "torch", "python")}
    facts |= {"cores": len(own_cores()), "device": device.type}
    if device.type == "cuda":
        facts |= {"gpus": torch.cuda.device_count(), "cuda": torch.version.cuda}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[package] = importlib.metadata.version(package)
    return facts


def _cores_each(ask: Ask, largest: int, on_cpu: bool) -> int:
    """CPU cores of each device, the same in every configuration: all divided by the largest number of devices; 0 on
    GPUs. A ConvoyError says where there are too few cores or GPUs."""
    per_device = ask.cores_per_device
    if not on_cpu:
        if per_device is not None:
            raise ConvoyError("--cores-per-device has no effect on GPUs: leave it out")
        num = torch.cuda.device_count()
        if largest > num:
            raise ConvoyError(
                f"--devices {largest} needs {largest} GPUs, but here {'is' if num == 1 else 'are'} {num}: use "
                f"at most {num}, or --device cpu"
            )
        return 0
    cores = own_cores()
    if largest > len(cores):
        raise ConvoyError(
            f"--devices {largest} needs {largest} cores, but here are {len(cores)}: devices that take turns on a core "
            "say nothing of real ones; use at most as many, or --emulate a cluster"
        )
    return len(share(cores, largest, 0, per_device))


@dataclass(frozen=True)
class Prepared:
    """A study that can be measured."""

    recipe: Recipe  # with the batch of one device under weak scaling
    study: StudyFacts
    rows: list[Configuration]  # in the order of the table
    notes: list[str]  # sentences for the user
    machine: dict[str, Any]  # facts by name
    cluster: Cluster | None  # to be emulated; None for this machine's devices


def prepare(ask: Ask) -> Prepared:
    """The study of a command that was checked."""
    recipe, peers = ask.recipe_of(), ask.peers_of()
    if peers:
        _check_peers(recipe)
    device = choose_device(ask.device)
    recipe = settle(recipe, device).recipe  # one for all rows
    if ask.train_epochs is None:  # updates are of the largest pictures, as they are predicted
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"progressive": None})})
    cluster, text = ask.cluster()
    speeds = [emulated.speed for emulated in cluster.devices] if cluster is not None else []
    on_cpu = device.type == "cpu"
    numbers = ask.numbers(len(speeds) or (len(own_cores()) if on_cpu else torch.cuda.device_count()))
    largest, weak = max(numbers), ask.batch_per_device is not None
    cores_per_device = 0 if speeds else _cores_each(ask, largest, on_cpu)
    unequal = bool(ask.shares) and (not on_cpu or len(set(speeds)) > 1)
    alone = min(len(speeds) or torch.cuda.device_count(), largest) if unequal else 1
    rows = configurations(numbers, ask.plans_of(), peers, ask.shares_of(), alone)
    local_batch = recipe.batch if weak else recipe.batch // largest
    if recipe.microbatch is not None and local_batch and not ask.says("microbatch"):
        # as `divisible_sizes` does for one run; but all rows have the same, also of networks with batch norm
        recipe = recipe.model_copy(update={"microbatch": min(recipe.microbatch, local_batch)})
    pictures = made_for(recipe, ask.image_size, ask.classes) if ask.data is None else None
    study = StudyFacts(
        model=recipe.model.name,
        recipe=plain_recipe(recipe, pictures),
        images=pictures,
        weak=weak,
        batch=recipe.batch,
        device_type=device.type,
        cores_per_device=cores_per_device,
        cluster=text,
        speeds=speeds,
        updates=ask.updates,
        warm_up=ask.warm_up,
    )
    if (batch := study.batch_on(largest)) < largest:  # not after the rows on fewer devices were measured
        raise ConvoyError(f"a batch of {batch} is too small for {largest} devices: raise --batch")
    usual, notes = models.describe(recipe.model.name).input_shape, list[str]()
    if pictures is not None and not (ask.image_size or recipe.data.image_size or usual):
        notes.append(
            f"{recipe.model.name} does not say what pictures it takes: {units.shape(pictures.shape)} and "
            f"{pictures.classes} classes are assumed (--image-size and --classes say otherwise)"
        )
    for row in rows if speeds else ():
        if row.shares and parts_of(row.plan or "serial", row.devices) == row.devices:
            coarse = too_coarse(study.batch_on(row.devices), num_microbatches(recipe), speeds[: row.devices])
            notes += [coarse] if coarse and coarse not in notes else []
    return Prepared(recipe, study, rows, notes, machine_facts(device), cluster)


def _check_peers(recipe: Recipe) -> None:
    """Refuse (ConvoyError) a recipe by which only Convoy trains."""
    for asked, what in (
        (recipe.precision == "fp16", "precision=fp16 (bf16 can be)"),
        (recipe.ema is not None, "ema"),
        (recipe.lookahead is not None, "lookahead"),
        (recipe.reproducible, "reproducible"),
    ):
        if asked:
            raise ConvoyError(f"--peers do not train with {what}: leave that or --peers out")
