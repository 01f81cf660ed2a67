"""From a batch in the host's memory to normalized pictures on the device."""

from collections import deque

import torch
from torch import Tensor

from convoy.data import Batch, DataSet, Normalize


class InputPipeline:
    """Takes a batch's uint8 pictures to the device and normalizes them there.

    On a GPU both run on a stream of their own. The host is given back at once, so where it issues an update while the
    GPU computes the one before, the next batch is copied and normalized meanwhile.
    """

    def __init__(self, data: DataSet, device: torch.device, memory_format: torch.memory_format) -> None:
        self.data = data
        self.device = device
        self.normalize = Normalize(data.mean, data.std, device, memory_format)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Pictures on their way: the memory that they lie in is written to anew once nobody has them any more.
        self._copied: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def __call__(self, batch: Batch, start: int = 0, end: int | None = None) -> Tensor:
        """Pictures `start` to `end` of the batch: float32 [samples, channels, height, width]."""
        pixels = batch.images[start:end]
        if self._side is None:
            return self.normalize(pixels.to(self.device, non_blocking=True))
        while self._copied and self._copied[0][0].query():
            self._copied.popleft()
        with torch.cuda.stream(self._side):
            images = self.normalize(pixels.to(self.device, non_blocking=True))
            event = torch.cuda.Event()
            event.record()
        self._copied.append((event, pixels))
        computing = torch.cuda.current_stream(self.device)
        computing.wait_stream(self._side)
        images.record_stream(computing)  # or their memory would be given to the next batch while this one is used
        return images
