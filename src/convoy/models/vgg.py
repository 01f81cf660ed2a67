"""VGG: depth from nothing but 3x3 convolutions.

Simonyan, Zisserman: Very Deep Convolutional Networks for Large-Scale Image Recognition (2014), table 1, columns A, B, D
and E; the variants with batch normalization, the names and the initialization (He et al., 2015) are torchvision's.
"""

import torch
from torch import Tensor, nn

# Convolutions in each of the five stages; a max pooling ends each stage.
STAGES = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
FILTERS = (64, 128, 256, 512, 512)


class VGG(nn.Module):
    """Images [N, C, H, W] to logits [N, num_classes]; H and W are 224 in the paper and at least 32.

    `depth` counts the layers with weights. With `small_images` (32x32) the convolutions, which are 3x3 with stride 1
    anyway, end in one position, and the fully connected layers have 512 units instead of 4,096 over 7x7 positions.
    """

    def __init__(
        self,
        *,
        depth: int,
        batch_norm: bool,
        num_classes: int = 1000,
        in_channels: int = 3,
        dropout: float = 0.5,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        positions, units = (1, 512) if small_images else (7, 4096)
        layers: list[nn.Module] = []
        channels = in_channels
        for num_convolutions, filters in zip(STAGES[depth], FILTERS, strict=True):
            for _ in range(num_convolutions):
                layers.append(nn.Conv2d(channels, filters, kernel_size=3, padding=1))
                if batch_norm:
                    layers.append(nn.BatchNorm2d(filters))
                layers.append(nn.ReLU(inplace=True))
                channels = filters
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(positions)
        self.classifier = nn.Sequential(
            nn.Linear(512 * positions * positions, units),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(units, units),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(units, num_classes),
        )
        self._initialize()

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))
        return logits

    def _initialize(self) -> None:
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(layer, nn.Linear):
                small = layer.in_features < 4096  # the paper's 0.01 would let the signal fade in narrower layers
                nn.init.normal_(layer.weight, std=(2 / layer.in_features) ** 0.5 if small else 0.01)
            else:
                continue
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
