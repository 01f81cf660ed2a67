"""Pictures that lie on the device as a whole data set, and are cut out there."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Crops:
    """Crops of pictures on the device, which `to` makes uint8 [samples, channels, side, side]."""

    pixels: Tensor  # uint8 [pictures, height, width, channels]
    # int64 [samples, 4]: picture, left and upper end of the crop (black where it lies outside), 1 where mirrored
    places: Tensor
    side: int

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, samples: slice) -> "Crops":
        return replace(self, places=self.places[samples])

    def pin_memory(self) -> "Crops":
        return replace(self, places=self.places.pin_memory())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Tensor:
        """Cut the crops out where the pictures lie; only their places are sent there."""
        picture, left, top, mirrored = self.places.to(self.pixels.device, non_blocking=non_blocking).unbind(1)
        height, width = self.pixels.shape[1:3]
        across = torch.arange(self.side, device=self.pixels.device)
        x = left[:, None] + torch.where(mirrored[:, None] > 0, self.side - 1 - across, across)
        y = top[:, None] + across
        inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None]
        x, y = x.clamp(0, width - 1), y.clamp(0, height - 1)
        parts = self.pixels[picture[:, None, None], y[:, :, None], x[:, None]]
        return parts.mul_(inside[..., None]).permute(0, 3, 1, 2).to(device)
