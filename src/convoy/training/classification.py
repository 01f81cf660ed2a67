"""A network that classifies pictures: what it is given on its device, its outputs, which are logits, and their loss;
and its exact evaluation, in which every sample counts once, whatever the batches are.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from convoy.comm.position import current
from convoy.comm.ranks import Ranks
from convoy.data import Batch, DataSet, Normalize, evaluation_batches
from convoy.errors import ConvoyError
from convoy.files import write_atomically
from convoy.script.data import evaluating
from convoy.training import records
from convoy.training.precision import autocast_of
from convoy.training.recipe import Recipe

# Updates that the host may have issued beside the one that a GPU computes: their pictures lie in its memory.
_UPDATES_AHEAD = 2


class InputPipeline:
    """Takes a batch's uint8 pictures to the device, or cuts them out there, and normalizes them; takes its labels.

    On a GPU all of it runs on a stream of its own. The host is given back at once, so where it issues an update while
    the GPU computes the one before, the next batch is copied and normalized meanwhile. To take a batch from the loader
    ahead would help where the host waits in every update (fp16), and make every error in the data one update early.
    """

    def __init__(self, data: DataSet, device: torch.device, memory_format: torch.memory_format) -> None:
        self.data = data
        self.device = device
        self.normalize = Normalize(data.mean, data.std, device, memory_format)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        # What is on its way: the memory that it lies in is written to anew once nobody has it any more.
        self._copied: deque[tuple[torch.cuda.Event, object]] = deque()
        self._begun: deque[torch.cuda.Event] = deque()

    def __call__(self, batch: Batch, start: int = 0, end: int | None = None) -> Tensor:
        """Pictures `start` to `end` of the batch: float32 [samples, channels, height, width]."""
        pixels = batch.images[start:end]
        return self._sent(pixels, lambda: self.normalize(pixels.to(self.device, non_blocking=True)))

    def labels(self, batch: Batch) -> Tensor:
        """Labels of the batch of an update, which begins."""
        if self._side is not None:
            self._begun.append(_now())
            if len(self._begun) > _UPDATES_AHEAD:
                earlier = self._begun.popleft()
                if not earlier.query():
                    earlier.synchronize()
        return self._sent(batch.labels, lambda: batch.labels.to(self.device, non_blocking=True))

    def _sent(self, kept: object, send: Callable[[], Tensor]) -> Tensor:
        """What `send` brings to the device; `kept` is what it reads."""
        if self._side is None:
            return send()
        while self._copied and self._copied[0][0].query():
            self._copied.popleft()
        computing = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._side):
            tensor = send()
            self._copied.append((_now(), kept))
        computing.wait_stream(self._side)
        tensor.record_stream(computing)  # or their memory would be given to the next batch while this one is used
        return tensor


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


@dataclass(frozen=True)
class ClassificationLoss:
    """Mean cross-entropy over the samples given, or binary cross-entropy (`bce`), the mean over samples and classes;
    auxiliary heads count with a weight of their own.

    GoogLeNet's two auxiliary classifiers count 0.3 each (Szegedy et al., 2015, section 5). Label smoothing is that of
    Szegedy et al., 2016: the target is (1 - ε) for the label plus ε / classes for every class. Before that, and with
    `bce` alone, classes with more than `target_threshold` become 1, and others 0: both of a mixed picture are there
    (Wightman et al., 2021, section 3).
    """

    label_smoothing: float = 0.0
    aux_weight: float = 0.3
    name: Literal["cross-entropy", "bce"] = "cross-entropy"
    target_threshold: float | None = None

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        """The loss, a scalar, of logits [samples, classes], or of a tuple of them with the main head first; the targets
        are labels [samples] or class probabilities [samples, classes].
        """
        main, *auxiliary = heads(outputs)
        loss = self._of_head(main, targets)
        for logits in auxiliary:
            loss = loss + self.aux_weight * self._of_head(logits, targets)
        return loss

    def _of_head(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.name == "cross-entropy":
            return F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
        exact, classes = torch.promote_types(logits.dtype, torch.float32), logits.shape[1]
        present = (F.one_hot(targets, classes) if targets.dim() == 1 else targets).to(exact)
        if self.target_threshold is not None:
            present = (present > self.target_threshold).to(exact)
        smooth = present * (1 - self.label_smoothing) + self.label_smoothing / classes
        return F.binary_cross_entropy_with_logits(logits.to(exact), smooth)


def heads(outputs: Any) -> tuple[Tensor, ...]:
    """The logits of every head of a network's outputs, the main head first; a ConvoyError where they are something else
    than logits [samples, classes].
    """
    logits_of_heads = tuple(_logits(outputs))
    if not logits_of_heads or any(logits.dim() != 2 for logits in logits_of_heads):
        shapes = ", ".join(str(list(logits.shape)) for logits in logits_of_heads) or type(outputs).__name__
        raise ConvoyError(f"the network gives {shapes} where logits [samples, classes] are needed; train a classifier")
    return logits_of_heads


def num_correct(outputs: Any, targets: Tensor) -> Tensor:
    """Samples whose largest logit of the main head is their label (or their most probable class): an integer scalar."""
    labels = targets if targets.dim() == 1 else targets.argmax(1)
    return (heads(outputs)[0].detach().argmax(1) == labels).count_nonzero()


def _logits(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, dict):
        yield from _logits(tuple(outputs.values()))
    elif isinstance(outputs, tuple | list):
        for output in outputs:
            yield from _logits(output)


NUM_MISTAKES = 24


@dataclass(order=True)
class WrongAnswer:
    """A sample that the network got wrong; `picture` is what the network saw, uint8 [channels, height, width]."""

    probability: float
    sample: int
    label: int = field(compare=False)
    predicted: int = field(compare=False)
    picture: Tensor = field(compare=False, repr=False)


@dataclass
class Evaluation:
    """What a network does on a whole split, or on one part of it: the batches that a rank takes in turn."""

    confusion: Tensor  # int64 [classes, classes], true labels in rows
    losses: list[float] = field(default_factory=list)  # cross-entropy, summed over the samples of each batch
    num_in_top5: int = 0
    mistakes: list[WrongAnswer] = field(default_factory=list)  # the most confident ones, these first
    bad: list[tuple[int, str]] = field(default_factory=list)  # samples that could not be read, with the reason
    seconds: float = 0.0

    @property
    def num_images(self) -> int:
        """Samples that count: those that could not be read count nowhere."""
        return int(self.confusion.sum())

    @property
    def loss(self) -> float:
        """Mean cross-entropy over all samples."""
        total = 0.0
        for loss in self.losses:  # `sum` of later Pythons rounds otherwise
            total += loss
        return total / max(self.num_images, 1)

    @property
    def top1(self) -> float:
        """Share of samples, 0 to 1."""
        return int(self.confusion.diagonal().sum()) / max(self.num_images, 1)

    @property
    def top5(self) -> float | None:
        """The same; None for five classes or fewer."""
        return self.num_in_top5 / max(self.num_images, 1) if len(self.confusion) > 5 else None

    def per_class(self, classes: Sequence[str]) -> list[dict[str, Any]]:
        """Name, samples, precision and recall of each class: 0 to 1, None where there is nothing to divide."""
        hits_of, samples_of, answers_of = (
            x.tolist() for x in (self.confusion.diagonal(), self.confusion.sum(1), self.confusion.sum(0))
        )
        return [
            {"class": name, "samples": samples, "precision": hits / answers if answers else None}
            | {"recall": hits / samples if samples else None}
            for name, hits, samples, answers in zip(classes, hits_of, samples_of, answers_of, strict=True)
        ]

    def save(self, run: Path, classes: list[str], name: Callable[[int], str]) -> dict[str, Any]:
        """Write the pictures of the mistakes and return what goes into `evaluation.json`."""
        (run / "mistakes").mkdir(exist_ok=True)
        rows = []
        for index, mistake in enumerate(self.mistakes):
            picture = f"mistakes/{index:02d}.png"
            write_atomically(run / picture, partial(to_image(mistake.picture).save, format="PNG"))
            row = {key: getattr(mistake, key) for key in ("sample", "label", "predicted", "probability")}
            rows.append(records.Mistake(name=name(mistake.sample), picture=picture, **row))
        return records.EvaluationFile.model_construct(
            classes=classes,
            confusion=self.confusion.tolist(),
            images=self.num_images,
            top1=self.top1,
            top5=self.top5,
            loss=self.loss,
            mistakes=rows,
        ).model_dump()

    def add(self, batch: Batch, logits: Tensor) -> None:
        num_classes = len(self.confusion)
        self.bad += batch.bad
        if len(batch.labels) == 0:
            self.losses.append(0.0)
            return
        self.losses.append(F.cross_entropy(logits, batch.labels, reduction="sum").item())
        if num_classes > 5:
            self.num_in_top5 += int((logits.topk(5).indices == batch.labels[:, None]).sum())
        probability, predicted = logits.softmax(1).max(1)
        pairs = batch.labels * num_classes + predicted
        self.confusion.view(-1).index_add_(0, pairs, torch.ones_like(pairs))
        wrong = (predicted != batch.labels).nonzero().flatten()
        if len(self.mistakes) == NUM_MISTAKES:
            wrong = wrong[probability[wrong] >= self.mistakes[-1].probability]
        # Ties go by the sample's number; topk would leave them open: saturated networks are wrong with probability 1 in
        # many samples. Of a batch, no more than so many can be among the worst.
        order = np.lexsort((batch.samples[wrong].numpy(), probability[wrong].numpy()))[-NUM_MISTAKES:]
        mistakes = [
            WrongAnswer(
                probability[i].item(),
                int(batch.samples[i]),
                int(batch.labels[i]),
                int(predicted[i]),
                batch.images[i].clone(),
            )
            for i in wrong[order].tolist()
        ]
        self.mistakes = sorted(self.mistakes + mistakes, reverse=True)[:NUM_MISTAKES]

    @staticmethod
    def total(parts: Sequence["Evaluation"]) -> "Evaluation":
        """That of the whole split, from parts that took turns at its batches: the same for any number of them."""
        return Evaluation(
            confusion=torch.stack([part.confusion for part in parts]).sum(0),
            losses=list(chain.from_iterable(zip(*(part.losses for part in parts), strict=True))),
            num_in_top5=sum(part.num_in_top5 for part in parts),
            mistakes=sorted((mistake for part in parts for mistake in part.mistakes), reverse=True)[:NUM_MISTAKES],
            bad=sorted(entry for part in parts for entry in part.bad),
            seconds=max(part.seconds for part in parts),
        )


class StoppedError(Exception):
    """An evaluation has ended before it was complete, as it was asked to."""


def evaluate(
    model: nn.Module,
    pipeline: InputPipeline,
    recipe: Recipe,
    num_classes: int,
    size: int,
    ranks: Ranks | None = None,
    announce: Callable[[tuple[int, ...]], None] | None = None,
    is_asked_to_stop: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Run the network in evaluation mode over the test split, every sample once, in batches of a `size` at which ranks
    take turns. Every rank gets the evaluation of the whole split.

    Where the ranks' passes need each other, `announce` is told before each how many samples every part has: then
    batches without samples are run too, and where pictures were left out as bad, others take their places and count
    nowhere. `is_asked_to_stop` is called before each batch, the same on all ranks, and ends in a StoppedError.
    """
    start = time.perf_counter()
    ranks, data, on_gpu = ranks or Ranks(), pipeline.data, pipeline.device.type == "cuda"
    part, num_parts, samples = ranks.sample_rank, ranks.num_sample_ranks, range(len(data.test))
    batches = evaluation_batches(data, recipe.data, batch=size, part=part, num_parts=num_parts, pin_memory=on_gpu)
    evaluation = Evaluation(torch.zeros(num_classes, num_classes, dtype=torch.int64))
    with closing(batches), evaluating(model), torch.no_grad():
        for number, batch in enumerate(batches):
            current.to("evaluation")
            if is_asked_to_stop():
                raise StoppedError
            missing, logits = 0, torch.empty(0, num_classes)
            if announce is not None:
                turns = range(number * num_parts, (number + 1) * num_parts)
                counts = tuple(len(samples[turn * size : (turn + 1) * size]) for turn in turns)
                announce(counts)
                missing = counts[part] - len(batch.labels)
            if announce is not None or len(batch.labels):
                images = pipeline(batch)
                if missing:
                    images = torch.cat([images, images.new_zeros(missing, *images.shape[1:])])
                with autocast_of(recipe, pipeline.device):
                    logits = mean_over_views(model, images, recipe.evaluation_views)
                logits = logits.float()[: len(batch.labels)].cpu()
            evaluation.add(batch, logits)
    evaluation.seconds = time.perf_counter() - start
    return Evaluation.total(ranks.gather_samples(evaluation))


def mean_over_views(model: nn.Module, images: Tensor, views: int) -> Tensor:
    """The main head's logits, over one, two or six views of every picture, of which the moved four count half (Jordan,
    2024, section 3.5), in float32 at least."""

    def logits(pictures: Tensor) -> Tensor:
        of_main = heads(model(pictures))[0]
        return of_main.to(torch.promote_types(of_main.dtype, torch.float32))

    def mirrored(pictures: Tensor) -> Tensor:
        return (logits(pictures) + logits(pictures.flip(3))) / 2

    if views < 6:
        return logits(images) if views == 1 else mirrored(images)
    height, width = images.shape[2:]
    padded = F.pad(images, (1, 1, 1, 1), "reflect")
    moved = mirrored(padded[:, :, :height, :width]) + mirrored(padded[:, :, 2:, 2:])
    return mirrored(images) / 2 + moved / 4


def to_image(pixels: Tensor) -> Image.Image:
    """A picture from uint8 [channels, height, width], one or three channels."""
    array = pixels.permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
