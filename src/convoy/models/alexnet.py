"""AlexNet, twice: in two columns as it won in 2012, and in one tower as it is trained on one device.

Krizhevsky, Sutskever, Hinton: ImageNet Classification with Deep Convolutional Neural Networks (2012), figure 2, with
response normalization and overlapping pooling. The paper put one column on each of two GPUs; here a column is a group
of a convolution with `groups=2`, and the columns meet in the third convolution and in the fully connected layers.
60,965,224 parameters.

Krizhevsky: One weird trick for parallelizing convolutional neural networks (2014): the tower, with torchvision's names
and sizes: 64, 192, 384, 256, 256 filters, neither columns nor response normalization.
"""

import torch
from torch import Tensor, nn


class AlexNet2012(nn.Module):
    """Images [N, C, H, W] to logits [N, num_classes]; H and W are 224 in the paper and at least 63.

    Weights start from N(0, 0.01²); biases start at 1 in the second, fourth and fifth convolution and in the hidden
    fully connected layers, so that their ReLUs begin with positive inputs, and at 0 elsewhere (section 5).
    """

    def __init__(self, *, num_classes: int = 1000, in_channels: int = 3, dropout: float = 0.5) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 96, kernel_size=11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            response_norm(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(96, 256, kernel_size=5, padding=2, groups=2),
            nn.ReLU(inplace=True),
            response_norm(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(256, 384, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 384, kernel_size=3, padding=1, groups=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, kernel_size=3, padding=1, groups=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(6)  # leaves the paper's 6x6 maps as they are
        self.classifier = nn.Sequential(
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, num_classes),
        )
        self._initialize()

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))
        return logits

    def _initialize(self) -> None:
        layers = [layer for layer in self.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
        _, conv2, _, conv4, conv5, fc6, fc7, _ = layers
        for layer in layers:
            assert layer.bias is not None
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.constant_(layer.bias, 1 if layer in (conv2, conv4, conv5, fc6, fc7) else 0)


def response_norm() -> nn.LocalResponseNorm:
    """Section 3.3's normalization, b = a / (2 + 1e-4 · Σ a²)^0.75 over 5 neighbouring channels.

    torch divides its alpha by the number of channels in the window, the paper does not: alpha is 5 · 1e-4 here.
    """
    return nn.LocalResponseNorm(size=5, alpha=5e-4, beta=0.75, k=2.0)


class AlexNet(nn.Module):
    """Images [N, C, H, W] to logits [N, num_classes]; H and W are 224 in the paper and at least 63.

    With `small_images` (32x32) the first convolution is 3x3 with stride 1, nothing is pooled behind it, and the fully
    connected layers have 1,024 units over 4x4 positions instead of 4,096 over 6x6.
    """

    def __init__(
        self, *, num_classes: int = 1000, in_channels: int = 3, dropout: float = 0.5, small_images: bool = False
    ) -> None:
        super().__init__()
        kernel, stride, padding = (3, 1, 1) if small_images else (11, 4, 2)
        positions, units = (4, 1024) if small_images else (6, 4096)
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 64, kernel, stride, padding),
            nn.ReLU(inplace=True),
            nn.Identity() if small_images else nn.MaxPool2d(kernel_size=3, stride=2),
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
