"""What the trainer costs beside a bare PyTorch loop: the same network, optimizer, batches and data in memory.

    python benchmarks/overhead.py                                          LeNet on mnist-mini
    python benchmarks/overhead.py --recipe cifar-quick --data CIFAR-10     the CIFAR net on a folder with CIFAR-10
    python benchmarks/overhead.py --looks                                  a look at what forward reads, before a pass

Both sides run in turn in one process, several rounds; the ratio of a round is the trainer's seconds over the bare
loop's (above 1: the trainer is slower), and the median is the result. The trainer's side is all that goes on between
evaluations: loader, order of samples, microbatches, metrics, TensorBoard, progress. The bare loop takes its batches
by a random permutation of a tensor, and normalizes them as the trainer must. Neither side augments.
"""

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from measuring import harness

from convoy import models
from convoy.data import DataSet, open_data
from convoy.data.sources import PixelSource
from convoy.engine.network import network_of
from convoy.engine.parallelize import parallelize
from convoy.progress import ConsoleReporter
from convoy.terminal import Console
from convoy.training import Recipe, load_recipe, train
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
    return float(harness.lines_of(folder)[-1]["time_s"])


def looks(report: harness.Report) -> None:
    """What it takes to see that nothing has changed of what `forward` reads, and that something has."""
    report.header("", "attributes", "nothing has changed", "something has", "layers and parameters are the same")
    for name, image in (("lenet", (1, 28, 28)), ("resnet50", (3, 64, 64))):
        tensors = [torch.empty(2, *image)]
        seen = network_of(parallelize(models.create(name, num_classes=10), "serial", tensors[0]))._unchanged
        sides: dict[str, Callable[[], object]] = {"state": seen.state, "changed": seen.noted}
        sides["same"] = lambda: seen.check(tensors)  # noqa: B023
        times = {what: [harness.seconds_of(look) for _ in range(200)] for what, look in sides.items()}
        report.row(name, len(seen._names), *(f"{statistics.median(each) * 1e6:,.0f} µs" for each in times.values()))


def main() -> None:
    parser = harness.parser(__doc__, rounds=7)
    parser.add_argument("--recipe", default="lenet-mnist")
    parser.add_argument("--data", default="mnist-mini")
    parser.add_argument("--updates", type=int, default=1500, help="updates a round")
    parser.add_argument("--looks", action="store_true", help="only what a pass looks at before it runs")
    options = parser.parse_args()
    with harness.report(options.out) as report, tempfile.TemporaryDirectory() as temporary:
        if options.looks:
            looks(report)
            return
        end, updates = f"{options.updates}ba", options.updates
        settings = {"data.path": options.data, "data.augment": "{}", "epochs": end}
        settings |= {"evaluate_every": end, "checkpoint.every": end}
        recipe = load_recipe(options.recipe, [f"{key}={value}" for key, value in settings.items()])
        data, runs = open_data(recipe.data), itertools.count()
        sides = {
            "convoy": lambda: trainer(recipe, Path(temporary) / f"run-{next(runs)}"),
            "bare": lambda: bare_loop(recipe, data, updates),
        }
        seconds = harness.in_turn(sides, options.rounds + 1)  # the first warms up
        both = list(zip(seconds["convoy"], seconds["bare"], strict=True))[1:]
        report.header("round", "images/s, bare loop", "trainer", "trainer / bare loop")
        for number, (ours, bare) in enumerate(both, 1):
            rates = (f"{updates * recipe.batch / each:,.0f}" for each in (bare, ours))
            report.row(number, *rates, f"{ours / bare:.3f}", seconds=(ours, bare))
        middle, ends = harness.spread([ours / bare for ours, bare in both], 3)
        what = f"{recipe.model.name} on {data.name}, batch {recipe.batch}, {torch.get_num_threads()} threads"
        report.print(f"\n{what}: trainer / bare loop = {middle} (median of {len(both)}, {ends})")


if __name__ == "__main__":
    main()
