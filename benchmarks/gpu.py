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
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gpu_ranks import MODELS, Update, plain_update, seconds_each, seconds_issued
from measuring import harness
from measuring.cases import Case
from measuring.sides import Arrangement, batch, build
from PIL import Image
from torch import Tensor

import convoy
from convoy.comm.ranks import Ranks
from convoy.planner.planner import Question, make_plan
from convoy.planner.workload import workload_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
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
    orders = ("channels_last", "channels_first")
    parser.add_argument("--order", choices=orders, default=orders[0], help="memory format")
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
                both = f"predicted {1e3 * seconds:.2f} ms, measured {1e3 * measured:.2f} ms"
                report.print(f"\nAn update of Convoy, {options.ways[0]}: {both}, {seconds / measured - 1:+.1%}")
            for source, precision in product(options.trainer, options.precision):
                report.print(f"\n{trainer(options, size, precision, source)}")


def measure(report: harness.Report, options: argparse.Namespace, device: torch.device, size: int) -> float:
    """All sides at one batch size, as a table; seconds of an update of Convoy's first side."""
    torch.compiler.reset()  # so that the batch size before this one does not make sizes dynamic
    case, arrangement = subject(options, size)
    images, labels = (whole.to(device) for whole in batch(case, arrangement))
    keys = list(product(("PyTorch", "Convoy"), options.ways, options.precision))
    keys = [key for key in keys if key[0] == "Convoy" or "recorded" not in key[1]]
    keys += [("PyTorch", "eager", one) for one in options.precision if ("PyTorch", "eager", one) not in keys]
    sides = {key: updater(options, key, images, labels) for key in keys}
    warm_up = WARM_UP if device.type == "cuda" else 4
    for key, update in sides.items():
        harness.say(f"{', '.join(key)}: warm after {seconds_each(update, warm_up, device) * warm_up:.1f} s")
    host = {key: seconds_issued(update, device) for key, update in sides.items()}
    named = {" ".join(key): partial(seconds_each, update, options.updates, device) for key, update in sides.items()}
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


def subject(options: argparse.Namespace, size: int) -> tuple[Case, Arrangement]:
    """What all sides train."""
    name, made = MODELS.get(options.model, (options.model, {}))
    case = Case(options.model, name, options.size, size, num_classes=1000, options=made)
    return case, Arrangement(channels_last=options.order == "channels_last")


def updater(options: argparse.Namespace, side: Side, images: Tensor, labels: Tensor) -> Update:
    """A function that does one weight update."""
    library, way, precision = side
    model = build(*subject(options, len(images))).to(images.device)
    if library == "Convoy":
        model = convoy.parallelize(model, "serial", example=images)
    optimizer, dtype = SGD(model.parameters(), fused=images.is_cuda), DTYPES[precision]
    autocast = torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32)
    called: Any = torch.compile(model) if "compiled" in way else model
    recorded = {"recorded": partial(convoy.recorded, model)} if "recorded" in way else {}
    return plain_update(called, images, labels, autocast, optimizer, **recorded)


def predicted(options: argparse.Namespace, device: torch.device, size: int) -> float:
    """Seconds of an update on one device, as the planner predicts it from what it profiles now."""
    dtype, asked = DTYPES[options.precision[0]], subject(options, size)
    precision = None if dtype == torch.float32 else dtype
    model, images = build(*asked).to(device), batch(*asked)[0].to(device)
    workload = workload_of(model, images, size, precision=precision, optimizer=SGD)
    return make_plan(Question(workload, 1), Ranks()).serial.seconds


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
