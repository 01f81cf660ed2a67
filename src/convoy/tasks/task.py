"""What a network is trained for: the loss of its outputs, and the exact evaluation by which it is judged, in which
every sample counts once, whatever the batches are. `classification.py` is one task, and a model for others.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from convoy.data.batch import Batch
from convoy.data.dataset import DataSet
from convoy.errors import ConvoyError
from convoy.files import write_atomically
from convoy.run import records
from convoy.tasks.metric import Metric, MetricOfAll

Drawn = Callable[[int, Tensor], dict[str, Any]]


@dataclass(order=True)
class Shown:
    """A sample that a report shows; of equal scores the number decides."""

    score: float
    sample: int
    picture: Tensor = field(compare=False, repr=False)  # what the network saw, uint8 [channels, height, width]
    facts: dict[str, Any] = field(compare=False, repr=False)


@dataclass
class Evaluation(ABC):
    """What a network does on a whole split, or on one part of it: the batches that a rank takes in turn."""

    summed: ClassVar[tuple[str, ...]] = ()  # fields of the task's own, which add up over parts
    most_shown: ClassVar[int] = 0
    shows_highest: ClassVar[bool] = False  # scores, these first; else the lowest
    keeps: ClassVar[bool] = False  # whether the task's own numbers are functions of all outputs and targets
    # By batch: the loss summed over what counts, and how much counts. Their quotient is the loss of the split.
    losses: list[float] = field(default_factory=list, kw_only=True)
    counts: list[float] = field(default_factory=list, kw_only=True)
    num_images: int = field(default=0, kw_only=True)  # that count: those that could not be read count nowhere
    bad: list[tuple[int, str]] = field(default_factory=list, kw_only=True)  # these, with the reason
    # By batch, outputs and targets for numbers that are functions of all of them; None where there are none such.
    kept: list[tuple[Tensor, Tensor]] | None = field(default=None, kw_only=True)
    own: dict[str, float] = field(default_factory=dict, kw_only=True)  # values of these metrics
    shown: list[Shown] = field(default_factory=list, kw_only=True)
    seconds: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        if self.keeps and self.kept is None:
            self.kept = []

    def add(self, batch: Batch, outputs: Tensor) -> None:
        """Count the samples of a batch; `outputs` are those of the main head, at least float32."""
        self.bad += batch.bad
        self.num_images += len(batch)
        loss, count = self._add(batch, outputs) if len(batch) else (0.0, 0.0)
        self.losses.append(loss)
        self.counts.append(count)
        if self.kept is not None:
            self.kept.append(kept_of(outputs.cpu(), batch.targets))

    @abstractmethod
    def _add(self, batch: Batch, outputs: Tensor) -> tuple[float, float]:
        """Count what is special to the task; returns the summed loss, and how much counts in it."""

    @staticmethod
    def total(parts: Sequence["Evaluation"]) -> "Evaluation":
        """That of the whole split, from parts that took turns at its batches: the same for any number of them."""
        return replace(
            parts[0],
            losses=in_turn([part.losses for part in parts]),
            counts=in_turn([part.counts for part in parts]),
            num_images=sum(part.num_images for part in parts),
            bad=sorted(entry for part in parts for entry in part.bad),
            kept=None if parts[0].kept is None else in_turn([part.kept or [] for part in parts]),
            seconds=max(part.seconds for part in parts),
            shown=parts[0]._first(chain.from_iterable(part.shown for part in parts)),
            **{name: sum(getattr(part, name) for part in parts) for name in parts[0].summed},
        )

    def _first(self, shown: Iterable[Shown]) -> list[Shown]:
        """Those of some samples that a report shows, in order."""
        return sorted(shown, reverse=self.shows_highest)[: self.most_shown]

    @property
    def loss(self) -> float:
        """Mean over all that counts."""
        total = 0.0
        for loss in self.losses:  # `sum` of later Pythons rounds otherwise
            total += loss
        return total / (sum(self.counts) or 1)

    def metrics(self) -> dict[str, float]:
        """The values of all metrics, by name."""
        return self._metrics() | self.own

    @abstractmethod
    def _metrics(self) -> dict[str, float]:
        """Those of the task's metrics."""

    def measured(self, metrics: Sequence[MetricOfAll]) -> dict[str, float]:
        """The values of metrics that are functions of all outputs and targets, by name."""
        tensors = self._all_kept()
        return {} if tensors is None else {metric.name: metric.of(*tensors) for metric in metrics}

    def _all_kept(self) -> tuple[Tensor, Tensor] | None:
        """The outputs and targets of all samples; None where there are none."""
        batches = [pair for pair in self.kept or () if len(pair[1])]
        if not batches:
            return None
        outputs, targets = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        return outputs, targets

    def per_class(self, classes: Sequence[str]) -> list[dict[str, Any]]:
        """A row of numbers for each class, where the task has such."""
        return []

    def save(self, run: Path, data: DataSet) -> dict[str, Any]:
        """Write the pictures that a report shows into the run, and return what goes into `evaluation.json`."""
        (run / "mistakes").mkdir(exist_ok=True)
        numbers = count()

        def drawn(sample: int, pixels: Tensor) -> dict[str, Any]:
            picture = f"mistakes/{next(numbers):02d}.png"
            write_atomically(run / picture, partial(to_image(pixels).save, format="PNG"))
            return {"name": data.test.name(sample), "picture": picture}

        return records.EvaluationFile.model_construct(
            task=data.task,
            classes=data.classes,
            metrics={**self.metrics()},
            images=self.num_images,
            loss=self.loss,
            **{"per_class": self.per_class(data.classes), **self._to_show(drawn)},
        ).model_dump()

    def _to_show(self, drawn: Drawn) -> dict[str, Any]:
        """What else a report shows; `drawn` writes the picture of a sample, and gives what a record says of it."""
        return {}


