"""Builds all that a run needs from its recipe, and nothing on disk: what is wrong is said before a file is made."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from convoy import models
from convoy.data import DataSet, Order, evaluation_batches, num_workers, open_data
from convoy.data.sources import Progress
from convoy.engine import GradientTree, Probe, StepContext, passes, prepare, probe
from convoy.errors import ConvoyError
from convoy.training.derived import Derived, Quantities, derive, num_threads, resolve
from convoy.training.ema import AveragedModel
from convoy.training.evaluate import Evaluation, evaluate, evaluating
from convoy.training.loss import ClassificationLoss, heads
from convoy.training.optimizers import create_optimizer
from convoy.training.precision import DTYPES, check_precision
from convoy.training.recipe import Recipe
from convoy.training.state import RunState
from convoy.training.step import InputPipeline, TrainingStep


@dataclass
class Session:
    """The live objects of one run.

    Attributes:
        merge: microbatches that run in one pass; 1 where the network needs them one by one.
        notes: sentences about what was decided, for the log and the report.
    """

    recipe: Recipe
    data: DataSet
    order: Order
    quantities: Quantities
    device: torch.device
    model: nn.Module
    context: StepContext
    pipeline: InputPipeline
    state: RunState
    forward: Callable[..., Any]
    probe: Probe
    merge: int
    derived: list[Derived]
    notes: list[str]

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        return autocast_of(self.recipe, self.device)

    def evaluate(self) -> Evaluation:
        """Evaluate what the run would deliver now, with averaged weights if there are any, on all of the test split."""
        batches = evaluation_batches(
            self.data, self.recipe.data, batch=sum(passes(self.quantities.sizes, self.merge)[0])
        )
        return evaluate(self.state.delivered(), batches, self.pipeline, len(self.data.classes), self.autocast)

    def step(self) -> TrainingStep:
        """The function that does one weight update."""
        recipe = self.recipe
        return TrainingStep(
            model=self.model,
            forward=self.forward,
            context=self.context,
            pipeline=self.pipeline,
            loss=ClassificationLoss(recipe.loss.label_smoothing, recipe.loss.aux_weight),
            mixing=recipe.data.mix,
            optimizer=self.state.optimizer,
            learning_rate=self.quantities.schedule.lr,
            autocast=self.autocast,
            scaler=self.state.scaler,
            passes=passes(self.quantities.sizes, self.merge),
            tree=GradientTree(list(self.model.parameters())) if recipe.reproducible else None,
            reseed=self.probe.draws,
            clip_norm=recipe.clip_norm,
        )


def set_up(recipe: Recipe, device: torch.device, progress: Progress | None = None) -> Session:
    """Open the data, build the network and everything around it.

    Args:
        recipe: what to train, and how.
        device: where.
        progress: is told of long work on the data: what, done, total.

    Raises:
        ConvoyError: the recipe, the data or the weights cannot be used as they are.
    """
    set_numerics(recipe)
    check_precision(recipe.precision, device)
    data = open_data(recipe.data, progress)
    quantities = resolve(recipe, len(data.train))
    model, notes = build_model(recipe, data)
    if recipe.batch_norm != "microbatch" and not any(isinstance(layer, _BatchNorm) for layer in model.modules()):
        notes.append(f"batch_norm={recipe.batch_norm} has no effect: {recipe.model.name} has no batch norm")
    context = prepare(model, recipe.seed, recipe.batch_norm)
    memory_format = torch.channels_last if recipe.channels_last else torch.contiguous_format
    model.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]
    found = _probe(model, context, recipe, data, quantities.sizes, device)
    merge, reason = _merge(recipe, found, quantities.sizes, device)
    optimizer = create_optimizer(model, recipe.optimizer, quantities.lr)
    averaged = AveragedModel(model, recipe.ema.decay) if recipe.ema else None
    scaler = torch.amp.GradScaler(device.type, enabled=recipe.precision == "fp16")
    return Session(
        recipe=recipe,
        data=data,
        order=Order(len(data.train), recipe.batch, recipe.seed),
        quantities=quantities,
        device=device,
        model=model,
        context=context,
        pipeline=InputPipeline(data, device, memory_format),
        state=RunState(model, optimizer, scaler, averaged),
        forward=torch.compile(model) if recipe.compile else model,
        probe=found,
        merge=merge,
        derived=[
            *derive(recipe, len(data.train), workers=num_workers(data, recipe.data)),
            Derived("microbatches in one pass", merge, reason, "tried before training: docs/numerics.md"),
        ],
        notes=[*recipe.notes(), *data.notes, *notes],
    )


def autocast_of(recipe: Recipe, device: torch.device) -> AbstractContextManager[Any]:
    """The context of a forward pass in the recipe's precision."""
    if recipe.precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, DTYPES[recipe.precision])


