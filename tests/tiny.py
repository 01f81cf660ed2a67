"""A small network and a small data set on disk, for tests that train."""

from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from convoy.cli import main
from convoy.models.resnet import BasicBlock, Blur, DropPath

NUM_TRAIN, NUM_TEST = 96, 40


class TinyNet(nn.Module):
    """Batch norm, dropout and an auxiliary head: everything that a step has to remember."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8 * 49, num_classes)
        self.aux = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        logits = self.head(self.drop(x.flatten(1)))
        return (logits, self.aux(x.mean((2, 3)))) if self.training else logits


class TinyDouble(TinyNet):
    """Computes in float64."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__(num_classes, in_channels)
        self.double()

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return super().forward(x.double())


class TinyPlain(nn.Sequential):
    """Nothing that draws numbers or looks at other samples; in float64."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1) -> None:
        conv = nn.Conv2d(in_channels, 4, 5, stride=4)
        super().__init__(conv, nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, num_classes))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double())


class TinyWhite(TinyDouble):
    """Its first layer can whiten patches of 2x2 pixels."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__(num_classes, in_channels)
        self.conv = nn.Conv2d(in_channels, 8, 2, stride=2, bias=False).double()


class TinyResidual(nn.Module):
    """Pictures of any size through a block with all that a ResNet's may have; in float64."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 8, 3, padding=1)
        self.block = BasicBlock(8, 8, stride=2)
        self.block.blur, self.block.drop_path = Blur(), DropPath(0.3)
        self.head = nn.Linear(8, num_classes)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.conv(x.double())).mean((2, 3)))


class TinyUnseen(TinyNet):
    """Asks for a number, so that nobody can capture it."""

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return super().forward(x if float(x.detach().amax()) < 1e9 else x * 0)


CHANGES: dict[str, Any] = {}


class Changing(nn.Module):
    """Its code is another in each test, as CHANGES says."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.act = CHANGES.get("act", nn.SiLU)()
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, num_classes)
        self.conv.requires_grad_(not CHANGES.get("frozen"))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.act(self.norm(self.conv(x))).mean((2, 3))))


def write_mnist(folder: Path, num_train: int = NUM_TRAIN, num_test: int = NUM_TEST) -> Path:
    """Random, learnable pictures in the files of MNIST: a bright bar, at a height that is the label."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for split, count in (("train", num_train), ("t10k", num_test)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        pixels = generator.integers(0, 120, (count, 28, 28), dtype=np.uint8)
        for picture, label in zip(pixels, labels, strict=True):
            picture[2 * label + 4 : 2 * label + 6] += 120
        header = np.array([2051, count, 28, 28], ">i4").tobytes()
        (folder / f"{split}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(np.array([2049, count], ">i4").tobytes() + labels.tobytes())
    return folder


def write_pictures(folder: Path, classes: str = "abc", size: tuple[int, int] = (40, 30)) -> Path:
    """Class folders of noisy pictures whose brightness tells the class, in `train/` and `val/`."""
    generator = np.random.default_rng(0)
    for split, number in (("train", 8), ("val", 4)):
        for place, name in enumerate(classes):
            (folder / split / name).mkdir(parents=True)
            for i in range(number):
                pixels = generator.integers(0, 90, (size[1], size[0], 3), dtype=np.uint8) + np.uint8(60 * place)
                Image.fromarray(pixels).save(folder / split / name / f"{i}.png")
    return folder


def train_on_pictures(data: Path, out: Path, *settings: str) -> Path:
    """A run of the command line on such pictures: two epochs of TinyNet at 28 pixels, in `out`."""
    line = f"train tiny:TinyNet --data {data} --batch 12 --epochs 2ep --lr 0.05 --set threads=1 --out {out}"
    assert main([*line.split(), "--set", "data.image_size=28", *settings]) == 0
    return out
