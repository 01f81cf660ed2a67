"""What the trainer costs beside a bare PyTorch loop: the same network, optimiser, batches and data in memory.

    python benchmarks/overhead.py                                 LeNet, on MNIST-shaped random digits
    python benchmarks/overhead.py --recipe cifar-quick

Both sides run in turn in one process, several rounds; the ratio of a round is the trainer's seconds over the bare loop's
(above 1: the trainer is slower), and their median is the result. The trainer's side is the whole of it: loader, order of
samples, microbatches, metrics, TensorBoard, progress; evaluation and checkpoints are put beyond the end. The bare loop
takes its batches by a random permutation of a tensor, moves and normalises them as the trainer must.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from convoy import models
from convoy.training import ConsoleReporter, Recipe, RunDirectory, load_recipe, train

SHAPES = {"lenet-mnist": (1, 28, 28), "cifar-quick": (3, 32, 32)}


def write_data(folder: Path, shape: tuple[int, int, int], num_images: int) -> Path:
    """Random pictures in the files of MNIST (one channel) or CIFAR-10 (three), as the trainer reads them."""
    generator = np.random.default_rng(0)
    for split, count in (("train", num_images), ("t10k" if shape[0] == 1 else "test", 256)):
        pixels = generator.integers(0, 256, (count, *shape), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        if shape[0] == 1:
            header = np.array([2051, count, *shape[1:]], ">i4").tobytes()
            (folder / f"{split}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
            (folder / f"{split}-labels-idx1-ubyte").write_bytes(np.array([2049, count], ">i4").tobytes() + labels.tobytes())
        else:
            rows = np.concatenate([labels[:, None], pixels.reshape(count, -1)], axis=1)
            names = [f"data_batch_{i}.bin" for i in range(1, 6)] if split == "train" else ["test_batch.bin"]
            for name, part in zip(names, np.array_split(rows, len(names)), strict=True):
                (folder / name).write_bytes(part.tobytes())
    return folder


def bare_loop(recipe: Recipe, images: Tensor, labels: Tensor, updates: int) -> float:
    """Seconds of `updates` weight updates in the loop that one writes by hand."""
    torch.manual_seed(recipe.seed)
    model = models.create(recipe.model.name, num_classes=10, in_channels=images.shape[1])
    layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
    model.to(memory_format=layout).train()  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)
    order = torch.randperm(len(images)).split(recipe.batch)
    start = time.perf_counter()
    for update in range(updates):
        samples = order[update % (len(images) // recipe.batch)]
        x = images[samples].float().div_(255).sub_(0.5).div_(0.25).contiguous(memory_format=layout)
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), labels[samples]).backward()
        optimizer.step()
    return time.perf_counter() - start


def trainer(recipe: Recipe, folder: Path) -> float:
    """Seconds of the same number of updates in Convoy's trainer, from its own metrics."""
    with Path(os.devnull).open("w") as nowhere:
        train(recipe, folder, device=torch.device("cpu"), reporter=ConsoleReporter(Console(file=nowhere)))
    lines = [json.loads(line) for line in RunDirectory(folder).metrics.read_text().splitlines()]
    return float([line for line in lines if line["split"] == "train"][-1]["time_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description="The trainer beside a bare PyTorch loop.")
    parser.add_argument("--recipe", choices=list(SHAPES), default="lenet-mnist")
    parser.add_argument("--updates", type=int, default=0, help="updates a round (default: about five seconds)")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    shape = SHAPES[arguments.recipe]
    updates = arguments.updates or (1500 if shape[0] == 1 else 100)
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary) / "data"
        data.mkdir()
        recipe = load_recipe(
            arguments.recipe,
            [
                f"data.path={write_data(data, shape, 20_000)}",
                "data.augment={}",
                f"epochs={updates}ba",
                f"evaluate_every={updates}ba",
                f"checkpoint.every={updates}ba",
            ],
        )
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (20_000, *shape), dtype=torch.uint8, generator=generator)
        labels = torch.arange(20_000) % 10
        ratios = []
        for number in range(arguments.rounds + 1):
            sides = {}
            for side in ("bare", "convoy") if number % 2 else ("convoy", "bare"):
                if side == "bare":
                    sides[side] = bare_loop(recipe, images, labels, updates)
                else:
                    sides[side] = trainer(recipe, Path(temporary) / f"run-{number}")
            if number == 0:
                continue  # warm-up
            ratios.append(sides["convoy"] / sides["bare"])
            speeds = {side: f"{updates * recipe.batch / seconds:,.0f} images/s" for side, seconds in sides.items()}
            print(f"round {number}: bare {speeds['bare']}, convoy {speeds['convoy']}, ratio {ratios[-1]:.3f}", flush=True)
    print(
        f"{arguments.recipe}, batch {recipe.batch}, torch {torch.__version__}, {torch.get_num_threads()} threads: "
        f"trainer / bare loop = {statistics.median(ratios):.3f} "
        f"(median of {len(ratios)}, {min(ratios):.3f} to {max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()
