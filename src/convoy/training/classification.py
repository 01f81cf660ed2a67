"""What a network that classifies pictures is given, on its device, and what its outputs are: logits, their loss."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.data import Batch, DataSet, Normalize
from convoy.errors import ConvoyError

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
    """Mean cross-entropy over the samples given; auxiliary heads count with a weight of their own.

    GoogLeNet's two auxiliary classifiers count 0.3 each (Szegedy et al., 2015, section 5). Label smoothing is that of
    Szegedy et al., 2016: the target is (1 - ε) for the label plus ε / classes for every class.
    """

    label_smoothing: float = 0.0
    aux_weight: float = 0.3

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        """The loss, a scalar, of logits [samples, classes], or of a tuple of them with the main head first; the targets
        are labels [samples] or class probabilities [samples, classes].
        """
        main, *auxiliary = heads(outputs)
        loss = F.cross_entropy(main, targets, label_smoothing=self.label_smoothing)
        for logits in auxiliary:
            loss = loss + self.aux_weight * F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
        return loss


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
