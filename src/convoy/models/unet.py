"""U-Net: a class for every pixel, from far and from near.

Ronneberger, Fischer, Brox: U-Net (2015), figure 1. Convolutions are padded, so that the output is as large as the
image, and have batch norm, as in most of today's versions; the paper's width is 64.
"""

from functools import partial

import torch
from torch import Tensor, nn


def _block(in_channels: int, channels: int, convs: int, groups: int) -> nn.Sequential:
    """3x3 convolutions: [N, in_channels, H, W] to [N, channels, H, W]."""
    layers: list[nn.Module] = []
    for before in (in_channels, *[channels] * (convs - 1)):
        norm = nn.GroupNorm(groups, channels) if groups else nn.BatchNorm2d(channels)
        layers += [nn.Conv2d(before, channels, 3, padding=1, bias=False), norm, nn.ReLU(True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Images [N, C, H, W] to logits [N, num_classes, H, W]; height and width are multiples of 2 to the `depth`.

    Down to half the size and twice the channels, `depth` times, and up again, each time beside what had this size;
    `convs` convolutions at each, with group norm in place of batch norm where `groups` are given.
    """

    def __init__(
        self,
        *,
        num_classes: int = 2,
        in_channels: int = 3,
        width: int = 32,
        depth: int = 4,
        convs: int = 2,
        groups: int = 0,
    ) -> None:
        super().__init__()
        block = partial(_block, convs=convs, groups=groups)
        channels = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(map(block, [in_channels, *channels[:-2]], channels[:-1]))
        self.pool = nn.MaxPool2d(2)
        self.bottom = block(channels[-2] if depth else in_channels, channels[-1])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * n, n, 2, stride=2) for n in reversed(channels[:-1]))
        self.up = nn.ModuleList(block(2 * n, n) for n in reversed(channels[:-1]))
        self.classifier = nn.Conv2d(width, num_classes, 1)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        x, beside = images, []
        for block in self.down:
            x = block(x)
            beside.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([beside.pop(), grow(x)], 1))
        logits: Tensor = self.classifier(x)
        return logits
