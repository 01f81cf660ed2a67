"""SqueezeNet: the accuracy of AlexNet with 50 times fewer parameters.

Iandola, Han, Moskewicz, Ashraf, Dally, Keutzer: SqueezeNet (2016), table 1, and the authors' version 1.1, which needs
2.4 times less computation. Names and initialization are torchvision's.
"""

from typing import Literal

import torch
from torch import Tensor, nn


class Fire(nn.Module):
    """Squeeze to a few channels by 1x1 filters, then expand by 1x1 and 3x3 filters side by side.

    [N, in_channels, H, W] to [N, 2 · expand, H, W].
    """

    def __init__(self, in_channels: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(in_channels, squeeze, kernel_size=1)
        self.squeeze_activation = nn.ReLU(inplace=True)
        self.expand1x1 = nn.Conv2d(squeeze, expand, kernel_size=1)
        self.expand1x1_activation = nn.ReLU(inplace=True)
        self.expand3x3 = nn.Conv2d(squeeze, expand, kernel_size=3, padding=1)
        self.expand3x3_activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze_activation(self.squeeze(x))
        return torch.cat(
            [self.expand1x1_activation(self.expand1x1(x)), self.expand3x3_activation(self.expand3x3(x))], 1
        )


class SqueezeNet(nn.Module):
    """Images [N, C, H, W] to logits [N, num_classes]; the classifier is a convolution, nothing is fully connected.

    With `small_images` (32x32) the first convolution is 3x3 with stride 1 and nothing is pooled behind it.
    """

    def __init__(
        self,
        *,
        version: Literal["1.0", "1.1"],
        num_classes: int = 1000,
        in_channels: int = 3,
        dropout: float = 0.5,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        filters, kernel = (96, 7) if version == "1.0" else (64, 3)
        stem: list[nn.Module]
        if small_images:
            stem = [nn.Conv2d(in_channels, filters, kernel_size=3, padding=1), nn.ReLU(inplace=True), nn.Identity()]
        else:
            stem = [nn.Conv2d(in_channels, filters, kernel_size=kernel, stride=2), nn.ReLU(inplace=True), pooling()]
        fires = [
            Fire(filters, squeeze=16, expand=64),
            Fire(128, squeeze=16, expand=64),
            Fire(128, squeeze=32, expand=128),
            Fire(256, squeeze=32, expand=128),
            Fire(256, squeeze=48, expand=192),
            Fire(384, squeeze=48, expand=192),
            Fire(384, squeeze=64, expand=256),
            Fire(512, squeeze=64, expand=256),
        ]
        first, second = (3, 7) if version == "1.0" else (2, 4)  # version 1.1 pools earlier, which is where it saves
        self.features = nn.Sequential(
            *stem, *fires[:first], pooling(), *fires[first:second], pooling(), *fires[second:]
        )
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Conv2d(512, num_classes, kernel_size=1),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
        )
        self._initialize()

    def forward(self, images: Tensor) -> Tensor:
        return torch.flatten(self.classifier(self.features(images)), 1)

    def _initialize(self) -> None:
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                if layer is self.classifier[1]:
                    nn.init.normal_(layer.weight, std=0.01)
                else:
                    nn.init.kaiming_uniform_(layer.weight)
                assert layer.bias is not None
                nn.init.zeros_(layer.bias)


def pooling() -> nn.MaxPool2d:
    """Overlapping max pooling to half the height and width, rounded up."""
    return nn.MaxPool2d(kernel_size=3, stride=2, ceil_mode=True)
