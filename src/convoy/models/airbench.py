"""The network that reaches 94 % on CIFAR-10.

Jordan: 94% on CIFAR-10 in 3.29 seconds on a single GPU (2024), section 3, after Page's ResNet-9 (2018). Patches of 2x2
pixels are whitened (`model.whiten` of a recipe), and every further convolution begins as the identity on the channels
that it gets: the first updates then learn from pictures, not from noise. 1,972,792 parameters.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Airbench94(nn.Module):
    """Images [N, C, 32, 32] to logits [N, num_classes]; `norm_momentum` is the part of the running statistics that a
    microbatch replaces."""

    def __init__(self, *, num_classes: int = 10, in_channels: int = 3, norm_momentum: float = 0.4) -> None:
        super().__init__()
        whitened = 2 * in_channels * 2 * 2  # every direction of a patch, and its opposite
        self.whiten = nn.Conv2d(in_channels, whitened, kernel_size=2)  # 31x31
        self.group1 = Group(whitened, 64, norm_momentum)  # 15x15
        self.group2 = Group(64, 256, norm_momentum)  # 7x7
        self.group3 = Group(256, 256, norm_momentum)  # 3x3
        self.pool = nn.MaxPool2d(3)
        self.classifier = nn.Linear(256, num_classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        features = self.group3(self.group2(self.group1(F.gelu(self.whiten(images)))))
        logits: Tensor = self.classifier(torch.flatten(self.pool(features), 1)) / 9
        return logits


class Group(nn.Module):
    """Two 3x3 convolutions with batch norm and GELU, the first with pooling to half the height and width."""

    def __init__(self, in_channels: int, out_channels: int, norm_momentum: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(2)
        self.norm1 = nn.BatchNorm2d(out_channels, eps=1e-12, momentum=norm_momentum)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels, eps=1e-12, momentum=norm_momentum)
        for convolution, norm in ((self.conv1, self.norm1), (self.conv2, self.norm2)):
            nn.init.dirac_(convolution.weight[: convolution.in_channels])
            norm.weight.requires_grad_(False)  # scales gain nothing, shifts with 64 times the rate do (section 3.4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm1(self.pool(self.conv1(x))))
        return F.gelu(self.norm2(self.conv2(x)))
