"""Networks that the package does not have and nothing in it was tuned on: predictions are checked on them too."""

from torch import Tensor, nn


def wide(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """Four wide convolutions without normalization: images [N, in_channels, H, W] to logits [N, num_classes]."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 128, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(128, 256, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(256, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(4096, 1024),
        nn.ReLU(),
        nn.Linear(1024, num_classes),
    )


class Residual(nn.Module):
    """1x1, 3x3 in groups, 1x1, each with batch norm, beside a shortcut where the shapes allow or ask for one.

    Of MobileNet-V2 (Sandler et al., 2018: wide inside, every channel its own group, no activation at the end) and of
    ResNeXt (Xie et al., 2017: 32 groups, a projection where the shapes differ).
    """

    def __init__(self, channels: int, inner: int, out: int, stride: int, groups: int, inverted: bool) -> None:
        super().__init__()
        activation: type[nn.Module] = nn.ReLU6 if inverted else nn.ReLU
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            activation(),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=groups, bias=False),
            nn.BatchNorm2d(inner),
            activation(),
            nn.Conv2d(inner, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        same = stride == 1 and channels == out
        project = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.shortcut = nn.Identity() if same else None if inverted else project
        self.last = nn.Identity() if inverted else nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, H, W] to [N, out, H / stride, W / stride]."""
        y = self.body(x)
        result: Tensor = self.last(y if self.shortcut is None else y + self.shortcut(x))
        return result


def _stem(in_channels: int, out: int, size: int) -> list[nn.Module]:
    return [nn.Conv2d(in_channels, out, size, 2, size // 2, bias=False), nn.BatchNorm2d(out), nn.ReLU()]


def mobilenet_v2(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """Table 2 of Sandler et al.: images [N, in_channels, H, W] to logits [N, num_classes]."""
    layers = _stem(in_channels, 32, 3)
    channels = 32
    for expansion, out, repeats, stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for number in range(repeats):
            inner = expansion * channels
            layers.append(Residual(channels, inner, out, stride if number == 0 else 1, inner, inverted=True))
            channels = out
    layers += [nn.Conv2d(channels, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU6()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, num_classes))


def resnext50(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """ResNeXt-50 (32x4d) of Xie et al.: images [N, in_channels, H, W] to logits [N, num_classes]."""
    layers = [*_stem(in_channels, 64, 7), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for out, repeats, stride in ((256, 3, 1), (512, 4, 2), (1024, 6, 2), (2048, 3, 2)):
        for number in range(repeats):
            layers.append(Residual(channels, out // 2, out, stride if number == 0 else 1, 32, inverted=False))
            channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, num_classes))
