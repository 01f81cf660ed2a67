"""One weight update of the global batch: passes over its microbatches, gradients, optimiser."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from convoy.data import Batch, DataSet, MixConfig, Normalise, mix
from convoy.engine import GradientTree, StepContext
from convoy.engine.random import fold
from convoy.training.loss import ClassificationLoss, num_correct


class InputPipeline:
    """Takes a batch's uint8 pictures to the device and normalises them there."""

    def __init__(self, data: DataSet, device: torch.device, memory_format: torch.memory_format) -> None:
        self.data = data
        self.device = device
        self.normalise = Normalise(data.mean, data.std, device, memory_format)

    def __call__(self, batch: Batch, start: int = 0, end: int | None = None) -> Tensor:
        """Pictures `start` to `end` of the batch: float32 [samples, channels, height, width]."""
        return self.normalise(batch.images[start:end].to(self.device, non_blocking=True))


@dataclass(frozen=True)
class StepResult:
    """What the passes of one update gave, as scalars on the device: `losses` add up to the mean loss, `correct` to the
    number of right answers. They are not added here: on small networks every operation counts.
    """

    losses: list[Tensor]
    correct: list[Tensor]


@dataclass
class TrainingStep:
    """Computes the gradient of the mean loss over the global batch and updates the weights.

    Attributes:
        forward: the model, perhaps compiled.
        passes: sizes of the microbatches in each pass over the network.
        tree: adds the gradients in the fixed order of the reproducible mode; every pass is then one microbatch.
        reseed: seed torch's generators before each pass, for networks that draw numbers by themselves.
    """

    model: nn.Module
    forward: Callable[[Tensor], Any]
    context: StepContext
    pipeline: InputPipeline
    loss: ClassificationLoss
    mixing: MixConfig
    optimizer: Optimizer
    learning_rate: Callable[[int], float]
    autocast: Callable[[], AbstractContextManager[Any]]
    scaler: torch.amp.GradScaler
    passes: list[tuple[int, ...]]
    tree: GradientTree | None
    reseed: bool
    clip_norm: float | None

    def __call__(self, batch: Batch, update: int) -> StepResult:
        """Do weight update number `update` (counted from 0) on a global batch."""
        self.optimizer.zero_grad(set_to_none=True)
        result = self._gradient(batch, update)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(update)
        if self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return result

    def _gradient(self, batch: Batch, update: int) -> StepResult:
        total = len(batch.labels)
        device = self.pipeline.device
        labels = batch.labels.to(device, non_blocking=True)
        losses: list[Tensor] = []
        correct: list[Tensor] = []
        start = 0
        for sizes in self.passes:
            end = start + sum(sizes)
            images, targets = self.pipeline(batch, start, end), labels[start:end]
            if self.mixing.on:
                keys = [fold(self.context.seed, update, start + sum(sizes[:i])) for i in range(len(sizes))]
                images, targets = mix(
                    images,
                    targets,
                    num_classes=len(self.pipeline.data.classes),
                    config=self.mixing,
                    sizes=list(sizes),
                    keys=keys,
                )
            self.context.enter(update, start, sizes, device)
            if self.reseed:
                torch.manual_seed(fold(self.context.seed, update, start))
            with self.autocast():
                outputs = self.forward(images)
                loss = self.loss(outputs, targets)
                if end - start < total:
                    loss = loss * ((end - start) / total)
            self.scaler.scale(loss).backward()
            if self.tree is not None:
                self.tree.add()
            losses.append(loss.detach())
            correct.append(num_correct(outputs, targets))
            start = end
        if self.tree is not None:
            self.tree.finish()
        return StepResult(losses, correct)
