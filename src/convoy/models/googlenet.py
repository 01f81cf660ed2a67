"""GoogLeNet: filters of several sizes side by side, and two auxiliary classifiers on the way.

Szegedy, Liu, Jia, Sermanet, Reed, Anguelov, Erhan, Vanhoucke, Rabinovich: Going Deeper with Convolutions (2014),
table 1, with batch normalization (Ioffe and Szegedy, 2015). Names, shapes and initialization are torchvision's, and so
is one deviation that published weights depend on: the branch of 5x5 filters has 3x3 filters.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from convoy.errors import ConvoyError


class GoogLeNetOutputs(NamedTuple):
    """What the network gives in training: three times logits [N, num_classes], the last layer's first."""

    logits: Tensor
    aux_logits2: Tensor
    aux_logits1: Tensor


class GoogLeNet(nn.Module):
    """Images [N, C, H, W] to logits [N, num_classes], in training with `aux_logits` to `GoogLeNetOutputs`.

    The paper adds the losses of the auxiliary classifiers with a weight of 0.3; in evaluation they are not computed.
    `transform_input` takes images normalized by ImageNet's mean and deviation to the range -1..1 for which
    torchvision's published weights were made. With `small_images` (32x32) the first convolution is 3x3 with
    stride 1, and nothing is pooled before the first inception block.
    Raises ConvoyError for `transform_input` with other than 3 channels.
    """

    input_scale: Tensor
    input_shift: Tensor

    def __init__(
        self,
        *,
        num_classes: int = 1000,
        in_channels: int = 3,
        aux_logits: bool = True,
        transform_input: bool = False,
        dropout: float = 0.2,
        dropout_aux: float = 0.7,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        if transform_input and in_channels != 3:
            raise ConvoyError(
                f"googlenet's transform_input is for 3 channels and this net has {in_channels}: set it to false"
            )
        self.aux_logits = aux_logits
        self.transform_input = transform_input
        if transform_input:  # x · deviation + mean undoes ImageNet's normalization, (x - 0.5) / 0.5 applies the other
            deviation, mean = torch.tensor([0.229, 0.224, 0.225]), torch.tensor([0.485, 0.456, 0.406])
            self.register_buffer("input_scale", (deviation / 0.5).view(3, 1, 1), persistent=False)
            self.register_buffer("input_shift", ((mean - 0.5) / 0.5).view(3, 1, 1), persistent=False)
        kernel, stride, padding = (3, 1, 1) if small_images else (7, 2, 3)
        self.conv1 = ConvNorm(in_channels, 64, kernel_size=kernel, stride=stride, padding=padding)
        self.maxpool1 = nn.Identity() if small_images else pooling(3)
        self.conv2 = ConvNorm(64, 64, kernel_size=1)
        self.conv3 = ConvNorm(64, 192, kernel_size=3, padding=1)
        self.maxpool2 = nn.Identity() if small_images else pooling(3)

        #                                     1x1   3x3         5x5       pooled
        self.inception3a = Inception(192, 64, (96, 128), (16, 32), 32)
        self.inception3b = Inception(256, 128, (128, 192), (32, 96), 64)
        self.maxpool3 = pooling(3)

        self.inception4a = Inception(480, 192, (96, 208), (16, 48), 64)
        self.inception4b = Inception(512, 160, (112, 224), (24, 64), 64)
        self.inception4c = Inception(512, 128, (128, 256), (24, 64), 64)
        self.inception4d = Inception(512, 112, (144, 288), (32, 64), 64)
        self.inception4e = Inception(528, 256, (160, 320), (32, 128), 128)
        self.maxpool4 = pooling(2)

        self.inception5a = Inception(832, 256, (160, 320), (32, 128), 128)
        self.inception5b = Inception(832, 384, (192, 384), (48, 128), 128)

        if aux_logits:
            self.aux1 = AuxiliaryHead(512, num_classes, dropout_aux)
            self.aux2 = AuxiliaryHead(528, num_classes, dropout_aux)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(1024, num_classes)
        self._initialize()

    def forward(self, images: Tensor) -> Tensor | GoogLeNetOutputs:
        x = images * self.input_scale + self.input_shift if self.transform_input else images
        x = self.maxpool1(self.conv1(x))
        x = self.maxpool2(self.conv3(self.conv2(x)))
        x = self.maxpool3(self.inception3b(self.inception3a(x)))
        x = after_4a = self.inception4a(x)
        x = after_4d = self.inception4d(self.inception4c(self.inception4b(x)))
        x = self.maxpool4(self.inception4e(x))
        x = self.inception5b(self.inception5a(x))
        logits: Tensor = self.fc(self.dropout(torch.flatten(self.avgpool(x), 1)))
        if self.training and self.aux_logits:
            return GoogLeNetOutputs(logits, self.aux2(after_4d), self.aux1(after_4a))
        return logits

    def _initialize(self) -> None:
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.01, a=-2, b=2)


class ConvNorm(nn.Module):
    """A convolution without bias, batch norm, ReLU."""

    def __init__(
        self, in_channels: int, out_channels: int, *, kernel_size: int, stride: int = 1, padding: int = 0
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out_channels, eps=0.001)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """[N, in_channels, H, W] to [N, out_channels, H', W']."""
        out: Tensor = self.relu(self.bn(self.conv(x)))
        return out


class Inception(nn.Module):
    """Figure 2b: four branches over the same input, joined along the channels.

    `ones` counts the filters of the 1x1 branch; `threes` and `fives` give (filters of the reduction before, filters);
    `pooled` counts the filters behind the pooling. [N, in_channels, H, W] to [N, sum of the branches, H, W].
    """

    def __init__(
        self, in_channels: int, ones: int, threes: tuple[int, int], fives: tuple[int, int], pooled: int
    ) -> None:
        super().__init__()
        self.branch1 = ConvNorm(in_channels, ones, kernel_size=1)
        self.branch2 = nn.Sequential(
            ConvNorm(in_channels, threes[0], kernel_size=1),
            ConvNorm(*threes, kernel_size=3, padding=1),
        )
        self.branch3 = nn.Sequential(
            ConvNorm(in_channels, fives[0], kernel_size=1),
            ConvNorm(*fives, kernel_size=3, padding=1),  # 5x5 in the paper, 3x3 in the published weights
        )
        self.branch4 = nn.Sequential(
            nn.MaxPool2d(kernel_size=3, stride=1, padding=1, ceil_mode=True),
            ConvNorm(in_channels, pooled, kernel_size=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class AuxiliaryHead(nn.Module):
    """A classifier in the middle of the network, which brings a gradient to the early layers.

    [N, in_channels, H, W] to logits [N, num_classes].
    """

    def __init__(self, in_channels: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(4)
        self.conv = ConvNorm(in_channels, 128, kernel_size=1)
        self.fc1 = nn.Linear(128 * 4 * 4, 1024)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(dropout)
        self.fc2 = nn.Linear(1024, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(self.conv(self.avgpool(x)), 1)
        logits: Tensor = self.fc2(self.dropout(self.relu(self.fc1(x))))
        return logits


def pooling(size: int) -> nn.MaxPool2d:
    """Max pooling over size x size with stride 2, the result rounded up."""
    return nn.MaxPool2d(kernel_size=size, stride=2, ceil_mode=True)