def kept_of(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What a metric of all samples is given: of pictures of logits the classes alone, as all would be too many."""
    if outputs.dim() == 2:
        return outputs, targets
    return outputs.argmax(1).to(targets.dtype), targets.clone()  # uint8; a view would keep the pictures as well


def of_classes(confusion: Tensor) -> list[list[int]]:
    """Hits, samples and answers of each class, whose true labels are in the rows."""
    rows: list[list[int]] = torch.stack([confusion.diagonal(), confusion.sum(1), confusion.sum(0)], 1).tolist()
    return rows


def in_turn(lists: Sequence[list[Any]]) -> list[Any]:
    """What parts have of each of their batches, in the order of the batches, at which they took turns."""
    return list(chain.from_iterable(zip(*lists, strict=True)))


@dataclass
class Task(ABC):
    """What a network is trained for, whose outputs are one for each of `classes`.

    A loss is the mean over what counts in the samples given: the samples themselves, or what `count` says, as pixels
    that are labelled. The trainer weighs the means of microbatches and devices by that, so that the sum is the mean
    over the global batch, however this is divided.
    """

    classes: Sequence[str]  # names of the outputs
    aux_weight: float = field(default=0.3, kw_only=True)  # of the loss of auxiliary heads
    class_weights: Tensor | None = field(default=None, kw_only=True)  # [classes]; 1 in the mean over training samples
    # Of the user's: in place of the loss of each head, the mean over samples; and beside the task's metrics.
    own_loss: Callable[[Tensor, Tensor], Tensor] | None = field(default=None, kw_only=True)
    own_metrics: tuple[MetricOfAll, ...] = field(default=(), kw_only=True)

    name: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]  # the first one says which weights are best
    losses: ClassVar[tuple[str, ...]]  # names of `loss.name`; the first is the usual one
    score_name: ClassVar[str | None] = None  # of `score` over the samples, in the metrics of training
    num_dims: ClassVar[int] = 2  # of outputs
    output_shape: ClassVar[str] = "[samples, classes]"
    answer_name: ClassVar[str] = "probability"

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """The loss, a scalar, of outputs, or of a tuple of them with the main head first; auxiliary heads count with a
        weight of their own: GoogLeNet's two count 0.3 each (Szegedy et al., 2015, section 5).
        """
        main, *auxiliary = self.heads(outputs)
        of_head = self.own_loss or self._loss_of_head
        loss = of_head(main, targets)
        for logits in auxiliary:
            loss = loss + self.aux_weight * of_head(logits, targets)
        return loss

    def counted(self, targets: Tensor) -> Tensor | None:
        """As `count`, for the loss that there is."""
        return None if self.own_loss is not None else self.count(targets)

    @property
    def all_metrics(self) -> tuple[Metric, ...]:
        return (*self.metrics, *self.own_metrics)

    @abstractmethod
    def _loss_of_head(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a head over what counts; 0 where nothing does."""

    def count(self, targets: Tensor) -> Tensor | None:
        """How much the loss of these samples is the mean over, in whole numbers, which add up to the same in any order:
        a scalar, or [classes] where classes have weights; None where that is the number of samples."""
        return None

    def weighed(self, count: Tensor) -> Tensor:
        """How much a count counts, a scalar in float64."""
        weights = self.class_weights
        return count.double() if weights is None else (count * weights.to(count.device, torch.float64)).sum()

    def _weights(self, outputs: Tensor) -> Tensor | None:
        """The class weights where the outputs are, in float32 at least."""
        return None if self.class_weights is None else self.class_weights.to(outputs.device, precise(outputs).dtype)

    def score(self, outputs: Any, targets: Tensor) -> Tensor | None:
        """A number that says how good these answers are, summed over the samples, for the metrics of training."""
        return None

    def example(self, samples: int, image_size: int) -> Tensor:
        """Targets of some samples, to try an update with."""
        return torch.zeros(samples, dtype=torch.int64)

    @abstractmethod
    def answers(self, outputs: Tensor) -> Tensor:
        """What is said of each picture, a number for each class: float [samples, classes]."""

    @abstractmethod
    def evaluation(self) -> Evaluation:
        """An evaluation that has seen nothing yet."""

    def metric(self, name: str) -> Metric:
        """The metric with a name; a ConvoyError with the names where there is none."""
        for metric in self.all_metrics:
            if metric.name == name:
                return metric
        names = ", ".join(metric.name for metric in self.all_metrics)
        raise ConvoyError(f"{self.name} has no metric {name!r}: it has {names}")

    def check_outputs(self, outputs: Any, image_shape: tuple[int, int, int], network: str) -> None:
        """Refuse a network that gives other than one output for each class; the images have such a shape."""
        number, expected = self.heads(outputs)[0].shape[1], len(self.classes)
        if number != expected:
            raise ConvoyError(
                f"{network} gives {number} logits for an image, but the data has {expected} classes: build the "
                "network for as many classes, or choose another model"
            )

    def heads(self, outputs: Any) -> tuple[Tensor, ...]:
        """The outputs of every head, the main head first; a ConvoyError where they are of another shape."""
        tensors = tuple(_tensors(outputs))
        if not tensors or any(tensor.dim() != self.num_dims for tensor in tensors):
            shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors) or type(outputs).__name__
            raise ConvoyError(f"the network gives {shapes} where {self.name} needs logits {self.output_shape}")
        return tensors


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """Those in tuples, lists and dicts, in order; objects of other kinds do not say which is the main head."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, dict | tuple | list):
        for output in outputs.values() if isinstance(outputs, dict) else outputs:
            yield from _tensors(output)


def to_image(pixels: Tensor) -> Image.Image:
    """A picture from uint8 [channels, height, width], one or three channels."""
    array = pixels.permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def precise(outputs: Tensor) -> Tensor:
    """Outputs in float32 at least."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))
