"""From bytes to the numbers a net likes."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Normalise:
    """(images / 255 - mean) / std for each channel, on the device where the images are, in float32.

    Args:
        mean: of each channel, pixels from 0 to 1.
        std: of each channel, pixels from 0 to 1.
        device: where the images will be.
        memory_format: of the result.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        scale = torch.tensor(std, dtype=torch.float64).mul_(255).reciprocal_()
        shift = torch.tensor(mean, dtype=torch.float64).mul_(-255).mul_(scale)
        self._scale, self._shift = (values.to(device, torch.float32).view(1, -1, 1, 1) for values in (scale, shift))
        self._memory_format = memory_format

    def __call__(self, images: Tensor) -> Tensor:
        """Float32 [samples, channels, height, width] from uint8 of the same shape."""
        # On a contiguous copy: three times as fast on a CPU as broadcasting over channels that lie innermost.
        pixels = images.to(torch.float32, memory_format=torch.contiguous_format)
        return torch.addcmul(self._shift, pixels, self._scale).contiguous(memory_format=self._memory_format)
