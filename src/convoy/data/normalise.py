"""From bytes to the numbers a net likes."""

from collections.abc import Sequence

import torch
from torch import Tensor


def normalise(
    images: Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """(images / 255 - mean) / std for each channel, on the device where the images are.

    Args:
        images: uint8 [samples, channels, height, width].
        mean: of each channel, pixels from 0 to 1.
        std: of each channel, pixels from 0 to 1.
        dtype: of the result; half precisions are computed in float32.
        memory_format: of the result.
    """
    exact = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    shape = (1, images.shape[1], 1, 1)
    offset = torch.tensor(mean, dtype=torch.float64).mul_(255).to(images.device, exact).view(shape)
    scale = torch.tensor(std, dtype=torch.float64).mul_(255).reciprocal_().to(images.device, exact).view(shape)
    # In place on a contiguous copy: three times as fast on a CPU as broadcasting over channels that lie innermost.
    result = images.to(exact, memory_format=torch.contiguous_format).sub_(offset).mul_(scale)
    return result.to(dtype=dtype, memory_format=memory_format)