def set_numerics(recipe: Recipe) -> None:
    """Set the process's threads and torch's switches as the recipe asks."""
    torch.set_num_threads(num_threads(recipe))
    torch.use_deterministic_algorithms(recipe.reproducible)
    torch.backends.cudnn.benchmark = not recipe.reproducible


def build_model(recipe: Recipe, data: DataSet) -> tuple[nn.Module, list[str]]:
    """The recipe's network for the data's classes and channels, initialised from the seed, with its weights loaded.

    Returns:
        The network and notes on what was done to it.
    """
    section, notes = recipe.model, []
    options = dict(section.options)
    if models.accepts(section.name, "image_size"):
        options.setdefault("image_size", data.image_size)
    if section.zero_init_residual:
        if models.accepts(section.name, "zero_init_residual"):
            options["zero_init_residual"] = True
        else:
            notes.append(
                f"{section.name} has no residual blocks to start at zero: model.zero_init_residual does nothing"
            )
    torch.manual_seed(recipe.seed)
    model = models.create(section.name, num_classes=len(data.classes), in_channels=data.channels, **options)
    if section.weights is not None:
        notes += models.load_weights(model, section.weights)
    return model, notes


def _probe(
    model: nn.Module, context: StepContext, recipe: Recipe, data: DataSet, sizes: tuple[int, ...], device: torch.device
) -> Probe:
    shape = (data.channels, data.image_size, data.image_size)
    try:
        _check_classifier(model, torch.zeros(1, *shape, device=device), recipe.model.name, len(data.classes))
        return probe(model, context, shape, device, samples=min(2, *sizes))
    except ConvoyError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ConvoyError(
            f"{recipe.model.name} cannot train on images of {'×'.join(map(str, shape))} in microbatches of {min(sizes)}"
            f" ({reason}): change data.image_size, data.channels, the microbatch or the model"
        ) from error


def _check_classifier(model: nn.Module, image: Tensor, name: str, num_classes: int) -> None:
    with evaluating(model), torch.no_grad():
        logits = heads(model(image))[0]
    if logits.shape != (1, num_classes):
        raise ConvoyError(
            f"{name} gives {logits.shape[1]} logits for an image, but the data has {num_classes} classes: "
            "build the network for as many classes, or choose another model"
        )


def _merge(recipe: Recipe, found: Probe, sizes: tuple[int, ...], device: torch.device) -> tuple[int, str]:
    num = len(sizes)
    if recipe.reproducible:
        return 1, "reproducible: one by one"
    if recipe.batch_norm != "microbatch":
        return num, f"all {num}: batch_norm={recipe.batch_norm} is over the whole batch"
    merge = found.merge(sizes, device)
    if found.draws:
        return 1, "one by one: the network draws random numbers outside of dropout layers"
    if not found.separable:
        return 1, "one by one: the network couples the samples of a batch"
    return merge, f"as many of {num} as fit the budget of a pass, {found.bytes_per_sample / 2**20:.2f} MiB a sample"
