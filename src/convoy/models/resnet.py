"""ResNet: layers that learn what to add to their input.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition (2015), table 1, with torchvision's names. As there,
the stride of a bottleneck is in its 3x3 convolution ("ResNet v1.5"), which the paper has in the first 1x1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Blur(nn.Module):
    """What is in front of a convolution with a stride, so that it does not alias: the filter (1, 2, 1) in both
    directions, over 16, with zeros around the border (Zhang: Making CNNs shift-invariant again, 2019).

    Two means over 2x2 pixels are this filter, and under plans that divide channels nothing is sent for them.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(F.avg_pool2d(x, 2, stride=1, padding=1), 2, stride=1)


class DropPath(nn.Module):
    """Stochastic depth (Huang et al., 2016): in training a sample goes without the block with this probability, and the
    block counts for more in all others."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = 1 - self.probability
        return x * x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(kept).div_(kept)

    def extra_repr(self) -> str:
        return f"{self.probability:.3g}"


class BasicBlock(nn.Module):
    """Figure 5, left: two 3x3 convolutions. [N, in_channels, H, W] to [N, channels, H / stride, W / stride]."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = projection(in_channels, channels, stride)
        self.blur, self.drop_path = nn.Identity(), nn.Identity()  # options of the network

    def forward(self, x: Tensor) -> Tensor:
        x = self.blur(x)  # in front of two convolutions with a stride
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.drop_path(self.bn2(self.conv2(x)))
        out: Tensor = self.relu(x + shortcut)
        return out


class Bottleneck(nn.Module):
    """Figure 5, right: 1x1 to fewer channels, 3x3, 1x1 back to four times as many.

    [N, in_channels, H, W] to [N, 4 · channels, H / stride, W / stride].
    """

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, 4 * channels, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = projection(in_channels, 4 * channels, stride)
        self.blur, self.drop_path = nn.Identity(), nn.Identity()  # options of the network

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(self.blur(x))
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(self.blur(x))))
        x = self.drop_path(self.bn3(self.conv3(x)))
        out: Tensor = self.relu(x + shortcut)
        return out


# Kind of block, and blocks in each of the four stages.
DEPTHS: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}


class ResNet(nn.Module):
    """Images [N, C, H, W] to logits [N, num_classes]; H and W are 224 in the paper.

    `depth` counts the layers with weights. `zero_init_residual` starts the last batch norm of each block at scale 0, so
    that each block begins as its shortcut (Goyal et al., 2017). With `small_images` (32x32) the first convolution is
    3x3 with stride 1 and nothing is pooled behind it (as in Chen et al., SimCLR, 2020, appendix B.9). `blur_pool` blurs
    what a convolution with a stride is given, but for the pictures, as in FFCV (Leclerc et al., 2023). `drop_path` is
    the probability of stochastic depth in the last block; it rises in a line from 0 in the first.
    """

    def __init__(
        self,
        *,
        depth: int,
        num_classes: int = 1000,
        in_channels: int = 3,
        zero_init_residual: bool = False,
        small_images: bool = False,
        blur_pool: bool = False,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        if not 0 <= drop_path < 1:
            raise ValueError("drop_path is a probability, from 0 to less than 1")
        block, num_blocks = DEPTHS[depth]
        kernel, stride, padding = (3, 1, 1) if small_images else (7, 2, 3)
        self.conv1 = nn.Conv2d(in_channels, 64, kernel, stride, padding, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = stage(block, 64, 64, num_blocks[0], stride=1)
        self.layer2 = stage(block, 64 * block.expansion, 128, num_blocks[1], stride=2)
        self.layer3 = stage(block, 128 * block.expansion, 256, num_blocks[2], stride=2)
        self.layer4 = stage(block, 256 * block.expansion, 512, num_blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * block.expansion, num_classes)
        for layer in (self.layer2, self.layer3, self.layer4) if blur_pool else ():
            layer[0].blur = Blur()
        blocks = [*self.layer1, *self.layer2, *self.layer3, *self.layer4]
        for number, residual in enumerate(blocks[1:], 1) if drop_path else ():
            residual.drop_path = DropPath(drop_path * number / (len(blocks) - 1))
        self._initialize(zero_init_residual)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits

    def _initialize(self, zero_init_residual: bool) -> None:
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            elif zero_init_residual and isinstance(layer, BasicBlock):
                nn.init.zeros_(layer.bn2.weight)
            elif zero_init_residual and isinstance(layer, Bottleneck):
                nn.init.zeros_(layer.bn3.weight)


def stage(
    block: type[BasicBlock] | type[Bottleneck], in_channels: int, channels: int, num_blocks: int, stride: int
) -> nn.Sequential:
    """`num_blocks` blocks, the first of which changes the channels and, with a stride of 2, halves height and width."""
    first_block = block(in_channels, channels, stride)
    further_blocks = [block(channels * block.expansion, channels, 1) for _ in range(num_blocks - 1)]
    return nn.Sequential(first_block, *further_blocks)


def projection(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """The shortcut of a block that changes the shape, a 1x1 convolution (the paper's option B); otherwise None."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )
