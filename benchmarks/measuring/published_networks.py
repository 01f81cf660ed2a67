"""Networks of published tables that Convoy does not bring along, as plain modules: only their shapes matter here."""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor, nn

from convoy import models
from convoy.hardware.work import Work, work_of

Size = int | tuple[int, int]


def conv(
    inputs: int, outputs: int, size: Size, stride: int = 1, padding: Size | None = None, groups: int = 1
) -> nn.Module:
    """A convolution with batch norm and ReLU."""
    height, width = (size, size) if isinstance(size, int) else size
    padding = (height // 2, width // 2) if padding is None else padding
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, (height, width), stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(True),
    )


class Branches(nn.Module):
    """Several ways side by side, their channels together."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def path(inputs: int, *steps: tuple[int, Size] | tuple[int, Size, int]) -> nn.Sequential:
    """Convolutions one after the other: outputs, size, and stride; a stride of 2 goes without padding."""
    layers = []
    for outputs, size, *stride in steps:
        layers.append(conv(inputs, outputs, size, stride[0] if stride else 1, 0 if stride == [2] else None))
        inputs = outputs
    return nn.Sequential(*layers)


def average(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(inputs, outputs, 1))


def head(channels: int, classes: int = 1000) -> Sequence[nn.Module]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)


def inception_v3() -> nn.Module:
    """Szegedy et al., 2015, without the auxiliary classifier."""
    layers = [conv(3, 32, 3, 2, 0), conv(32, 32, 3, 1, 0), conv(32, 64, 3), nn.MaxPool2d(3, 2)]
    layers += [conv(64, 80, 1), conv(80, 192, 3, 1, 0), nn.MaxPool2d(3, 2)]
    width = 192
    for pooled in (32, 64, 64):
        layers.append(
            Branches(
                path(width, (64, 1)),
                path(width, (48, 1), (64, 5)),
                path(width, (64, 1), (96, 3), (96, 3)),
                average(width, pooled),
            )
        )
        width = 224 + pooled
    layers.append(Branches(path(288, (384, 3, 2)), path(288, (64, 1), (96, 3), (96, 3, 2)), nn.MaxPool2d(3, 2)))
    for c in (128, 160, 160, 192):
        layers.append(
            Branches(
                path(768, (192, 1)),
                path(768, (c, 1), (c, (1, 7)), (192, (7, 1))),
                path(768, (c, 1), (c, (7, 1)), (c, (1, 7)), (c, (7, 1)), (192, (1, 7))),
                average(768, 192),
            )
        )
    last = path(768, (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3, 2))
    layers.append(Branches(path(768, (192, 1), (320, 3, 2)), last, nn.MaxPool2d(3, 2)))
    for width in (1280, 2048):
        layers.append(
            Branches(
                path(width, (320, 1)),
                nn.Sequential(conv(width, 384, 1), Branches(conv(384, 384, (1, 3)), conv(384, 384, (3, 1)))),
                nn.Sequential(
                    path(width, (448, 1), (384, 3)), Branches(conv(384, 384, (1, 3)), conv(384, 384, (3, 1)))
                ),
                average(width, 192),
            )
        )
    return nn.Sequential(*layers, *head(2048))


def inception_v4() -> nn.Module:
    """Szegedy et al., 2016."""
    layers: list[nn.Module] = [conv(3, 32, 3, 2, 0), conv(32, 32, 3, 1, 0), conv(32, 64, 3)]
    layers.append(Branches(nn.MaxPool2d(3, 2), path(64, (96, 3, 2))))
    layers.append(
        Branches(
            nn.Sequential(conv(160, 64, 1), conv(64, 96, 3, 1, 0)),
            nn.Sequential(path(160, (64, 1), (64, (1, 7)), (64, (7, 1))), conv(64, 96, 3, 1, 0)),
        )
    )
    layers.append(Branches(path(192, (192, 3, 2)), nn.MaxPool2d(3, 2)))
    for _ in range(4):
        layers.append(
            Branches(
                path(384, (96, 1)), path(384, (64, 1), (96, 3)), path(384, (64, 1), (96, 3), (96, 3)), average(384, 96)
            )
        )
    layers.append(Branches(path(384, (384, 3, 2)), path(384, (192, 1), (224, 3), (256, 3, 2)), nn.MaxPool2d(3, 2)))
    for _ in range(7):
        layers.append(
            Branches(
                path(1024, (384, 1)),
                path(1024, (192, 1), (224, (1, 7)), (256, (7, 1))),
                path(1024, (192, 1), (192, (7, 1)), (224, (1, 7)), (224, (7, 1)), (256, (1, 7))),
                average(1024, 128),
            )
        )
    last = path(1024, (256, 1), (256, (1, 7)), (320, (7, 1)), (320, 3, 2))
    layers.append(Branches(path(1024, (192, 1), (192, 3, 2)), last, nn.MaxPool2d(3, 2)))
    for _ in range(3):
        pair = partial(Branches, conv(512, 256, (1, 3)), conv(512, 256, (3, 1)))
        layers.append(
            Branches(
                path(1536, (256, 1)),
                nn.Sequential(conv(1536, 384, 1), Branches(conv(384, 256, (1, 3)), conv(384, 256, (3, 1)))),
                nn.Sequential(path(1536, (384, 1), (448, (1, 3)), (512, (3, 1))), pair()),
                average(1536, 256),
            )
        )
    return nn.Sequential(*layers, *head(1536))


def inception_bn() -> nn.Module:
    """GoogLeNet with batch norm (Ioffe and Szegedy, 2015), as MXNet has it."""
    layers: list[nn.Module] = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1), conv(64, 64, 1), conv(64, 192, 3)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    width = 192
    table = [(64, 64, 64, 64, 96, 32), (64, 64, 96, 64, 96, 64), (128, 160, 64, 96), (224, 64, 96, 96, 128, 128)]
    table += [(192, 96, 128, 96, 128, 128), (160, 128, 160, 128, 160, 128), (96, 128, 192, 160, 192, 128)]
    table += [(128, 192, 192, 256), (352, 192, 320, 160, 224, 128), (352, 192, 320, 192, 224, 128)]
    for row in table:
        if len(row) == 4:
            a, b, c, d = row
            layers.append(
                Branches(
                    nn.Sequential(conv(width, a, 1), conv(a, b, 3, 2)),
                    nn.Sequential(conv(width, c, 1), conv(c, d, 3), conv(d, d, 3, 2)),
                    nn.MaxPool2d(3, 2, 1),
                )
            )
            width += b + d
            continue
        a, b, c, d, e, f = row
        double = path(width, (d, 1), (e, 3), (e, 3))
        layers.append(Branches(path(width, (a, 1)), path(width, (b, 1), (c, 3)), double, average(width, f)))
        width = a + c + e + f
    return nn.Sequential(*layers, *head(width))


def inception_small() -> nn.Module:
    """MXNet's Inception-BN-28-small for CIFAR-10."""
    layers: list[nn.Module] = [conv(3, 96, 3)]
    width = 96
    for row in [(32, 32), (32, 48), (80,), (112, 48), (96, 64), (80, 80), (48, 96), (96,), (176, 160), (176, 160)]:
        if len(row) == 1:
            layers.append(Branches(conv(width, row[0], 3, 2), nn.MaxPool2d(3, 2, 1)))
            width += row[0]
        else:
            layers.append(Branches(conv(width, row[0], 1), conv(width, row[1], 3)))
            width = sum(row)
    return nn.Sequential(*layers, *head(width, 10))


