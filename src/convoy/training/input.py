"""From a batch in the host's memory to normalized pictures on the device."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from convoy.data import Batch, DataSet, Normalize

_UPDATES_AHEAD = (
    2  # updates that the host may have issued beside the one that a GPU computes: their pictures lie in its memory
)


class InputPipeline:
    """Takes a batch's uint8 pictures to the device, or cuts them out there, and normalizes them; takes its labels.

    On a GPU all of it runs on a stream of its own. The host is given back at once, so where it issues an update while
    the GPU computes the one before, the next batch is copied and normalized meanwhile.
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
