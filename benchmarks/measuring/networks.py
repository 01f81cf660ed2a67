"""Networks that the package does not have: plans are tried on them that were tuned on none, and tables name some."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from convoy import models
from convoy.models.resnet import DropPath
from convoy.models.unet import UNet

Size = int | tuple[int, int]
Layers = list[nn.Module]
Made = Callable[[], nn.Module]
RELU: Made = partial(nn.ReLU, inplace=True)
SILU: Made = partial(nn.SiLU, inplace=True)


def conv(
    inputs: int,
    outputs: int,
    size: Size,
    stride: int = 1,
    padding: Size | None = None,
    groups: int = 1,
    last: Made | None = RELU,
) -> nn.Sequential:
    """A convolution with batch norm and an activation."""
    height, width = (size, size) if isinstance(size, int) else size
    padding = (height // 2, width // 2) if padding is None else padding
    kernel = nn.Conv2d(inputs, outputs, (height, width), stride, padding, groups=groups, bias=False)
    return nn.Sequential(kernel, nn.BatchNorm2d(outputs), *([last()] if last else []))


def head(channels: int, classes: int = 1000) -> Layers:
    """From images to logits."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


class Squeeze(nn.Module):
    """Squeeze and excitation (Hu et al., 2018): scale each channel by what all of them are on average."""

    def __init__(self, channels: int, inner: int, activation: Made) -> None:
        super().__init__()
        squeeze, excite = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), squeeze, activation(), excite, nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * self.gate(x)
        return y


class Residual(nn.Module):
    """A path beside a shortcut."""

    def __init__(self, way: nn.Module, shortcut: nn.Module | None = None, last: nn.Module | None = None) -> None:
        super().__init__()
        self.way, self.shortcut, self.last = way, shortcut or nn.Identity(), last or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.way(x) + self.shortcut(x))
        return y


