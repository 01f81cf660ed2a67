"""What the trainer costs beside a bare PyTorch loop: the same network, optimizer, batches and data in memory.

    python benchmarks/overhead.py                                          LeNet on mnist-mini
    python benchmarks/overhead.py --recipe cifar-quick --data CIFAR-10     the CIFAR net on a folder with CIFAR-10
    python benchmarks/overhead.py --looks                                  a look at what forward reads, before a pass

Both sides run in turn in one process, several rounds; the ratio of a round is the trainer's seconds over the bare
loop's (above 1: the trainer is slower), and the median is the result. The trainer's side is all that goes on between
evaluations: loader, order of samples, microbatches, metrics, TensorBoard, progress. The bare loop takes its batches
by a random permutation of a tensor, and normalizes them as the trainer must. Neither side augments.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from convoy import models
from convoy.data import DataSet, open_data
from convoy.data.sources import PixelSource
from convoy.engine.network import network_of
from convoy.engine.parallelize import parallelize
from convoy.progress import ConsoleReporter
from convoy.terminal import Console
from convoy.training import Recipe, RunDirectory, load_recipe, train
from convoy.training.optimizers import create_optimizer, learning_rate


def bare_loop(recipe: Recipe, data: DataSet, updates: int) -> float:
    """Seconds of `updates` weight updates in the loop that one writes by hand."""
    assert isinstance(data.train, PixelSource), "this benchmark needs pictures in memory"
    # a copy: pictures of one channel count as contiguous as they are, but convolutions take their strides for channels
    # last, and the rest of the network would follow
    images = torch.from_numpy(data.train.pixels).permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)
    labels = torch.from_numpy(data.train.labels)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (data.mean, data.std))
    torch.manual_seed(recipe.seed)
    model = models.create(recipe.model.name, num_classes=len(data.classes), in_channels=data.channels)
    layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
    model.to(memory_format=layout).train()  # type: ignore[call-overload]
    optimizer = create_optimizer(model, recipe.optimizer, learning_rate(recipe.optimizer, recipe.batch))
    per_epoch = len(images) // recipe.batch
    start = time.perf_counter()
    for update in range(updates):
        if update % per_epoch == 0:
            order = torch.randperm(len(images)).split(recipe.batch)
        samples = order[update % per_epoch]
        x = images[samples].float().div_(255).sub_(mean).div_(std).contiguous(memory_format=layout)
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), labels[samples]).backward()
        optimizer.step()
    return time.perf_counter() - start


def trainer(recipe: Recipe, folder: Path) -> float:
    """Seconds of the same number of updates in Convoy's trainer, by its own metrics."""
    with Path(os.devnull).open("w") as nowhere:
        train(recipe, folder, device=torch.device("cpu"), reporter=ConsoleReporter(Console(file=nowhere)))
    lines = [json.loads(line) for line in RunDirectory(folder).metrics.read_text().splitlines()]
    return float([line for line in lines if line["split"] == "train"][-1]["time_s"])


def look_at(name: str, image: tuple[int, int, int]) -> None:
    """Print what it takes to see that nothing has changed of what `forward` reads, and that something has."""
    network = network_of(parallelize(models.create(name, num_classes=10), "serial", torch.empty(2, *image)))
    tensors, seconds = [torch.empty(2, *image)], dict[str, list[float]]()
    seen = network._unchanged
    looks: dict[str, Callable[[], object]] = {"state": seen.state, "changed": seen.noted}
    looks["layers and parameters"] = lambda: seen.check(tensors)
    for _ in range(200):
        for what, look in looks.items():
            start = time.perf_counter()
            look()
            seconds.setdefault(what, []).append(time.perf_counter() - start)
    found = ", ".join(f"{what} {statistics.median(each) * 1e6:,.0f} µs" for what, each in seconds.items())
    print(f"{name}: {len(seen._names):,} attributes; {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description="The trainer beside a bare PyTorch loop.")
    parser.add_argument("--recipe", default="lenet-mnist")
    parser.add_argument("--data", default="mnist-mini")
    parser.add_argument("--updates", type=int, default=1500, help="updates a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--looks", action="store_true", help="only what a pass looks at before it runs")
    arguments = parser.parse_args()
    if arguments.looks:
        for name, image in (("lenet", (1, 28, 28)), ("resnet50", (3, 64, 64))):
            look_at(name, image)
        return
    beyond = f"{arguments.updates}ba"
    settings = {"data.path": arguments.data, "data.augment": "{}", "epochs": beyond}
    settings |= {"evaluate_every": beyond, "checkpoint.every": beyond}
    recipe = load_recipe(arguments.recipe, [f"{key}={value}" for key, value in settings.items()])
    data = open_data(recipe.data)
    ratios = []
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(arguments.rounds + 1):
            seconds = {}
            for side in ("bare", "convoy") if number % 2 else ("convoy", "bare"):
                if side == "bare":
                    seconds[side] = bare_loop(recipe, data, arguments.updates)
                else:
                    seconds[side] = trainer(recipe, Path(temporary) / f"run-{number}")
            if number == 0:
                continue  # warm-up
            ratios.append(seconds["convoy"] / seconds["bare"])
            bare, convoy = (f"{arguments.updates * recipe.batch / seconds[side]:,.0f}" for side in ("bare", "convoy"))
            print(f"round {number}: images/s bare {bare}, convoy {convoy}; ratio {ratios[-1]:.3f}", flush=True)
    print(
        f"{recipe.model.name} on {data.name}, batch {recipe.batch}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads: trainer / bare loop = {statistics.median(ratios):.3f} "
        f"(median of {len(ratios)}, {min(ratios):.3f} to {max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()
