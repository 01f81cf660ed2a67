"""Networks that the package does not have and nothing in it was tuned on: plans are tried on them too."""

from itertools import pairwise

import torch
import torch.nn.functional as F
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


class StochasticDepth(nn.Module):
    """Leave out the branch of some samples (Huang et al., 2016), drawn as torchvision and timm do."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """[N, ...] to the same."""
        if not self.training or self.p == 0:
            return x
        kept = torch.empty(len(x), *[1] * (x.dim() - 1), dtype=x.dtype, device=x.device)
        return x * kept.bernoulli_(1 - self.p).div_(1 - self.p)


class SqueezeExcitation(nn.Module):
    """Scale each channel by what all of them are on average (Hu et al., 2018)."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, H, W] to the same."""
        means = F.adaptive_avg_pool2d(x, 1)
        scale: Tensor = self.excite(F.silu(self.squeeze(means), inplace=True))
        return x * scale.sigmoid()


class InvertedResidual(nn.Module):
    """1x1 to wider, depthwise, squeeze and excitation, 1x1 back."""

    def __init__(self, channels: int, out: int, expansion: int, size: int, stride: int, p: float) -> None:
        super().__init__()
        inner = channels * expansion
        layers = _convolution(channels, inner, 1, 1, 1) if expansion > 1 else []
        layers += [*_convolution(inner, inner, size, stride, inner), SqueezeExcitation(inner, max(1, channels // 4))]
        self.body = nn.Sequential(*layers, nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out))
        self.drop = StochasticDepth(p) if stride == 1 and channels == out else None

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, H, W] to [N, out, H / stride, W / stride]."""
        y: Tensor = self.body(x)
        return y if self.drop is None else self.drop(y) + x


def _convolution(channels: int, out: int, size: int, stride: int, groups: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, out, size, stride, size // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(out), nn.SiLU(inplace=True)]


def efficientnet_b0(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """Table 1 of Tan and Le (2019): images [N, in_channels, H, W] to logits [N, num_classes]."""
    layers = _convolution(in_channels, 32, 3, 2, 1)
    channels, number = 32, 0
    for expansion, out, repeats, stride, size in (
        (1, 16, 1, 1, 3),
        (6, 24, 2, 2, 3),
        (6, 40, 2, 2, 5),
        (6, 80, 3, 2, 3),
        (6, 112, 3, 1, 5),
        (6, 192, 4, 2, 5),
        (6, 320, 1, 1, 3),
    ):
        for first in (True,) + (False,) * (repeats - 1):
            layers.append(InvertedResidual(channels, out, expansion, size, stride if first else 1, 0.2 * number / 16))
            channels, number = out, number + 1
    layers += [*_convolution(channels, 1280, 1, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(1280, num_classes))


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of images."""

    def forward(self, input: Tensor) -> Tensor:
        """[N, channels, H, W] to the same."""
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, layer norm and two linear layers, scaled by channel."""

    def __init__(self, channels: int, p: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.perceptron = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))
        self.scale = nn.Parameter(torch.full((channels, 1, 1), 1e-6))
        self.drop = StochasticDepth(p)

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, H, W] to the same."""
        y = self.perceptron(self.norm(self.depthwise(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        kept: Tensor = self.drop(self.scale * y)
        return kept + x


def convnext_t(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """ConvNeXt-T of Liu et al. (2022): images [N, in_channels, H, W] to logits [N, num_classes]."""
    layers: list[nn.Module] = [nn.Conv2d(in_channels, 96, 4, 4), ChannelNorm(96, eps=1e-6)]
    channels, number = 96, 0
    for out, repeats in ((96, 3), (192, 3), (384, 9), (768, 3)):
        if out != channels:
            layers += [ChannelNorm(channels, eps=1e-6), nn.Conv2d(channels, out, 2, 2)]
        for _ in range(repeats):
            layers.append(ConvNeXtBlock(out, 0.1 * number / 17))
            number += 1
        channels = out
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), ChannelNorm(768, eps=1e-6), nn.Flatten(), nn.Linear(768, num_classes)
    )


class UNet(nn.Module):
    """Figure 1 of Ronneberger et al. (2015), padded so that the size stays, with a norm after each convolution.

    Images [N, in_channels, H, W] to logits [N, num_classes, H, W]; H and W are multiples of 2 ** depth.
    """

    def __init__(self, num_classes: int, in_channels: int, width: int, depth: int, groups: int) -> None:
        super().__init__()
        channels = [width * 2**level for level in range(depth + 1)]
        ways = list(pairwise(channels))
        self.stem = _double_convolution(in_channels, width, groups)
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), *_double_convolution(fine, coarse, groups)) for fine, coarse in ways
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(coarse, fine, 2, stride=2) for fine, coarse in reversed(ways))
        self.joined = nn.ModuleList(_double_convolution(coarse, fine, groups) for fine, coarse in reversed(ways))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """[N, in_channels, H, W] to [N, num_classes, H, W]."""
        scales = [self.stem(images)]
        for down in self.down:
            scales.append(down(scales[-1]))
        x = scales.pop()
        for up, joined in zip(self.up, self.joined, strict=True):
            x = joined(torch.cat([scales.pop(), up(x)], 1))
        logits: Tensor = self.head(x)
        return logits


def _double_convolution(channels: int, out: int, groups: int) -> nn.Sequential:
    """Two of 3x3, each with its norm and ReLU."""
    layers: list[nn.Module] = []
    for size in (channels, out):
        norm = nn.GroupNorm(groups, out) if groups else nn.BatchNorm2d(out)
        layers += [nn.Conv2d(size, out, 3, padding=1, bias=False), norm, nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def unet(num_classes: int = 10, in_channels: int = 3, width: int = 32, depth: int = 4, groups: int = 0) -> nn.Module:
    """A U-Net with batch norm, or with group norm of so many groups; the paper's width is 64."""
    return UNet(num_classes, in_channels, width, depth, groups)
