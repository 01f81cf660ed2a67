"""The loss and the metrics that are functions of the user's, tried before training on outputs like the network's."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.data.dataset import DataSet
from convoy.data.loader import batch_maker
from convoy.errors import ConvoyError, reason
from convoy.own import function_of
from convoy.recipe.recipe import Recipe
from convoy.run.records import MetricsLine
from convoy.tasks.metric import MetricOfAll
from convoy.tasks.task import Task, kept_of

_TRIED, _TOLERANCE = 64, 1e-4  # samples; and by how much sums over them may differ in float32


class OwnLoss:
    """`function(outputs, targets)` of a head: a number for each sample, or their mean."""

    def __init__(self, name: str) -> None:
        self._name, self._function = name, function_of(name)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        value: Tensor = self._function(outputs, targets)
        return value.mean() if value.dim() else value

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse what is no loss of each sample; only so is that of uneven shares the loss of the global batch."""
        outputs = outputs.requires_grad_()
        shapes = _described("outputs", outputs), _described("targets", targets)
        value = _tried(f"the loss {self._name}", self._function, outputs, targets)
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape not in ((), outputs.shape[:1]):
            result = _described("", value).strip() if isinstance(value, Tensor) else type(value).__name__
            raise ConvoyError(
                f"the loss {self._name} gave {result} for {shapes[0]} and {shapes[1]}: let it give a number for each "
                "sample, or their mean"
            )
        mean = value.mean()
        if not bool(torch.isfinite(mean)):
            raise ConvoyError(
                f"the loss {self._name} gave {float(mean.detach())} for {shapes[0]}, which are normal numbers"
            )
        gradient = torch.autograd.grad(mean, outputs, allow_unused=True)[0] if mean.requires_grad else None
        if gradient is None or not bool(torch.isfinite(gradient).all() and gradient.any()):
            what = "no gradient" if gradient is None or not gradient.any() else "a gradient that is not finite"
            raise ConvoyError(f"the loss {self._name} has {what}: compute it from the outputs by torch's functions")
        first = len(targets) // 4 or 1
        with torch.no_grad():
            parts = [(outputs[:first], targets[:first]), (outputs[first:], targets[first:])]
            again = sum(float(self(*part)) * len(part[1]) for part in parts if len(part[1])) / len(targets)
        if abs(again - float(mean.detach())) > _TOLERANCE * max(1.0, abs(again)):
            raise ConvoyError(
                f"the loss {self._name} of some samples is not the mean of each of them, so that it would depend on "
                "how a batch is divided: let it give a number for each sample"
            )


def own_metric(name: str) -> MetricOfAll:
    """`function(outputs, targets)` of all samples of an evaluation, in their order, on the CPU; an attribute `better`
    of the function says what is, `higher` where it has none."""
    function = function_of(name)
    better: Any = getattr(function, "better", "higher")
    if better not in ("higher", "lower"):
        raise ConvoyError(f"the metric {name} has better={better!r}: set it to 'higher' or 'lower'")

    def of(outputs: Tensor, targets: Tensor) -> float:
        value = _tried(f"the metric {name}", function, outputs, targets)
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise ConvoyError(f"the metric {name} gave {type(value).__name__}: let it give one number") from error

    return MetricOfAll(name.rpartition(":")[2].rpartition(".")[2], better, of=of)


def add_own(task: Task, recipe: Recipe) -> None:
    """Give a task the recipe's loss and metrics that are functions of the user's."""
    if recipe.loss.function is not None:
        task.own_loss = OwnLoss(recipe.loss.function)
    add_own_metrics(task, recipe)


def add_own_metrics(task: Task, recipe: Recipe) -> None:
    """Give a task the recipe's metrics alone, as an evaluation needs them."""
    task.own_metrics = tuple(map(own_metric, recipe.metrics))
    names = [*(metric.name for metric in task.all_metrics), *MetricsLine.model_fields]
    for metric in task.own_metrics:
        if names.count(metric.name) > 1:
            raise ConvoyError(
                f"{metric.name} is a number in the metrics of {task.name} already: call the function by another name"
            )


def check_own_task(task: Task, recipe: Recipe, data: DataSet) -> None:
    """Try a loss and metrics of the user's on samples from all over the data."""
    if task.own_loss is None and not task.own_metrics:
        return
    number = min(_TRIED, len(data.train))
    samples = torch.arange(number).numpy() * len(data.train) // number
    targets = batch_maker(data, recipe.data, data.train, recipe.seed).at(0).make(samples, 0).targets
    generator = torch.Generator().manual_seed(0)
    pixels = [data.image_size] * (task.num_dims - 2)
    logits = torch.randn(number, len(task.classes), *pixels, generator=generator)
    for metric in task.own_metrics:
        one, other = (metric.of(*kept_of(logits, targets)) for _ in range(2))
        if one != other and not (one != one and other != other):
            raise ConvoyError(
                f"the metric {metric.name} of the same outputs was {one:g} and then {other:g}: let it draw no random "
                "numbers, or always the same ones"
            )
    if isinstance(task.own_loss, OwnLoss):
        task.own_loss.check(logits, targets)
        if recipe.data.mix.on:
            task.own_loss.check(logits.detach(), F.one_hot(targets, len(task.classes)).float())


def _tried(what: str, function: Any, outputs: Tensor, targets: Tensor) -> Any:
    try:
        return function(outputs, targets)
    except Exception as error:
        shapes = f"{_described('outputs', outputs)} and {_described('targets', targets)}"
        raise ConvoyError(f"{what} failed with {reason(error)}: it is called with {shapes}") from error


def _described(name: str, tensor: Tensor) -> str:
    return f"{name} {list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
