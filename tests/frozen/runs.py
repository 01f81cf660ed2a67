"""Six runs that always give the same: their command lines, and what is looked at of their results."""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

FIXED = "--batch 24 --microbatches 8 --epochs 4ba --lr 0.05 --set threads=1 --set log_every=1ba"
RUNS = {
    "serial": "lenet --reproducible --set data.augment.crop=pad",
    "sample=2": "lenet --reproducible --set data.augment.crop=pad --plan sample=2",
    "shares 3,1": "cifar-quick --reproducible --devices 2 --shares 3,1 --set data.augment.flip=true",
    "dropout": "frozen.nets:Small --reproducible --plan sample=2 --set ema.decay=0.9 --set clip_norm=1",
    "microbatches in stages": "frozen.nets:Small --plan stage=2 --set optimizer.name=adamw --set optimizer.fused=false",
    "batch norm sync": "frozen.nets:Small --plan filter=2 --batch-norm sync --set loss.label_smoothing=0.1 "
    "--set optimizer.fused=false",
}
SAME = ("serial", "sample=2")
"""Runs of one result."""


def arguments(name: str, data: Path, out: Path, double: bool) -> list[str]:
    """A run's command line after `convoy`; in float64 or, as people train, in float32."""
    model, *rest = RUNS[name].split()
    pictures = data / ("32" if model == "cifar-quick" else "28")
    network = f"{model} --set data.channels=3"
    if double:  # and pixels from 0 to 1, which are the same with and without fused multiplication
        network = f"frozen.nets:Double --set model.options.of={network} --set data.mean=[0,0,0] --set data.std=[1,1,1]"
    return ["train", *network.split(), "--data", str(pictures), *FIXED.split(), *rest, "--out", str(out)]


def write_data(folder: Path) -> Path:
    """Pictures of 28 and of 32 pixels in MNIST's files: a bright bar in noise, at a height that is the label."""
    for side in (28, 32):
        (folder / str(side)).mkdir(parents=True)
        for split, count in (("train", 96), ("t10k", 40)):
            noise = np.arange(count * side * side, dtype=np.uint64) * 2654435761 % 2**32 >> 16  # of no library
            pixels = (noise % 120).astype(np.uint8).reshape(count, side, side)
            labels = (np.arange(count) % 10).astype(np.uint8)
            for picture, label in zip(pixels, labels, strict=True):
                picture[2 * label + 4 : 2 * label + 6] += 120
            for name, magic, array in (("images-idx3", 2051, pixels), ("labels-idx1", 2049, labels)):
                header = np.array([magic, *array.shape], ">i4").tobytes()
                (folder / str(side) / f"{split}-{name}-ubyte").write_bytes(header + array.tobytes())
    return folder


def lines(out: Path, split: str) -> list[dict[str, float]]:
    """What a run says of its updates, "train", or of its evaluations, "test"."""
    rows = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [row for row in rows if row["split"] == split]


def numbers(out: Path) -> dict[str, list[float]]:
    """The losses, the shares of right answers, and sums of the weights: of their sizes, and of these sums on the way,
    which tells apart who has which."""
    weights = load_file(out / "weights.safetensors")
    flat = torch.cat([weights[name].double().flatten() for name in sorted(weights)])
    sums = flat.abs().cumsum(0)
    found = {"losses": [row["loss"] for row in lines(out, "train")], "weights": [sums[-1].item(), sums.mean().item()]}
    return found | {"top1": [row["top1"] for row in lines(out, "test")]}


def bits(out: Path) -> str:
    """A checksum that differs where a bit of a weight or of a loss does."""
    losses = [row["loss"] for split in ("train", "test") for row in lines(out, split)]
    found = hashlib.sha256(repr(losses).encode())
    for name, tensor in sorted(load_file(out / "weights.safetensors").items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return found.hexdigest()
