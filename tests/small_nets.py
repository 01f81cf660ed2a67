"""Small networks, each with one thing that parallel convolutions stumble over."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Depthwise(nn.Module):
    """Inverted residuals with depthwise convolutions, as in MobileNet v2."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True))
        self.expand = nn.Sequential(nn.Conv2d(8, 24, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU6(inplace=True))
        depthwise = nn.Conv2d(24, 24, 3, 1, 1, groups=24, bias=False)
        self.depth = nn.Sequential(depthwise, nn.BatchNorm2d(24), nn.Hardswish())
        self.project = nn.Sequential(nn.Conv2d(24, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.project(self.depth(self.expand(x)))
        return self.head(x.mean([2, 3]))


class SqueezeExcite(nn.Module):
    """Channels weighted by a small network over their means."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, 2, 1)
        self.squeeze, self.excite = nn.Conv2d(12, 6, 1), nn.Conv2d(6, 12, 1)
        self.last, self.norm = nn.Conv2d(12, 12, 3, 1, 1, bias=False), nn.BatchNorm2d(12)
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.stem(x))
        scale = torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        x = self.norm(self.last(x * scale))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(F.relu(x), 1), 1))


class Dense(nn.Module):
    """Concatenated features, as in DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(6 + 5 * i) for i in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(6 + 5 * i, 5, 3, padding=1, bias=False) for i in range(3))
        self.norm, self.pool, self.head = nn.BatchNorm2d(21), nn.AvgPool2d(2), nn.Linear(21, 10)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.pool(self.stem(x))]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            features.append(conv(F.relu(norm(torch.cat(features, 1)))))
        x = F.relu(self.norm(torch.cat(features, 1)))
        return self.head(F.adaptive_avg_pool2d(x, (1, 1)).flatten(1))


class Shuffle(nn.Module):
    """Halves of the channels on two ways, then shuffled, as in ShuffleNet v2."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU(inplace=True))
        first = nn.Conv2d(6, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True)
        depth = nn.Conv2d(6, 6, 3, 1, 1, groups=6, bias=False), nn.BatchNorm2d(6), nn.Tanh()
        second = nn.Conv2d(6, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True)
        self.way = nn.Sequential(*first, *depth, *second)
        self.last, self.head = nn.Conv2d(12, 16, 1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        a, b = x.chunk(2, dim=1)
        x = torch.cat((a, self.way(b)), dim=1)
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)
        return self.head(F.relu(self.last(x)).mean((2, 3)))


class Permuted(nn.Module):
    """Layer norm and linear layers with the channels last, as in ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 4, 4)
        self.depth = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.norm, self.up, self.down = nn.LayerNorm(12, eps=1e-6), nn.Linear(12, 24), nn.Linear(24, 12)
        self.scale = nn.Parameter(torch.full((12, 1, 1), 0.5))
        self.last, self.head = nn.LayerNorm(12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        y = self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)
        x = x + self.scale * y
        return self.head(self.last(x.mean([-2, -1])))


class RootMeanSquare(nn.Module):
    """RMS norm over the channels, and over whole pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 4, 4)
        self.norm, self.up, self.down = nn.RMSNorm(12, eps=1e-6), nn.Linear(12, 24), nn.Linear(24, 12)
        self.second, self.head = nn.Conv2d(12, 6, 3, 2, 1), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.down(F.silu(self.up(self.norm(x.permute(0, 2, 3, 1))))).permute(0, 3, 1, 2)
        return self.head(F.relu(self.second(F.rms_norm(x, x.shape[1:]))).mean([-2, -1]))


class Dropping(nn.Module):
    """Drops channels, elements of pictures and elements of a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.second, self.hidden, self.head = nn.Conv2d(8, 12, 3, 2, 1), nn.Linear(12 * 16, 24), nn.Linear(24, 10)
        self.channels, self.pixels, self.units = nn.Dropout2d(0.4), nn.Dropout(0.3), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.channels(F.relu(self.norm(self.conv(x))))
        x = self.pixels(F.relu(self.second(x)))
        return self.head(self.units(F.relu(self.hidden(F.adaptive_avg_pool2d(x, 4).flatten(1)))))


SMALL_NETS: dict[str, type[nn.Module]] = {"depthwise": Depthwise, "squeeze-excite": SqueezeExcite, "dense": Dense}
SMALL_NETS |= {"shuffle": Shuffle, "permuted": Permuted, "root-mean-square": RootMeanSquare, "dropping": Dropping}
