"""Images a second on one GPU: Convoy on one device beside plain PyTorch, sides in turn in one process.

    python benchmarks/gpu.py                                 ResNet-50, 224 px, batches of 256 and 128, bf16
    python benchmarks/gpu.py --ways eager,recorded --batches 256,32,8 --trainer raw
    python benchmarks/gpu.py --predict --ways eager --batches 8,64,256      and an update as the planner predicts it
    python benchmarks/gpu.py --device cpu --precision fp32 --batches 4 --size 64 --updates 2
    python benchmarks/gpu.py --device cpu --precision fp32,bf16 --ways eager --model resnet18 --size 96 --batches 32

Both sides train the same network with the same optimizer on the same random batch, which stays on the device:
channels_last, autocast, SGD with momentum. One side is the plain network, the other
`convoy.parallelize(model, "serial", example)`, which is also recorded as a CUDA graph (`convoy.recorded`); both by
`torch.compile` and several precisions are further sides. The sides take turns for some rounds; a round's ratio is a
side's images a second over those of PyTorch, compiled if the side is, and the medians count. The host's part is what it
takes to issue an update with nothing queued before.

`--trainer` also runs `convoy train` on pictures in memory, or of a raw pack of made-up photographs.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_ranks import MODELS
from measuring import harness
from PIL import Image
from torch import Tensor, nn

import convoy
from convoy import models
from convoy.comm.ranks import Ranks
from convoy.planner.planner import Question, make_plan
from convoy.planner.workload import workload_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = {"channels_last": torch.channels_last, "channels_first": torch.contiguous_format}
WAYS = ("eager", "compiled", "recorded", "compiled+recorded")
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=5e-5)
WARM_UP = 12
"""Updates before any is timed: recorded ones have proved themselves by then."""

Side = tuple[str, str, str]
"""Library, way and precision."""


def main() -> None:
    parser = harness.parser(__doc__, rounds=7)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--size", type=int, default=224, help="of the images")
    parser.add_argument("--batches", type=harness.numbers, default=[256, 128])
    harness.choice(parser, "--precision", DTYPES, ["bf16"])
    harness.choice(parser, "--ways", WAYS, ["eager", "compiled"])
    harness.choice(parser, "--trainer", ("memory", "raw"), [])
    parser.add_argument("--order", choices=list(FORMATS), default="channels_last", help="memory format")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--updates", type=int, default=20, help="timed in a round")
    parser.add_argument("--predict", action="store_true", help="the planner's prediction beside the measurement")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device here: --device cpu tries the program")
    torch.backends.cudnn.benchmark = True
    with harness.report(options.out) as report:
        report.machine["gpu"] = torch.cuda.get_device_name() if device.type == "cuda" else None
        report.print(f"{report.machine['gpu'] or 'no GPU'}")
        for size in options.batches:
            measured = measure(report, options, device, size)
            if options.predict:
                seconds = predicted(options, device, size)
                error = (
                    f"predicted {1e3 * seconds:.2f} ms, measured {1e3 * measured:.2f} ms, {seconds / measured - 1:+.1%}"
                )
                report.print(f"\nAn update of Convoy, {options.ways[0]}: {error}")
            for source, precision in product(options.trainer, options.precision):
                report.print(f"\n{trainer(options, size, precision, source)}")


def measure(report: harness.Report, options: argparse.Namespace, device: torch.device, size: int) -> float:
    """All sides at one batch size, as a table; seconds of an update of Convoy's first side."""
    torch.compiler.reset()  # so that the batch size before this one does not make sizes dynamic
    images, labels = batch(options, device, size)
    keys = list(product(("PyTorch", "Convoy"), options.ways, options.precision))
    keys = [key for key in keys if key[0] == "Convoy" or "recorded" not in key[1]]
    keys += [("PyTorch", "eager", one) for one in options.precision if ("PyTorch", "eager", one) not in keys]
    sides = {key: updater(options, key, images, labels) for key in keys}

    def several(update: Callable[[], None], number: int) -> float:
        def run() -> None:
            for _ in range(number):
                update()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return harness.seconds_of(run) / number

    warm_up = WARM_UP if device.type == "cuda" else 4
    for key, update in sides.items():
        harness.say(f"{', '.join(key)}: warm after {several(update, warm_up) * warm_up:.1f} s")
    host = {key: statistics.median(_issued(several, update) for _ in range(5)) for key, update in sides.items()}
    named = {" ".join(key): partial(several, update, options.updates) for key, update in sides.items()}
    seconds = dict(zip(sides, harness.in_turn(named, options.rounds).values(), strict=True))
    report.print(f"\n**{options.model}**, {options.size} px, batch {size}, {options.order}\n")
    first = options.precision[0]
    columns = ("images/s", "min–max", "beside PyTorch", "min–max", f"of the time in {first}", "min–max")
    report.header("", *columns, "an update, ms", "the host's part, ms")
    for key in keys:
        library, way, precision = key
        rates = harness.spread([size / each for each in seconds[key]])
        plain = seconds["PyTorch", "compiled" if "compiled" in way else "eager", precision]
        beside = harness.spread([a / b for a, b in zip(plain, seconds[key], strict=True)], 3)
        time = harness.spread([b / a for a, b in zip(seconds[library, way, first], seconds[key], strict=True)], 3)
        milliseconds = f"{1e3 * statistics.median(seconds[key]):.2f}", f"{1e3 * host[key]:.2f}"
        report.row(", ".join(key), *rates, *beside, *time, *milliseconds, batch=size, side=key, seconds=seconds[key])
    return statistics.median(seconds["Convoy", options.ways[0], first])


