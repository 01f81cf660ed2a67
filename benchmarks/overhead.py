"""What the trainer costs beside a bare loop, its reproducible mode beside the fast one, and the checks of loops.

    python benchmarks/overhead.py                                          LeNet on mnist-mini
    python benchmarks/overhead.py --recipe cifar-quick --data CIFAR-10     the CIFAR net on a folder with CIFAR-10
    python benchmarks/overhead.py modes --rounds 2                         fast and reproducible, on two devices
    python benchmarks/overhead.py kernels                                  SGD by one kernel, and by torch's default
    python benchmarks/overhead.py checks --seconds 60 --networks alexnet   what ranks compare in a loop of one's own

The trainer and the bare loop train the same network with the same optimizer, batches and data in memory, in turn in one
process, several rounds; the ratio of a round is the trainer's seconds over the bare loop's (above 1: the trainer is
slower), and the median is the result. The trainer's side is all that goes on between evaluations: loader, order of
samples, microbatches, metrics, TensorBoard, progress. The bare loop takes its batches by a random permutation of a
tensor, and normalizes them as the trainer must. Neither side augments.

`modes`: each run is a `convoy train` of its own, and the runs take turns; images a second come from the run's own
metrics, of every update after the first few. `checks`: two ranks of one core each train the same network twice in turn,
with `checks` and without; the time in the comparisons is counted by itself, as their aim, 0.2 % of the time, is below
what two runs differ by.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from measuring import harness, ranks

from convoy import models
from convoy.comm.joining import join
from convoy.comm.ranks import Ranks
from convoy.data.dataset import DataSet, open_data
from convoy.data.pixels import PixelSource
from convoy.engine.network import network_of
from convoy.engine.parallelize import local_samples, parallelize
from convoy.progress import ConsoleReporter
from convoy.recipe.optim import learning_rate
from convoy.recipe.recipe import Recipe, load_recipe
from convoy.terminal import Console
from convoy.training import Trainer
from convoy.training.optimizer import create_optimizer
from convoy.training.watchdog import Watchdog


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
    with Path(os.devnull).open("w") as nowhere, Watchdog(Ranks(), None) as watchdog:
        reporter = ConsoleReporter(Console(file=nowhere))
        Trainer(recipe, folder, device=torch.device("cpu"), reporter=reporter, watchdog=watchdog).run()
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


def kernels(report: harness.Report, options: argparse.Namespace) -> None:
    """An update of all weights by torch's default kernels, one for each term of the formula, and by the fused one."""
    report.header("", "parameters", "default", "fused", "default / fused")
    for name in ("lenet", "resnet50", "alexnet"):
        sides: dict[str, Callable[[], float]] = {}
        for fused in (False, True):
            model = models.create(name, num_classes=1000)
            optimizer = torch.optim.SGD(model.parameters(), 1e-6, momentum=0.9, weight_decay=1e-4, fused=fused or None)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            sides[str(fused)] = partial(harness.seconds_of, optimizer.step)
        default, single = (1e3 * statistics.median(each) for each in harness.in_turn(sides, 30).values())
        number = sum(parameter.numel() for parameter in model.parameters())
        report.row(name, f"{number:,}", f"{default:.3g} ms", f"{single:.3g} ms", f"{default / single:.2f}")


CASES = {"lenet": ("sample=2", 64, (1, 28)), "resnet18": ("sample=2", 32, (3, 64)), "alexnet": ("owt=2", 32, (3, 224))}
"""Plan, global batch, channels and size of the images."""


def compare(name: str, seconds: float) -> tuple[int, int, float, float, float]:
    """Updates, comparisons, their share of the time, and medians of an update with and without. All ranks call it."""
    join()
    plan, batch, (channels, size) = CASES[name]
    sides = []
    for checked in (True, False):
        torch.manual_seed(0)
        model = models.create(name, num_classes=10, in_channels=channels)
        images = torch.randn(batch, channels, size, size)
        net = parallelize(model, plan, images[: batch // 2], checks=checked)
        mine = local_samples(net, batch)
        sides.append((net, torch.optim.SGD(net.parameters(), lr=1e-3), images[mine], torch.arange(batch)[mine] % 10))
    guard = network_of(sides[0][0]).guard
    assert guard is not None
    spent, look = [], guard.look
    guard.look = lambda inputs: spent.append(harness.seconds_of(lambda: look(inputs)))  # type: ignore[method-assign]
    times: tuple[list[float], list[float]] = ([], [])
    going = torch.ones(1)
    while going:
        for side, (net, optimizer, images, labels) in enumerate(sides):
            began = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()
            times[side].append(time.perf_counter() - began)
        going[0] = sum(times[0]) < seconds
        torch.distributed.broadcast(going, 0)
    compared = [t for t in spent if t > 10 * statistics.median(spent)]
    with_checks, without = (statistics.median(each) for each in times)
    return len(times[0]), len(compared), sum(spent) / sum(times[0]), with_checks, without


def checks(report: harness.Report, options: argparse.Namespace) -> None:
    """What the checks of `convoy.parallelize` take: share of the time, and updates with and without."""
    columns = ("updates", "comparisons", "share of the time", "an update with", "without", "ratio")
    report.header("network", "plan", *columns)
    for name in options.networks:
        updates, compared, share, on, off = ranks.run_ranks(compare, 2, name, options.seconds)[0]
        times = (f"{100 * share:.2f} %", f"{1e3 * on:.2f} ms", f"{1e3 * off:.2f} ms", f"{on / off:.3f}")
        report.row(name, CASES[name][0], updates, compared, *times)


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
    ways = {"loop": beside_a_loop, "modes": modes, "checks": checks, "kernels": kernels}
    parser.add_argument("what", nargs="?", choices=ways, default="loop")
    parser.add_argument("--recipe", default="lenet-mnist")
    parser.add_argument("--data", default="mnist-mini")
    parser.add_argument("--updates", type=int, help="timed in a round (1500; of modes 8)")
    parser.add_argument("--rounds", type=int, help="in which the sides take turns (7; of modes 3)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the side with checks")
    parser.add_argument("--networks", nargs="+", choices=CASES, default=list(CASES), help="with and without checks")
    options = parser.parse_args()
    with harness.report(options.out) as report:
        ways[options.what](report, options)


if __name__ == "__main__":
    main()
