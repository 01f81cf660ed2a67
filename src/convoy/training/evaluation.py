"""The pictures of a data set on a device, and the network's run over those of a split, each once, by ranks in turn."""

import time
from collections import deque
from collections.abc import Callable
from contextlib import closing

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.comm.position import current
from convoy.comm.ranks import Ranks
from convoy.data.batch import Batch
from convoy.data.dataset import DataSet
from convoy.data.loader import evaluation_batches
from convoy.data.transforms import Normalize
from convoy.recipe.recipe import Recipe
from convoy.script.data import evaluating
from convoy.tasks.task import Evaluation, Task, precise
from convoy.training.precision import autocast_of

# Updates that the host may have issued beside the one that a GPU computes: their pictures lie in its memory.
_UPDATES_AHEAD = 2


class InputPipeline:
    """Takes a batch's uint8 pictures to the device, or cuts them out there, and normalizes them; takes its targets.

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

    def targets(self, batch: Batch) -> Tensor:
        """Targets of the batch of an update, which begins."""
        if self._side is not None:
            self._begun.append(_now())
            if len(self._begun) > _UPDATES_AHEAD:
                earlier = self._begun.popleft()
                if not earlier.query():
                    earlier.synchronize()
        return self._sent(batch.targets, lambda: batch.targets.to(self.device, non_blocking=True))

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


class StoppedError(Exception):
    """An evaluation has ended before it was complete, as it was asked to."""


def evaluate(
    model: nn.Module,
    pipeline: InputPipeline,
    recipe: Recipe,
    task: Task,
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
    evaluation = task.evaluation()
    evaluation.kept = [] if task.own_metrics else evaluation.kept
    with closing(batches), evaluating(model), torch.no_grad():
        for number, batch in enumerate(batches):
            current.to("evaluation")
            if is_asked_to_stop():
                raise StoppedError
            missing, outputs = 0, torch.empty(0)
            if announce is not None:
                turns = range(number * num_parts, (number + 1) * num_parts)
                counts = tuple(len(samples[turn * size : (turn + 1) * size]) for turn in turns)
                announce(counts)
                missing = counts[part] - len(batch)
            if announce is not None or len(batch):
                images = pipeline(batch)
                if missing:
                    images = torch.cat([images, images.new_zeros(missing, *images.shape[1:])])
                with autocast_of(recipe, pipeline.device):
                    outputs = mean_over_views(task, model, images, recipe.evaluation_views)
                outputs = outputs[: len(batch)]
            evaluation.add(batch, outputs)
    evaluation.seconds = time.perf_counter() - start
    total = evaluation.total(ranks.gather_samples(evaluation))
    if task.own_metrics:  # they say how all ranks go on, and need not be the same on each
        total.own = ranks.first(lambda: total.measured(task.own_metrics))
        total.kept = total.kept if total.keeps else None
    return total


def mean_over_views(task: Task, model: nn.Module, images: Tensor, views: int) -> Tensor:
    """The main head's outputs, over one, two or six views of every picture, of which the moved four count half (Jordan,
    2024, section 3.5), in float32 at least."""

    def outputs(pictures: Tensor) -> Tensor:
        return precise(task.heads(model(pictures))[0])

    def mirrored(pictures: Tensor) -> Tensor:
        return (outputs(pictures) + outputs(pictures.flip(3))) / 2

    if views < 6:
        return outputs(images) if views == 1 else mirrored(images)
    height, width = images.shape[2:]
    padded = F.pad(images, (1, 1, 1, 1), "reflect")
    moved = mirrored(padded[:, :, :height, :width]) + mirrored(padded[:, :, 2:, 2:])
    return mirrored(images) / 2 + moved / 4