def wide(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """Four wide convolutions without normalization: images [N, in_channels, H, W] to logits [N, num_classes]."""
    rows = [(in_channels, 128, 5, True), (128, 256, 3, True), (256, 384, 3, False), (384, 256, 3, False)]
    layers: Layers = []
    for inputs, outputs, size, pooled in rows:
        layers += [nn.Conv2d(inputs, outputs, size, padding=size // 2), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if pooled else []
    layers += [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(4096, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, num_classes))


def inverted(inputs: int, outputs: int, middle: int, size: int, stride: int, last: Made, more: Layers) -> nn.Module:
    """1x1 to wider, depthwise, `more`, and 1x1 back, beside a shortcut where the shapes allow one."""
    way: Layers = [conv(inputs, middle, 1, last=last)] if middle > inputs else []
    way += [conv(middle, middle, size, stride, groups=middle, last=last), *more, conv(middle, outputs, 1, last=None)]
    return nn.Sequential(*way)


def mobilenet_v2(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """Table 2 of Sandler et al. (2018): images [N, in_channels, H, W] to logits [N, num_classes]."""
    layers: Layers = [conv(in_channels, 32, 3, 2, last=nn.ReLU)]
    inputs = 32
    rows = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    for expansion, outputs, count, stride in rows:
        for block in range(count):
            step, middle = stride if block == 0 else 1, expansion * inputs
            first: Layers = [conv(inputs, middle, 1, last=nn.ReLU6)] if expansion == 1 else []
            way = nn.Sequential(*first, inverted(inputs, outputs, middle, 3, step, nn.ReLU6, []))
            layers.append(Residual(way) if step == 1 and inputs == outputs else way)
            inputs = outputs
    return nn.Sequential(*layers, conv(inputs, 1280, 1, last=nn.ReLU6), *head(1280, num_classes))


def resnext(middle_blocks: int = 6, squeeze: bool = False, num_classes: int = 1000, in_channels: int = 3) -> nn.Module:
    """ResNeXt (32x4d) of Xie et al. (2017), 6 blocks in its third stage for 50 layers and 23 for 101, with squeeze and
    excitation if so said."""
    layers: Layers = [conv(in_channels, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, count in enumerate((3, 4, middle_blocks, 3)):
        outputs, middle = 256 << stage, 128 << stage
        for block in range(count):
            stride = 2 if block == 0 and stage else 1
            way: Layers = [conv(inputs, middle, 1), conv(middle, middle, 3, stride, groups=32)]
            way.append(conv(middle, outputs, 1, last=None))
            way += [Squeeze(outputs, outputs // 16, nn.ReLU)] if squeeze else []
            shortcut = conv(inputs, outputs, 1, stride, last=None) if block == 0 else None
            layers.append(Residual(nn.Sequential(*way), shortcut, nn.ReLU()))
            inputs = outputs
    return nn.Sequential(*layers, *head(inputs, num_classes))


def efficientnet(
    width: float, depth: float, wide: bool = False, num_classes: int = 1000, drops: bool = False
) -> nn.Module:
    """Table 1 of Tan and Le (2019). `wide` squeezes to a quarter of the expanded channels rather than of the block's;
    `drops` has stochastic depth and dropout."""

    def channels(number: float) -> int:
        return max(8, int(number * width + 4) // 8 * 8)

    inputs, number = channels(32), 0
    layers: Layers = [conv(3, inputs, 3, 2, last=SILU)]
    rows = [(1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5)]
    for expand, target, count, stride, size in [*rows, (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)]:
        for block in range(-int(-count * depth // 1)):
            middle, outputs, step = inputs * expand, channels(target), stride if block == 0 else 1
            squeeze = Squeeze(middle, (middle if wide else inputs) // 4, SILU)
            way = inverted(inputs, outputs, middle, size, step, SILU, [squeeze])
            if step == 1 and inputs == outputs:
                way = Residual(nn.Sequential(way, *([DropPath(0.2 * number / 16)] if drops else [])))
            layers.append(way)
            inputs, number = outputs, number + 1
    pool, flat, linear = head(channels(1280), num_classes)
    layers += [conv(inputs, channels(1280), 1, last=SILU), pool, flat, *([nn.Dropout(0.2)] if drops else [])]
    return nn.Sequential(*layers, linear)


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of images."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, layer norm and two linear layers, scaled by channel."""

    def __init__(self, channels: int, p: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.perceptron = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))
        self.scale = nn.Parameter(torch.full((channels, 1, 1), 1e-6))
        self.drop = DropPath(p)

    def forward(self, x: Tensor) -> Tensor:
        y = self.perceptron(self.norm(self.depthwise(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        kept: Tensor = self.drop(self.scale * y)
        return kept + x


def convnext_t(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """ConvNeXt-T of Liu et al. (2022): images [N, in_channels, H, W] to logits [N, num_classes]."""
    layers: Layers = [nn.Conv2d(in_channels, 96, 4, 4), ChannelNorm(96, eps=1e-6)]
    channels, number = 96, 0
    for out, repeats in ((96, 3), (192, 3), (384, 9), (768, 3)):
        if out != channels:
            layers += [ChannelNorm(channels, eps=1e-6), nn.Conv2d(channels, out, 2, 2)]
        for _ in range(repeats):
            layers.append(ConvNeXtBlock(out, 0.1 * number / 17))
            number += 1
        channels = out
    pool, flat, linear = head(768, num_classes)
    return nn.Sequential(*layers, pool, ChannelNorm(768, eps=1e-6), flat, linear)


# Networks of published tables, of which only the shapes matter.


class Branches(nn.Module):
    """Several ways side by side, their channels together."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def path(inputs: int, text: str) -> nn.Module:
    """Layers one after the other: `64:3` is a convolution of 64 filters of 3x3, `64:1x7` of 1x7, `64:3/2` with a stride
    of two and no padding, `64:3-` without padding; `max` and `mean` pool; `(64:1 64:3|64:1)` goes two ways."""
    layers: Layers = []
    text, _, ends = text.partition("(")
    for word in text.split():
        if word in ("max", "mean"):
            layers.append(nn.MaxPool2d(3, 2) if word == "max" else nn.AvgPool2d(3, 1, 1))
            continue
        outputs, _, form = word.partition(":")
        size, _, stride = form.rstrip("-").partition("/")
        sides = tuple(map(int, size.split("x")))
        unpadded = 0 if stride or form.endswith("-") else None
        layers.append(conv(inputs, int(outputs), sides * (3 - len(sides)), int(stride or 1), unpadded))  # type: ignore[arg-type]
        inputs = int(outputs)
    if ends:
        layers.append(ways(inputs, *ends.rstrip(")").split("|")))
    return nn.Sequential(*layers)


def ways(inputs: int, *texts: str) -> Branches:
    """Paths side by side."""
    return Branches(*(path(inputs, text) for text in texts))


def inception_v3() -> nn.Module:
    """Szegedy et al., 2015, without the auxiliary classifier."""
    layers: Layers = [path(3, "32:3/2 32:3- 64:3 max"), path(64, "80:1 192:3- max")]
    width = 192
    for pooled in (32, 64, 64):
        layers.append(ways(width, "64:1", "48:1 64:5", "64:1 96:3 96:3", f"mean {pooled}:1"))
        width = 224 + pooled
    layers.append(ways(288, "384:3/2", "64:1 96:3 96:3/2", "max"))
    for c in (128, 160, 160, 192):
        twice = f"{c}:1 {c}:7x1 {c}:1x7 {c}:7x1 192:1x7"
        layers.append(ways(768, "192:1", f"{c}:1 {c}:1x7 192:7x1", twice, "mean 192:1"))
    layers.append(ways(768, "192:1 320:3/2", "192:1 192:1x7 192:7x1 192:3/2", "max"))
    for width in (1280, 2048):
        split = "(384:1x3|384:3x1)"
        layers.append(ways(width, "320:1", f"384:1 {split}", f"448:1 384:3 {split}", "mean 192:1"))
    return nn.Sequential(*layers, *head(2048))


def inception_v4() -> nn.Module:
    """Szegedy et al., 2016."""
    layers: Layers = [path(3, "32:3/2 32:3- 64:3"), ways(64, "max", "96:3/2")]
    layers += [ways(160, "64:1 96:3-", "64:1 64:1x7 64:7x1 96:3-"), ways(192, "192:3/2", "max")]
    layers += [ways(384, "96:1", "64:1 96:3", "64:1 96:3 96:3", "mean 96:1") for _ in range(4)]
    layers.append(ways(384, "384:3/2", "192:1 224:3 256:3/2", "max"))
    twice = "192:1 192:7x1 224:1x7 224:7x1 256:1x7"
    layers += [ways(1024, "384:1", "192:1 224:1x7 256:7x1", twice, "mean 128:1") for _ in range(7)]
    layers.append(ways(1024, "192:1 192:3/2", "256:1 256:1x7 320:7x1 320:3/2", "max"))
    for _ in range(3):
        twice = "384:1 448:1x3 512:3x1 (256:1x3|256:3x1)"
        layers.append(ways(1536, "256:1", "384:1 (256:1x3|256:3x1)", twice, "mean 256:1"))
    return nn.Sequential(*layers, *head(1536))


def inception_bn() -> nn.Module:
    """GoogLeNet with batch norm (Ioffe and Szegedy, 2015), as MXNet has it."""
    layers: Layers = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1), conv(64, 64, 1), conv(64, 192, 3)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    width = 192
    table = [(64, 64, 64, 64, 96, 32), (64, 64, 96, 64, 96, 64), (128, 160, 64, 96), (224, 64, 96, 96, 128, 128)]
    table += [(192, 96, 128, 96, 128, 128), (160, 128, 160, 128, 160, 128), (96, 128, 192, 160, 192, 128)]
    table += [(128, 192, 192, 256), (352, 192, 320, 160, 224, 128), (352, 192, 320, 192, 224, 128)]
    for row in table:
        if len(row) == 4:
            a, b, c, d = row
            double = nn.Sequential(conv(width, c, 1), conv(c, d, 3), conv(d, d, 3, 2))
            once = nn.Sequential(conv(width, a, 1), conv(a, b, 3, 2))
            layers.append(Branches(once, double, nn.MaxPool2d(3, 2, 1)))
            width += b + d
            continue
        a, b, c, d, e, f = row
        layers.append(ways(width, f"{a}:1", f"{b}:1 {c}:3", f"{d}:1 {e}:3 {e}:3", f"mean {f}:1"))
        width = a + c + e + f
    return nn.Sequential(*layers, *head(width))


def inception_small() -> nn.Module:
    """MXNet's Inception-BN-28-small for CIFAR-10."""
    layers: Layers = [conv(3, 96, 3)]
    width = 96
    for row in [(32, 32), (32, 48), (80,), (112, 48), (96, 64), (80, 80), (48, 96), (96,), (176, 160), (176, 160)]:
        if len(row) == 1:
            layers.append(Branches(conv(width, row[0], 3, 2), nn.MaxPool2d(3, 2, 1)))
            width += row[0]
        else:
            layers.append(ways(width, f"{row[0]}:1", f"{row[1]}:3"))
            width = sum(row)
    return nn.Sequential(*layers, *head(width, 10))


class Detector(nn.Module):
    """SSD300 (Liu et al., 2015) on ResNet-50 up to its third stage, as NVIDIA's examples have it."""

    def __init__(self) -> None:
        super().__init__()
        resnet = models.create("resnet50")
        stages = [module for name, module in resnet.named_children() if name not in ("layer4", "avgpool", "fc")]
        first = stages[-1][0]  # type: ignore[index]
        for module in first.modules():
            if isinstance(module, nn.Conv2d) and module.stride == (2, 2):
                module.stride = (1, 1)
        self.body = nn.Sequential(*stages)
        widths = (1024, 512, 512, 256, 256, 256)
        steps = [(256, 2, 1), (256, 2, 1), (128, 2, 1), (128, 1, 0), (128, 1, 0)]
        self.more = nn.ModuleList(
            nn.Sequential(conv(a, middle, 1), conv(middle, b, 3, stride, padding))
            for a, b, (middle, stride, padding) in zip(widths, widths[1:], steps, strict=False)
        )
        boxes = (4, 6, 6, 6, 4, 4)
        self.heads = nn.ModuleList(nn.Conv2d(c, n * 85, 3, padding=1) for c, n in zip(widths, boxes, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        found = [self.heads[0](x).flatten(1)]
        for more, one in zip(self.more, list(self.heads)[1:], strict=True):
            x = more(x)
            found.append(one(x).flatten(1))
        return torch.cat(found, 1)


def alexnet_wide() -> nn.Module:
    """AlexNet without groups and with all its filters, as Caffe's descendants (MXNet, Paddle, Minerva) time it."""
    widths = [(3, 96, 11, 4, 2), (96, 256, 5, 1, 2), (256, 384, 3, 1, 1), (384, 384, 3, 1, 1), (384, 256, 3, 1, 1)]
    layers: Layers = []
    for number, (inputs, outputs, size, stride, padding) in enumerate(widths):
        layers += [nn.Conv2d(inputs, outputs, size, stride, padding), nn.ReLU()]
        if number in (0, 1):
            layers += [nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2)]
    layers += [nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(9216, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(4096, 1000))


def network_in_network() -> nn.Module:
    """Lin et al., 2013, for ImageNet."""
    layers: Layers = []
    rows = [(3, 96, 11, 4, 0, 96), (96, 256, 5, 1, 2, 256), (256, 384, 3, 1, 1, 384), (384, 1024, 3, 1, 1, 1000)]
    for inputs, outputs, size, stride, padding, last in rows:
        layers += [nn.Conv2d(inputs, outputs, size, stride, padding), nn.ReLU()]
        layers += [nn.Conv2d(outputs, outputs, 1), nn.ReLU(), nn.Conv2d(outputs, last, 1), nn.ReLU()]
        layers.append(nn.MaxPool2d(3, 2))
    return nn.Sequential(*layers[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten())


BUILT: dict[str, tuple[Made, int]] = {
    "inception-v3": (inception_v3, 299),
    "inception-v4": (inception_v4, 299),
    "inception-bn": (inception_bn, 224),
    "inception-small": (inception_small, 28),
    "resnext101": (partial(resnext, 23), 224),
    "se-resnext101": (partial(resnext, 23, True), 224),
    "efficientnet-b0": (partial(efficientnet, 1.0, 1.0), 224),
    "efficientnet-b4": (partial(efficientnet, 1.4, 1.8), 380),
    "efficientnet-wide-b0": (partial(efficientnet, 1.0, 1.0, True), 224),
    "efficientnet-wide-b4": (partial(efficientnet, 1.4, 1.8, True), 380),
    "ssd300": (Detector, 300),
    "unet": (partial(UNet, num_classes=1, width=64, depth=5, convs=5), 192),
    "alexnet-wide": (alexnet_wide, 227),
    "nin": (network_in_network, 227),
    "cifar": (partial(models.create, "resnet50-cifar"), 32),
}
"""What makes each network of the tables, and the pixels of its images' sides."""
