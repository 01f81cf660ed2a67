"""AlexNet in one tower, as it is trained on one device.

Krizhevsky: One weird trick for parallelizing convolutional neural networks (2014), with torchvision's names and sizes:
64, 192, 384, 256, 256 filters, neither columns nor response normalization. The network of 2012 is in `alexnet_2012.py`.
"""

import torch
from torch import Tensor, nn


class AlexNet(nn.Module):
    """Images [N, C, H, W] to logits [N, num_classes]; H and W are 224 in the paper and at least 63.

    With `small_images` (32x32) the first convolution is 3x3 with stride 1, nothing is pooled behind it, and the fully
    connected layers have 1,024 units over 4x4 positions instead of 4,096 over 6x6.
    """

    def __init__(
        self, *, num_classes: int = 1000, in_channels: int = 3, dropout: float = 0.5, small_images: bool = False
    ) -> None:
        super().__init__()
        if small_images:
            stem = [nn.Conv2d(in_channels, 64, kernel_size=3, padding=1), nn.ReLU(inplace=True), nn.Identity()]
            positions, units = 4, 1024
        else:
            stem = [
                nn.Conv2d(in_channels, 64, kernel_size=11, stride=4, padding=2),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(kernel_size=3, stride=2),
            ]
            positions, units = 6, 4096
        self.features = nn.Sequential(
            *stem,
            nn.Conv2d(64, 192, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(192, 384, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(positions)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(256 * positions * positions, units),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(units, units),
            nn.ReLU(inplace=True),
            nn.Linear(units, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))
        return logits
