"""Exact evaluation: every sample counts once, whatever the batches are."""

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from convoy.comm.position import current
from convoy.comm.ranks import Ranks
from convoy.data import Batch, evaluation_batches
from convoy.files import write_atomically
from convoy.script.data import evaluating
from convoy.training import records
from convoy.training.classification import InputPipeline, heads
from convoy.training.precision import autocast_of
from convoy.training.recipe import Recipe

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
    """What a network does on a whole split."""

    num_images: int
    loss: float  # mean cross-entropy over all samples
    top1: float  # share of samples, 0 to 1
    top5: float | None  # the same; None for five classes or fewer
    confusion: Tensor  # int64 [classes, classes], true labels in rows
    mistakes: list[WrongAnswer]  # the most confident first
    bad: list[tuple[int, str]]  # samples that could not be read, with the reason; they count nowhere
    seconds: float

    def per_class(self, classes: Sequence[str]) -> list[dict[str, Any]]:
        """Name, samples, precision and recall of each class: 0 to 1, None where there is nothing to divide."""
        right, true, taken = self.confusion.diagonal().tolist(), self.confusion.sum(1), self.confusion.sum(0)
        return [
            {"class": name, "samples": samples, "precision": hits / found if found else None}
            | {"recall": hits / samples if samples else None}
            for name, hits, samples, found in zip(classes, right, true.tolist(), taken.tolist(), strict=True)
        ]

    def save(self, run: Path, classes: list[str], name: Callable[[int], str]) -> dict[str, Any]:
        """Write the pictures of the mistakes and return what goes into `evaluation.json`."""
        folder = run / "mistakes"
        folder.mkdir(exist_ok=True)
        rows = []
        for index, mistake in enumerate(self.mistakes):
            picture = folder / f"{index:02d}.png"
            write_atomically(picture, partial(to_image(mistake.picture).save, format="PNG"))
            rows.append(
                records.Mistake(
                    sample=mistake.sample,
                    name=name(mistake.sample),
                    label=mistake.label,
                    predicted=mistake.predicted,
                    probability=mistake.probability,
                    picture=f"mistakes/{index:02d}.png",
                )
            )
        return records.EvaluationFile.model_construct(
            classes=classes,
            confusion=self.confusion.tolist(),
            images=self.num_images,
            top1=self.top1,
            top5=self.top5,
            loss=self.loss,
            mistakes=rows,
        ).model_dump()


class StoppedError(Exception):
    """An evaluation has ended before it was complete, as it was asked to."""


@dataclass
class EvaluationTally:
    """What one part of a split gave; `EvaluationTally.total` adds parts up."""

    confusion: Tensor
    losses: list[float] = field(default_factory=list)  # sum over the samples of each batch
    top5: int = 0
    worst: list[WrongAnswer] = field(default_factory=list)  # the most confident mistakes, as a heap
    bad: list[tuple[int, str]] = field(default_factory=list)

    def add(self, batch: Batch, logits: Tensor) -> None:
        """Count the samples of a batch."""
        num_classes = len(self.confusion)
        self.bad += batch.bad
        if len(batch.labels) == 0:
            self.losses.append(0.0)
            return
        self.losses.append(F.cross_entropy(logits, batch.labels, reduction="sum").item())
        if num_classes > 5:
            self.top5 += int((logits.topk(5).indices == batch.labels[:, None]).sum())
        probability, predicted = logits.softmax(1).max(1)
        pairs = batch.labels * num_classes + predicted
        self.confusion.view(-1).index_add_(0, pairs, torch.ones_like(pairs))
        wrong = (predicted != batch.labels).nonzero().flatten()
        if len(self.worst) == NUM_MISTAKES:
            wrong = wrong[probability[wrong] >= self.worst[0].probability]
        # Of a batch, no more can be among the worst. Ties go by the sample's number; topk would leave them open.
        order = np.lexsort((batch.samples[wrong].numpy(), probability[wrong].numpy()))[-NUM_MISTAKES:]
        for i in wrong[order].tolist():
            mistake = WrongAnswer(
                probability[i].item(),
                int(batch.samples[i]),
                int(batch.labels[i]),
                int(predicted[i]),
                batch.images[i : i + 1].to("cpu")[0].clone(),
            )
            (heapq.heappush if len(self.worst) < NUM_MISTAKES else heapq.heappushpop)(self.worst, mistake)

    @staticmethod
    def total(parts: Sequence["EvaluationTally"], seconds: float) -> Evaluation:
        """The evaluation of the whole split, from parts that took turns at its batches: the same for any number."""
        confusion = torch.stack([part.confusion for part in parts]).sum(0)
        loss = 0.0
        for turn in zip(*(part.losses for part in parts), strict=True):
            for value in turn:
                loss += value
        images, num_classes = int(confusion.sum()), len(confusion)
        return Evaluation(
            num_images=images,
            loss=loss / max(images, 1),
            top1=int(confusion.diagonal().sum()) / max(images, 1),
            top5=sum(part.top5 for part in parts) / max(images, 1) if num_classes > 5 else None,
            confusion=confusion,
            mistakes=sorted((mistake for part in parts for mistake in part.worst), reverse=True)[:NUM_MISTAKES],
            bad=sorted(entry for part in parts for entry in part.bad),
            seconds=seconds,
        )


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
    tally = EvaluationTally(torch.zeros(num_classes, num_classes, dtype=torch.int64))
    passed: deque[tuple[Batch, Callable[[], Tensor]]] = deque()
    ahead = int(on_gpu)  # a GPU computes the next batch while the CPU counts this one

    def count(uncounted: int) -> None:
        while len(passed) > uncounted:
            batch, logits = passed.popleft()
            tally.add(batch, logits())

    with closing(batches), evaluating(model), torch.no_grad():
        for number, batch in enumerate(batches):
            current.to("evaluation")
            if is_asked_to_stop():
                raise StoppedError
            missing = 0
            if announce is not None:
                turns = range(number * num_parts, (number + 1) * num_parts)
                counts = tuple(len(samples[turn * size : (turn + 1) * size]) for turn in turns)
                announce(counts)
                missing = counts[part] - len(batch.labels)
            if announce is None and not len(batch.labels):
                passed.append((batch, partial(torch.empty, 0, num_classes)))
            else:
                images = pipeline(batch)
                if missing:
                    images = torch.cat([images, images.new_zeros(missing, *images.shape[1:])])
                with autocast_of(recipe, pipeline.device):
                    outputs = model(images)
                passed.append((batch, _on_host(heads(outputs)[0].float()[: len(batch.labels)])))
            count(ahead)
        count(0)
    seconds = time.perf_counter() - start
    parts = ranks.gather_samples((tally, seconds))
    return EvaluationTally.total([part for part, _ in parts], max(took for _, took in parts))


def _on_host(x: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to the CPU; what gives the copy waits for it alone, not for later work of the GPU."""
    if x.device.type == "cpu":
        return lambda: x
    copy = x.to("cpu", non_blocking=True)  # in pinned memory
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> Tensor:
        arrived.synchronize()
        return copy

    return wait


def to_image(pixels: Tensor) -> Image.Image:
    """A picture from uint8 [channels, height, width], one or three channels."""
    array = pixels.permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
