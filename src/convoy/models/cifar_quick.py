"""The small network with which CIFAR-10 was tried out, with batch normalization.

Krizhevsky: cuda-convnet, "quick" layers for CIFAR-10 (2012): three 5x5 convolutions with 32, 32, 64 filters, each
followed by a pooling that halves the image, and 64 hidden units. Batch normalization (Ioffe and Szegedy, 2015) is a
later addition, with which it learns faster. 145,706 parameters.
"""

import torch
from torch import Tensor, nn


class CifarQuick(nn.Module):
    """Images [N, C, 32, 32] to logits [N, num_classes]."""

    def __init__(self, *, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *convolution(in_channels, 32),  # 16x16 behind the pooling
            *convolution(32, 32),  # 8x8
            *convolution(32, 64),  # 4x4
        )
        self.classifier = nn.Sequential(
            nn.Linear(64 * 4 * 4, 64),
            nn.ReLU(inplace=True),
            nn.Linear(64, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.flatten(self.features(images), 1))
        return logits


def convolution(in_channels: int, out_channels: int) -> list[nn.Module]:
    """A 5x5 convolution with batch norm and ReLU, then pooling to half the height and width."""
    return [
        nn.Conv2d(in_channels, out_channels, kernel_size=5, padding=2, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
    ]
