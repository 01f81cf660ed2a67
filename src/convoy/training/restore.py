"""Brings back what a run delivered: its recipe, its data and its trained network."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from convoy.data import DataConfig, DataSet, evaluation_batches, open_data
from convoy.errors import ConvoyError
from convoy.training.build import build_model
from convoy.training.evaluate import Evaluation, evaluate
from convoy.training.numerics import autocast_of, set_numerics
from convoy.training.recipe import Recipe, load_recipe
from convoy.training.step import InputPipeline
from convoy.training.storage.run_directory import RunDirectory

EVALUATION_BATCH = 256


@dataclass(frozen=True)
class Trained:
    """A run's recipe, data set and trained network, on the CPU."""

    recipe: Recipe
    data: DataSet
    model: nn.Module

    def evaluate(self, device: torch.device) -> Evaluation:
        """Evaluate on every sample of the test split."""
        memory_format = torch.channels_last if self.recipe.channels_last else torch.contiguous_format
        self.model.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]
        batches = evaluation_batches(self.data, self.recipe.data, batch=EVALUATION_BATCH)
        pipeline = InputPipeline(self.data, device, memory_format)
        num_classes = len(self.data.classes)
        return evaluate(self.model, batches, pipeline, num_classes, lambda: autocast_of(self.recipe, device))


def network_input(data: DataSet) -> dict[str, Any]:
    """What a network is given: kept with the run, so that other data is prepared for it in the same way."""
    return {
        "classes": data.classes,
        "channels": data.channels,
        "image_size": data.image_size,
        "resize": data.resize,
        "mean": list(data.mean),
        "std": list(data.std),
    }


def _recorded_input(run: RunDirectory) -> dict[str, Any]:
    path = run.path / "environment.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["input"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConvoyError(f"{path} does not say how pictures were prepared: evaluate without --data") from error
    return found


def _other_data(run: RunDirectory, data_path: str) -> DataConfig:
    settings = {"path": data_path, "format": "auto", "validation_fraction": "null", "split_seed": "null"}
    settings |= {key: value for key, value in _recorded_input(run).items() if key != "classes"}
    return load_recipe(str(run.config), [f"data.{key}={value}" for key, value in settings.items()]).data


def restore(path: Path, data_path: str | None = None) -> Trained:
    """Load a finished run.

    Args:
        path: its run directory.
        data_path: evaluate on other data than it was trained on; the classes must be as many.

    Raises:
        ConvoyError: this is no run, it has no weights yet, or they do not fit.
    """
    run = RunDirectory(path)
    if not run.is_run():
        raise ConvoyError(f"{path} is no run directory (it has no config.yaml): give the --out folder of convoy train")
    if not run.weights.is_file():
        raise ConvoyError(f"{path} has no weights.safetensors yet: finish the run with convoy train {path} --resume")
    recipe = load_recipe(str(run.config))
    without_weights = recipe.model.model_copy(update={"weights": None})
    recipe = recipe.model_copy(update={"model": without_weights})
    if data_path is not None:
        recipe = recipe.model_copy(update={"data": _other_data(run, data_path)})
    set_numerics(recipe)
    data = open_data(recipe.data)
    if data_path is not None and data.classes != _recorded_input(run)["classes"]:
        raise ConvoyError(f"{data_path} has other classes than {path} was trained on: give data with the same classes")
    model, _ = build_model(recipe, data)
    try:
        model.load_state_dict(load_file(run.weights))
    except (SafetensorError, OSError) as error:
        raise ConvoyError(f"{run.weights} is damaged ({error}): train again, or put back a whole copy") from error
    except RuntimeError as error:
        reason = str(error).partition("\n")[2].strip().partition("\n")[0].rstrip(".")
        raise ConvoyError(f"{run.weights} does not fit {recipe.model.name} on this data: {reason}") from error
    return Trained(recipe, data, model)
