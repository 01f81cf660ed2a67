"""What both segment.py and segment_plain.py train: a U-Net that finds discs and squares, in pictures drawn here."""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--plan", default="serial", help="how the work is divided (for segment.py)")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--samples", type=int, default=400, help="pictures to draw; a fifth of them for the test")
    parser.add_argument("--batch", type=int, default=20, help="samples of an update, on all devices together")
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--out", default="runs/shapes", help="folder for weights.pt")
    return parser.parse_args()


class UNet(nn.Module):
    """Two scales down and two up, joined by concatenation (Ronneberger et al., 2015)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = block(1, width)
        self.second = block(width, 2 * width)
        self.bottom = block(2 * width, 4 * width)
        self.up_second = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.joined_second = block(4 * width, 2 * width)
        self.up_first = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.joined_first = block(2 * width, width)
        self.head = nn.Conv2d(width, 2, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, images: Tensor) -> Tensor:
        """From images [samples, 1, height, width] to logits [samples, 2, height, width]; sizes are multiples of 4."""
        first = self.first(images)
        second = self.second(self.pool(first))
        bottom = self.bottom(self.pool(second))
        second = self.joined_second(torch.cat([self.up_second(bottom), second], 1))
        first = self.joined_first(torch.cat([self.up_first(second), first], 1))
        return self.head(first)


def block(channels: int, width: int) -> nn.Sequential:
    """A convolution, batch norm and ReLU."""
    return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())


def data(samples: int, dtype: torch.dtype, size: int = 32) -> tuple[TensorDataset, TensorDataset]:
    """Noisy pictures of a disc and a square, and the masks of both: four fifths to train on, one fifth to test with."""
    draw = torch.Generator().manual_seed(0)
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")

    def distances() -> tuple[Tensor, Tensor, Tensor]:
        row, column = torch.randint(4, size - 4, (2, samples, 1, 1), generator=draw)
        return rows - row, columns - column, torch.randint(3, 8, (samples, 1, 1), generator=draw)

    down, right, radius = distances()
    discs = down**2 + right**2 <= radius**2
    down, right, half = distances()
    squares = (down.abs() < half) & (right.abs() < half) & ~discs
    noise = torch.randn(samples, size, size, generator=draw, dtype=torch.float64)
    images = (discs + 0.8 * squares + 0.3 * noise)[:, None].to(dtype)
    masks = torch.stack([discs, squares], 1).to(dtype)
    cut = samples * 4 // 5
    return TensorDataset(images[:cut], masks[:cut]), TensorDataset(images[cut:], masks[cut:])