def _issued(several: Callable[[Callable[[], None], int], float], update: Callable[[], None]) -> float:
    """Seconds until the host has issued an update; `several` waits for it afterwards."""
    seconds = harness.seconds_of(update)
    several(lambda: None, 1)
    return seconds


def network(options: argparse.Namespace, device: torch.device) -> nn.Module:
    """The same on all sides."""
    torch.manual_seed(0)
    made = MODELS.get(options.model, partial(models.create, options.model, num_classes=1000))
    return made().to(device=device, memory_format=FORMATS[options.order]).train()  # type: ignore[call-overload, no-any-return]


def updater(options: argparse.Namespace, side: Side, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """A function that does one weight update."""
    library, way, precision = side
    model = network(options, images.device)
    if library == "Convoy":
        model = convoy.parallelize(model, "serial", example=images)
    optimizer, dtype = SGD(model.parameters(), fused=images.is_cuda), DTYPES[precision]
    called: Any = torch.compile(model) if "compiled" in way else model

    def passes(images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(called(images), labels)
        loss.backward()
        return loss

    step = convoy.recorded(model, passes) if "recorded" in way else passes

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        step(images, labels)
        optimizer.step()

    return update


def predicted(options: argparse.Namespace, device: torch.device, size: int) -> float:
    """Seconds of an update on one device, as the planner predicts it from what it profiles now."""
    dtype, images = DTYPES[options.precision[0]], batch(options, device, size)[0]
    precision = None if dtype == torch.float32 else dtype
    workload = workload_of(network(options, device), images, size, precision=precision, optimizer=SGD)
    return make_plan(Question(workload, 1), Ranks()).serial.seconds


def batch(options: argparse.Namespace, device: torch.device, size: int) -> tuple[Tensor, Tensor]:
    """Random images and labels on the device."""
    random = torch.Generator().manual_seed(1)
    images = torch.randn(size, 3, options.size, options.size, generator=random)
    labels = torch.randint(1000, (size,), generator=random)
    return images.to(device=device, memory_format=FORMATS[options.order]), labels.to(device)


def trainer(options: argparse.Namespace, size: int, precision: str, source: str) -> str:
    """Images a second of `convoy train` by four updates: loader, transfer, normalization, metrics and all.

    On pictures in memory batch norm is over the global batch, as on the other sides, and nothing is augmented.
    """
    flags = ["--device", options.device, "--batch", str(size), "--precision", precision, "--set", "log_every=4ba"]
    flags += [f"--{options.order.replace('_', '-')}", *(["--compile"] if "compiled" in options.ways else [])]
    with tempfile.TemporaryDirectory() as folder:
        data, updates = Path(folder) / "data", WARM_UP + 4 * options.rounds
        if source == "memory":
            harness.write_images(data, 4 * size, options.size)
            flags += ["--set", "data.channels=3", "--set", "data.augment={}", "--set", "batch_norm=sync"]
        else:
            photographs(Path(folder) / "photographs", max(8 * size, 24))
            side = str(round(options.size * 8 / 7))
            harness.run_convoy("data", "pack", f"{folder}/photographs", str(data), "--short-side", side, "--raw")
            flags += ["--set", f"data.image_size={options.size}"]
        lines = harness.train(options.model, data, Path(folder) / "run", updates, *flags)
    steady = [line for line in lines if line["step"] > WARM_UP]
    middle, ends = harness.spread([float(line["images_per_s"]) for line in steady])
    waits = statistics.fmean(line.get("data_wait_s") or 0.0 for line in steady)
    return f"`convoy train`, {source}, {precision}: {middle} images/s, {ends}; a line of the log waits {waits:.3f} s"


def photographs(folder: Path, number: int) -> None:
    """JPEG files of noise in four classes, as large as photographs of the web."""
    for i in range(number):
        place = folder / f"class{i % 4}"
        place.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((500, 375), 60).convert("RGB").save(place / f"{i}.jpg")


if __name__ == "__main__":
    main()
