"""DenseNet: every layer reads the feature maps of all layers before it.

Huang, Liu, van der Maaten, Weinberger: Densely Connected Convolutional Networks (2016), table 1 (DenseNet-BC), with
torchvision's names and initialization.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DenseLayer(nn.Module):
    """Section 3: 1x1 to 4 · growth channels (the bottleneck), 3x3 to `growth`; batch norm and ReLU before each.

    [N, in_channels, H, W] to [N, growth, H, W].
    """

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(in_channels, 4 * growth, kernel_size=1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4 * growth, growth, kernel_size=3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv2(self.relu2(self.norm2(self.conv1(self.relu1(self.norm1(x))))))
        return out


class DenseBlock(nn.ModuleDict):
    """Figure 1: layers that each read the input and the output of all before, joined along the channels.

    [N, in_channels, H, W] to [N, in_channels + num_layers · growth, H, W].
    """

    def __init__(self, num_layers: int, in_channels: int, growth: int) -> None:
        super().__init__()
        for number in range(num_layers):
            self[f"denselayer{number + 1}"] = DenseLayer(in_channels + number * growth, growth)

    def forward(self, x: Tensor) -> Tensor:
        maps = [x]
        for layer in self.values():
            maps.append(layer(torch.cat(maps, 1)))
        return torch.cat(maps, 1)


# Growth rate, channels of the first convolution, and layers in each of the four blocks.
DEPTHS = {
    121: (32, 64, (6, 12, 24, 16)),
    169: (32, 64, (6, 12, 32, 32)),
    201: (32, 64, (6, 12, 48, 32)),
    161: (48, 96, (6, 12, 36, 24)),
}


class DenseNet(nn.Module):
    """Images [N, C, H, W] to logits [N, num_classes]; H and W are 224 in the paper.

    `depth` counts the layers with weights. With `small_images` (32x32) the first convolution is 3x3 with stride 1 and
    nothing is pooled behind it.
    """

    def __init__(
        self, *, depth: int, num_classes: int = 1000, in_channels: int = 3, small_images: bool = False
    ) -> None:
        super().__init__()
        growth, channels, blocks = DEPTHS[depth]
        self.features = nn.Sequential()
        kernel, stride, padding = (3, 1, 1) if small_images else (7, 2, 3)
        self.features.conv0 = nn.Conv2d(in_channels, channels, kernel, stride, padding, bias=False)
        self.features.norm0 = nn.BatchNorm2d(channels)
        self.features.relu0 = nn.ReLU(inplace=True)
        self.features.pool0 = nn.Identity() if small_images else nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        for number, num_layers in enumerate(blocks, 1):
            self.features.add_module(f"denseblock{number}", DenseBlock(num_layers, channels, growth))
            channels += num_layers * growth
            if number < len(blocks):
                self.features.add_module(f"transition{number}", transition(channels))
                channels //= 2
        self.features.norm5 = nn.BatchNorm2d(channels)
        self.classifier = nn.Linear(channels, num_classes)
        self._initialize()

    def forward(self, images: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(F.relu(self.features(images), inplace=True), 1)
        logits: Tensor = self.classifier(torch.flatten(x, 1))
        return logits

    def _initialize(self) -> None:
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight)
        nn.init.zeros_(self.classifier.bias)


def transition(channels: int) -> nn.Sequential:
    """Between two blocks: half the channels (the paper's compression of 0.5), half the height and width."""
    layers = nn.Sequential()
    layers.norm = nn.BatchNorm2d(channels)
    layers.relu = nn.ReLU(inplace=True)
    layers.conv = nn.Conv2d(channels, channels // 2, kernel_size=1, bias=False)
    layers.pool = nn.AvgPool2d(kernel_size=2, stride=2)
    return layers
