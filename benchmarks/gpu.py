"""Images a second on one GPU: Convoy on one device beside plain PyTorch, eager and compiled, in turn in one process.

    python benchmarks/gpu.py                                 ResNet-50, 224 px, batches of 256 and 128, bf16
    python benchmarks/gpu.py --trainer                       and `convoy train`, with its loader, on pictures in memory
    python benchmarks/gpu.py --predict --ways eager --batches 8,64,256      and an update as the planner predicts it
    python benchmarks/gpu.py --device cpu --precision fp32 --batches 4 --size 64 --updates 2
    python benchmarks/gpu.py --device cpu --precision fp32,bf16 --ways eager --model resnet18 --size 96 --batches 32

Both sides train the same network with the same optimizer on the same random batch, which stays on the device:
channels_last, autocast, SGD with momentum. One side is the plain network, the other
`convoy.parallelize(model, "serial", example)`; both by `torch.compile` and several precisions are further sides. The
sides take turns for some rounds; a round's ratio is Convoy's images a second over PyTorch's, and the medians count.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import harness, machine
from torch import Tensor, nn

import convoy
from convoy import models
from convoy.comm.ranks import Ranks
from convoy.planner import make_plan, workload_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = {"channels_last": torch.channels_last, "channels_first": torch.contiguous_format}
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=5e-5)
TRAINER_WARM_UP = 8
"""Updates of `convoy train` that are not counted: the first of them compile."""


def main() -> None:
    options = _parser().parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device here: --device cpu tries the script")
    torch.backends.cudnn.benchmark = True
    about = machine.describe() | {"gpu": torch.cuda.get_device_name() if device.type == "cuda" else None}
    print(f"{about['gpu'] or 'no GPU'}; {machine.sentence(about)}", flush=True)
    document: dict[str, Any] = {"machine": about, "options": vars(options), "cases": []}
    for size in options.batches:
        predicted_s = predicted(options, device, size) if options.predict else None
        rates = measure(options, device, size)
        sides = [{"way": w, "precision": p, "library": b, "rates": rates[w, p, b]} for w, p, b in rates]
        trainer_rates = {p: trainer(options, size, p) for p in options.precision} if options.trainer else {}
        document["cases"].append({"batch": size, "predicted_s": predicted_s, "sides": sides, "trainer": trainer_rates})
        print(f"\n{markdown(options, size, rates, predicted_s, trainer_rates)}", flush=True)
        harness.save(options.out, document)


Rates = dict[tuple[str, str, str], list[float]]
"""Images a second of every round, by way, precision and library."""


def measure(options: argparse.Namespace, device: torch.device, size: int) -> Rates:
    """All sides at one batch size."""
    torch.compiler.reset()  # so that the batch size before this one does not make sizes dynamic
    images, labels = batch(options, device, size)
    keys = list(product(options.ways, options.precision, ("PyTorch", "Convoy")))
    sides = {" ".join(key): updater(options, *key, images, labels) for key in keys}
    rates: Rates = {key: [] for key in keys}

    def updates(update: Callable[[], object], number: int) -> None:
        for _ in range(number):
            update()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for name, update in sides.items():
        seconds = harness.seconds_of(partial(updates, update, 4))
        print(f"  {name}: warm after {seconds:.1f} s", file=sys.stderr, flush=True)
    for _, name, update in harness.turns(sides, options.rounds):
        updates(update, 1)
        seconds = harness.seconds_of(partial(updates, update, options.updates))
        way, precision, library = name.split()
        rates[way, precision, library].append(options.updates * size / seconds)
    return rates


def network(options: argparse.Namespace, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = models.create(options.model, num_classes=1000)
    return model.to(device=device, memory_format=FORMATS[options.order]).train()  # type: ignore[call-overload, no-any-return]


def updater(
    options: argparse.Namespace, way: str, precision: str, library: str, images: Tensor, labels: Tensor
) -> Callable[[], None]:
    """A function that does one weight update."""
    model = network(options, images.device)
    if library == "Convoy":
        model = convoy.parallelize(model, "serial", example=images)
    optimizer = SGD(model.parameters())
    called: Any = torch.compile(model) if way == "compiled" else model
    dtype = DTYPES[precision]

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(called(images), labels)
        loss.backward()
        optimizer.step()

    return update


def predicted(options: argparse.Namespace, device: torch.device, size: int) -> float:
    """Seconds of an update on one device, as the planner predicts it from what it profiles now."""
    dtype, images = DTYPES[options.precision[0]], batch(options, device, size)[0]
    precision = None if dtype == torch.float32 else dtype
    workload = workload_of(network(options, device), images, size, precision=precision, optimizer=SGD)
    return make_plan(workload, 1, Ranks()).serial.seconds


def batch(options: argparse.Namespace, device: torch.device, size: int) -> tuple[Tensor, Tensor]:
    """Random images and labels on the device."""
    random = torch.Generator().manual_seed(1)
    images = torch.randn(size, 3, options.size, options.size, generator=random)
    labels = torch.randint(1000, (size,), generator=random)
    return images.to(device=device, memory_format=FORMATS[options.order]), labels.to(device)


def trainer(options: argparse.Namespace, size: int, precision: str) -> list[float]:
    """Images a second of `convoy train` by four updates: loader, transfer, normalization, metrics and all.

    Batch norm is over the global batch, as on the other sides, and nothing is augmented.
    """
    flags = ["--device", options.device, "--batch", str(size), "--precision", precision]
    flags += [f"--{options.order.replace('_', '-')}", *(["--compile"] if "compiled" in options.ways else [])]
    keys: dict[str, Any] = {"data__channels": 3, "data__augment": "{}", "batch_norm": "sync", "log_every": "4ba"}
    with tempfile.TemporaryDirectory() as folder:
        data, updates = Path(folder) / "data", TRAINER_WARM_UP + 4 * options.rounds
        harness.write_images(data, 4 * size, options.size)
        lines, _ = harness.train(options.model, data, Path(folder) / "run", updates, *flags, **keys)
    return [float(line["images_per_s"]) for line in lines if line["step"] > TRAINER_WARM_UP]


def spread(values: Sequence[float], digits: int = 1) -> tuple[str, str]:
    """The median, and from where to where."""
    low, middle, high = (f"{f(values):,.{digits}f}" for f in (min, statistics.median, max))
    return middle, f"{low}–{high}"


def markdown(
    options: argparse.Namespace, size: int, rates: Rates, predicted_s: float | None, trained: dict[str, list[float]]
) -> str:
    """The table of one batch size, and what is to be said below it."""
    rounds = f"{options.rounds} rounds of {options.updates} updates"
    lines = [f"**{options.model}**, {options.size} px, batch {size}, {options.order}, {rounds}", ""]
    columns = ("", "PyTorch, images/s", "min–max", "Convoy, images/s", "min–max", "Convoy / PyTorch", "min–max")
    lines.append(harness.header(*columns))
    for way, precision in product(options.ways, options.precision):
        plain, ours = (rates[way, precision, library] for library in ("PyTorch", "Convoy"))
        ratios = [b / a for a, b in zip(plain, ours, strict=True)]
        lines.append(harness.row(f"{way}, {precision}", *spread(plain), *spread(ours), *spread(ratios, 3)))
    first, way = options.precision[0], options.ways[0]
    for way, precision, library in product(options.ways, options.precision[1:], ("PyTorch", "Convoy")):
        both = zip(rates[way, first, library], rates[way, precision, library], strict=True)
        middle, ends = spread([before / after for before, after in both], 3)
        lines.append(f"\n{library}, {way}: {precision} takes {middle} of the time in {first} ({ends})")
    if predicted_s:
        measured = size / statistics.median(rates[options.ways[0], first, "Convoy"])
        milliseconds = f"predicted {1e3 * predicted_s:.2f} ms, measured {1e3 * measured:.2f} ms"
        lines.append(f"\nAn update, {options.ways[0]}: {milliseconds}, {predicted_s / measured - 1:+.1%}")
    for precision, values in trained.items():
        middle, ends = spread(values)
        lines.append(f"\n`convoy train`, {precision}: {middle} images/s, {ends}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--size", type=int, default=224, help="of the images")
    parser.add_argument("--batches", type=harness.numbers, default=[256, 128])
    parser.add_argument(
        "--precision", type=harness.some(DTYPES), default=["bf16"], help="fp32, bf16 or fp16, or several"
    )
    parser.add_argument("--order", choices=list(FORMATS), default="channels_last", help="memory format")
    parser.add_argument("--ways", type=harness.names, default=["eager", "compiled"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--updates", type=int, default=20, help="timed in a round")
    parser.add_argument("--trainer", action="store_true", help="measure `convoy train` too")
    parser.add_argument("--predict", action="store_true", help="the planner's prediction beside the measurement")
    parser.add_argument("--out", type=Path, help="file for JSON")
    return parser


if __name__ == "__main__":
    main()