class Squeeze(nn.Module):
    """Squeeze and excitation (Hu et al., 2017)."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, inner, 1),
            nn.ReLU(),
            nn.Conv2d(inner, channels, 1),
            nn.Sigmoid(),
        )

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


def plain(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs))


def resnext(counts: Sequence[int], groups: int, width: int, squeeze: bool = False) -> nn.Module:
    """Xie et al., 2016."""
    layers: list[nn.Module] = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, count in enumerate(counts):
        outputs, middle = 256 << stage, groups * width << stage
        for block in range(count):
            stride = 2 if block == 0 and stage else 1
            way = [conv(inputs, middle, 1), conv(middle, middle, 3, stride, groups=groups), plain(middle, outputs, 1)]
            way += [Squeeze(outputs, outputs // 16)] if squeeze else []
            shortcut = plain(inputs, outputs, 1, stride) if block == 0 else None
            layers.append(Residual(nn.Sequential(*way), shortcut, nn.ReLU()))
            inputs = outputs
    return nn.Sequential(*layers, *head(inputs))


def efficientnet(width: float, depth: float, wide: bool = False) -> nn.Module:
    """Tan and Le, 2019. `wide` squeezes to a quarter of the expanded channels rather than of the block's."""

    def channels(number: float) -> int:
        return max(8, int(number * width + 4) // 8 * 8)

    def mixed(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Module:
        kernel = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
        return nn.Sequential(kernel, nn.BatchNorm2d(outputs), nn.SiLU())

    inputs = channels(32)
    layers: list[nn.Module] = [mixed(3, inputs, 3, 2)]
    rows = [(1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5)]
    for expand, outputs, count, stride, size in [*rows, (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)]:
        for block in range(-int(-count * depth // 1)):
            middle, target, step = inputs * expand, channels(outputs), stride if block == 0 else 1
            way = [mixed(inputs, middle, 1)] if expand > 1 else []
            way += [mixed(middle, middle, size, step, middle), Squeeze(middle, (middle if wide else inputs) // 4)]
            way.append(plain(middle, target, 1))
            same = step == 1 and inputs == target
            layers.append(Residual(nn.Sequential(*way)) if same else nn.Sequential(*way))
            inputs = target
    return nn.Sequential(*layers, mixed(inputs, channels(1280), 1), *head(channels(1280)))


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


class UNet(nn.Module):
    """Ronneberger et al., 2015; torchgpipe's has `convs` convolutions at each of five sizes."""

    def __init__(self, convs: int = 5, width: int = 64, depth: int = 5) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(*(conv(inputs if n == 0 else outputs, outputs, 3) for n in range(convs)))

        widths = [width << level for level in range(depth)]
        self.down = nn.ModuleList(block(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.bottom = block(widths[-1], widths[-1] * 2)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * c, c, 2, 2) for c in reversed(widths))
        self.up = nn.ModuleList(block(2 * c, c) for c in reversed(widths))
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for down in self.down:
            x = down(x)
            kept.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([grow(x), kept.pop()], 1))
        y: Tensor = self.last(x)
        return y


def alexnet_wide() -> nn.Module:
    """AlexNet without groups and with all its filters, as Caffe's descendants (MXNet, Paddle, Minerva) time it."""
    widths = [(3, 96, 11, 4, 2), (96, 256, 5, 1, 2), (256, 384, 3, 1, 1), (384, 384, 3, 1, 1), (384, 256, 3, 1, 1)]
    layers: list[nn.Module] = []
    for number, (inputs, outputs, size, stride, padding) in enumerate(widths):
        layers += [nn.Conv2d(inputs, outputs, size, stride, padding), nn.ReLU()]
        if number in (0, 1):
            layers += [nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2)]
    layers += [nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(9216, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(4096, 1000))


def network_in_network() -> nn.Module:
    """Lin et al., 2013, for ImageNet."""
    layers: list[nn.Module] = []
    for inputs, outputs, size, stride, padding in [(3, 96, 11, 4, 0), (96, 256, 5, 1, 2), (256, 384, 3, 1, 1)]:
        layers += [nn.Conv2d(inputs, outputs, size, stride, padding), nn.ReLU()]
        layers += [nn.Conv2d(outputs, outputs, 1), nn.ReLU(), nn.Conv2d(outputs, outputs, 1), nn.ReLU()]
        layers.append(nn.MaxPool2d(3, 2))
    layers += [nn.Conv2d(384, 1024, 3, padding=1), nn.ReLU(), nn.Conv2d(1024, 1024, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(1024, 1000, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


BUILT: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "inception-v3": (inception_v3, 299),
    "inception-v4": (inception_v4, 299),
    "inception-bn": (inception_bn, 224),
    "inception-small": (inception_small, 28),
    "resnext101": (partial(resnext, (3, 4, 23, 3), 32, 4), 224),
    "se-resnext101": (partial(resnext, (3, 4, 23, 3), 32, 4, True), 224),
    "efficientnet-b0": (partial(efficientnet, 1.0, 1.0), 224),
    "efficientnet-b4": (partial(efficientnet, 1.4, 1.8), 380),
    "efficientnet-wide-b0": (partial(efficientnet, 1.0, 1.0, True), 224),
    "efficientnet-wide-b4": (partial(efficientnet, 1.4, 1.8, True), 380),
    "ssd300": (Detector, 300),
    "unet": (UNet, 192),
    "alexnet-wide": (alexnet_wide, 227),
    "nin": (network_in_network, 227),
    "cifar": (partial(models.create, "resnet50-cifar"), 32),
}
"""What makes each network, and the pixels of its images' sides."""


@cache
def work(name: str) -> Work:
    """The work of a network of the tables, or of one that Convoy brings along."""
    with torch.device("meta"):
        if name in BUILT:
            build, size = BUILT[name]
            network = build()
        else:
            shape = models.describe(name).input_shape
            network, size = models.create(name), shape[1] if shape is not None else 224
    return work_of(network, (3, size, size))
