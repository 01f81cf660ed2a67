"""What the trainer costs beside a bare loop, and its reproducible mode beside the fast one.

    python benchmarks/overhead.py                                          LeNet on mnist-mini
    python benchmarks/overhead.py --recipe cifar-quick --data CIFAR-10     the CIFAR net on a folder with CIFAR-10
    python benchmarks/overhead.py modes --rounds 2                         fast and reproducible, on two devices

The trainer and the bare loop train the same network with the same optimizer, batches and data in memory, in turn in one
process, several rounds; the ratio of a round is the trainer's seconds over the bare loop's (above 1: the trainer is
slower), and the median is the result. The trainer's side is all that goes on between evaluations: loader, order of
samples, microbatches, metrics, TensorBoard, progress. The bare loop takes its batches by a random permutation of a
tensor, and normalizes them as the trainer must. Neither side augments.

`modes`: each run is a `convoy train` of its own, and the runs take turns; images a second come from the run's own
metrics, of every update after the first few.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from measuring import harness, ranks

from convoy import models
from convoy.data import DataSet, open_data
from convoy.data.sources import PixelSource
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


MODES = {"fast": [], "reproducible": ["--reproducible"]}
MODEL, SIZE, BATCH, WARM_UP = "resnet18", 64, 128, 3


def modes(report: harness.Report, options: argparse.Namespace) -> None:
    """ResNet-18 on random images on two devices, in both modes."""
    rates: dict[str, list[float]] = {mode: [] for mode in MODES}
    common = ["--devices", "2", "--cores-per-device", "1", "--batch", str(BATCH), "--channels-last", "--workers", "0"]
    common += ["--set", "threads=1", "--set", "data.channels=3", "--set", "log_every=1ba"]
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "data"
        harness.write_images(data, 4 * BATCH, SIZE)
        for number, mode, flags in harness.turns(MODES, options.rounds or 3):
            out, updates = Path(name) / f"{mode}-{number}", WARM_UP + (options.updates or 8)
            lines = harness.train(MODEL, data, out, updates, *common, *flags, environment=ranks.ENVIRONMENT)
            rates[mode].append(statistics.median(float(line["images_per_s"]) for line in lines[WARM_UP:]))
            harness.say(f"round {number + 1}: {mode} {rates[mode][-1]:,.1f} images/s")
    report.print(f"{MODEL}, {SIZE} px, global batch {BATCH}, two devices\n")
    report.header("mode", "images/s", "time to that of fast mode", "min–max")
    for mode, values in rates.items():
        middle, ends = harness.spread(values)
        ratio = statistics.median(rates["fast"]) / statistics.median(values)
        report.row(mode, middle, f"{ratio:.3f}", ends, mode=mode, images_per_s=values)


def beside_a_loop(report: harness.Report, options: argparse.Namespace) -> None:
    """The trainer and the bare loop in turn."""
    updates = options.updates or 1500
    settings = {"data.path": options.data, "data.augment": "{}"}
    settings |= dict.fromkeys(("epochs", "evaluate_every", "checkpoint.every"), f"{updates}ba")
    recipe = load_recipe(options.recipe, [f"{key}={value}" for key, value in settings.items()])
    data, runs = open_data(recipe.data), itertools.count()
    with tempfile.TemporaryDirectory() as temporary:
        sides = {
            "convoy": lambda: trainer(recipe, Path(temporary) / f"run-{next(runs)}"),
            "bare": lambda: bare_loop(recipe, data, updates),
        }
        seconds = harness.in_turn(sides, (options.rounds or 7) + 1)  # the first warms up
    both = list(zip(seconds["convoy"], seconds["bare"], strict=True))[1:]
    report.header("round", "images/s, bare loop", "trainer", "trainer / bare loop")
    for number, (ours, bare) in enumerate(both, 1):
        rates = (f"{updates * recipe.batch / each:,.0f}" for each in (bare, ours))
        report.row(number, *rates, f"{ours / bare:.3f}", seconds=(ours, bare))
    middle, ends = harness.spread([ours / bare for ours, bare in both], 3)
    what = f"{recipe.model.name} on {data.name}, batch {recipe.batch}, {torch.get_num_threads()} threads"
    report.print(f"\n{what}: trainer / bare loop = {middle} (median of {len(both)}, {ends})")


def main() -> None:
    parser = harness.parser(__doc__)
    ways = {"loop": beside_a_loop, "modes": modes}
    parser.add_argument("what", nargs="?", choices=ways, default="loop")
    parser.add_argument("--recipe", default="lenet-mnist")
    parser.add_argument("--data", default="mnist-mini")
    parser.add_argument("--updates", type=int, help="timed in a round (1500; of modes 8)")
    parser.add_argument("--rounds", type=int, help="in which the sides take turns (7; of modes 3)")
    options = parser.parse_args()
    with harness.report(options.out) as report:
        ways[options.what](report, options)


if __name__ == "__main__":
    main()
