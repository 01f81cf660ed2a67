"""Images a second on one GPU: Convoy on one device beside plain PyTorch, eager and compiled, in turn in one process.

    python benchmarks/gpu.py                                 ResNet-50, 224 px, batches of 256 and 128, bf16
    python benchmarks/gpu.py --trainer                       and `convoy train`, with its loader, on pictures in memory
    python benchmarks/gpu.py --predict --ways eager --batches 8,64,256      and an update as the planner predicts it
    python benchmarks/gpu.py --device cpu --precision fp32 --batches 4 --size 64 --updates 2
    python benchmarks/gpu.py --device cpu --precision fp32,bf16 --ways eager --model resnet18 --size 96 --batches 32

Both sides train the same network with the same optimizer on the same random batch, which stays on the device:
channels_last, autocast, SGD with momentum. One side is `torch.compile(model)`, the other
`torch.compile(convoy.parallelize(model, "serial", example))`; several precisions are further sides. The sides take
turns for some rounds, every other round in reverse; a round's ratio is Convoy's images a second over PyTorch's, and the
medians count.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import machine
from modes import write_images
from torch import Tensor, nn

import convoy
from convoy import models
from convoy.comm.ranks import Ranks
from convoy.planner import make_plan, workload_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = {"channels_last": torch.channels_last, "channels_first": torch.contiguous_format}
TRAINER_WARM_UP = 8
"""Updates of `convoy train` that are not counted: the first of them compile."""


@dataclass
class Side:
    """One way to train."""

    library: str
    way: str
    precision: str  # of the layers
    update: Callable[[], Tensor]  # does one weight update and gives the loss
    first_loss: float = 0.0  # before any update
    warm_up_s: float = 0.0  # seconds of the updates before the rounds, in which it compiles
    rates: list[float] = field(default_factory=list)  # images a second, in every round


def main() -> None:
    arguments = _parser().parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device here: --device cpu tries the script")
    torch.backends.cudnn.benchmark = True
    about = machine.describe() | {"gpu": torch.cuda.get_device_name() if device.type == "cuda" else None}
    print(f"{about['gpu'] or 'no GPU'}; {machine.sentence(about)}", flush=True)
    document: dict[str, Any] = {"machine": about, "options": vars(arguments) | {"out": str(arguments.out)}, "cases": []}
    for size in arguments.batches:
        update_s = predicted(arguments, device, size) if arguments.predict else None
        case = measure(arguments, device, size) | {"predicted_s": update_s}
        document["cases"].append(case)
        if arguments.trainer:
            case["trainer"] = {precision: trainer(arguments, size, precision) for precision in arguments.precision}
        print(f"\n{markdown(arguments, case)}", flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def measure(arguments: argparse.Namespace, device: torch.device, size: int) -> dict[str, Any]:
    """All sides at one batch size."""
    torch.compiler.reset()  # so that the batch size before this one does not make sizes dynamic
    images, labels = batch(arguments, device, size)
    sides = [
        Side(library, way, precision, updater(arguments, library, way, precision, images, labels))
        for way in arguments.ways
        for precision in arguments.precision
        for library in ("PyTorch", "Convoy")
    ]
    for side in sides:
        began = time.perf_counter()
        side.first_loss = side.update().item()
        for _ in range(3):
            side.update()
        _wait(device)
        side.warm_up_s = time.perf_counter() - began
        name = f"{side.way} {side.precision} {side.library}"
        print(f"  {name}: warm after {side.warm_up_s:.1f} s", file=sys.stderr, flush=True)
    for number in range(arguments.rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            side.update()
            _wait(device)
            began = time.perf_counter()
            for _ in range(arguments.updates):
                side.update()
            _wait(device)
            side.rates.append(arguments.updates * size / (time.perf_counter() - began))
    return {"batch": size, "sides": [{k: v for k, v in vars(side).items() if k != "update"} for side in sides]}


def updater(
    arguments: argparse.Namespace, library: str, way: str, precision: str, images: Tensor, labels: Tensor
) -> Callable[[], Tensor]:
    """A function that does one weight update and gives the loss."""
    torch.manual_seed(0)
    model = models.create(arguments.model, num_classes=1000)
    model.to(device=images.device, memory_format=FORMATS[arguments.order]).train()  # type: ignore[call-overload]
    if library == "Convoy":
        model = convoy.parallelize(model, "serial", example=images)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-5)
    network: nn.Module = torch.compile(model) if way == "compiled" else model  # type: ignore[assignment]
    dtype = DTYPES[precision]

    def update() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return update


def predicted(arguments: argparse.Namespace, device: torch.device, size: int) -> float:
    """Seconds of an update on one device, as the planner predicts it from what it profiles now."""
    torch.manual_seed(0)
    model = models.create(arguments.model, num_classes=1000)
    model.to(device=device, memory_format=FORMATS[arguments.order]).train()  # type: ignore[call-overload]
    dtype = DTYPES[arguments.precision[0]]
    workload = workload_of(
        model,
        batch(arguments, device, size)[0],
        size,
        precision=None if dtype == torch.float32 else dtype,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-5),
    )
    return make_plan(workload, 1, Ranks()).serial.seconds


def batch(arguments: argparse.Namespace, device: torch.device, size: int) -> tuple[Tensor, Tensor]:
    """Random images and labels on the device."""
    random = torch.Generator().manual_seed(1)
    images = torch.randn(size, 3, arguments.size, arguments.size, generator=random)
    labels = torch.randint(1000, (size,), generator=random)
    return images.to(device=device, memory_format=FORMATS[arguments.order]), labels.to(device)


def trainer(arguments: argparse.Namespace, size: int, precision: str) -> list[float]:
    """Images a second of every counted update of `convoy train`: loader, transfer, normalization, metrics and all.

    Batch norm is over the global batch, as on the other sides, and nothing is augmented.
    """
    settings = {
        "data.channels": 3,
        "data.augment": "{}",
        "batch_norm": "sync",
        "log_every": "4ba",
        "evaluate_every": "100000ba",
        "checkpoint.every": "100000ba",
    }
    updates = TRAINER_WARM_UP + 4 * arguments.rounds
    with tempfile.TemporaryDirectory() as name:
        data, out = Path(name) / "data", Path(name) / "run"
        write_images(data, size, arguments.size)
        command = [sys.executable, "-m", "convoy", "train", arguments.model, "--data", str(data), "--out", str(out)]
        command += ["--device", arguments.device, "--batch", str(size), "--epochs", f"{updates}ba"]
        command += [f"--{arguments.order.replace('_', '-')}", "--precision", precision]
        command += [*(["--compile"] if "compiled" in arguments.ways else [])]
        command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"convoy train failed: {done.stderr.strip()[-2000:]}", file=sys.stderr)
            return []
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        float(line["images_per_s"]) for line in lines if line["split"] == "train" and line["step"] > TRAINER_WARM_UP
    ]


def markdown(arguments: argparse.Namespace, case: dict[str, Any]) -> str:
    """The table of one batch size."""
    lines = [
        f"**{arguments.model}**, {arguments.size} px, batch {case['batch']}, {arguments.order}, "
        f"{arguments.rounds} rounds of {arguments.updates} updates",
        "",
        "| | PyTorch, images/s | min–max | Convoy, images/s | min–max | Convoy / PyTorch | min–max |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    rates_of = {(s["way"], s["precision"], s["library"]): s["rates"] for s in case["sides"]}
    for way, precision in itertools.product(arguments.ways, arguments.precision):
        plain, ours = (rates_of[way, precision, library] for library in ("PyTorch", "Convoy"))
        ratios = [a / b for a, b in zip(ours, plain, strict=True)]
        cells = [f"{_middle(rates)} | {min(rates):,.1f}–{max(rates):,.1f}" for rates in (plain, ours)]
        spread = f"{min(ratios):.3f}–{max(ratios):.3f}"
        lines.append(f"| {way}, {precision} | {' | '.join(cells)} | {statistics.median(ratios):.3f} | {spread} |")
    first = arguments.precision[0]
    for way, precision, library in itertools.product(arguments.ways, arguments.precision[1:], ("PyTorch", "Convoy")):
        both = zip(rates_of[way, first, library], rates_of[way, precision, library], strict=True)
        parts = [before / after for before, after in both]
        lines += ["", f"{library}, {way}: {precision} takes {statistics.median(parts):.3f} of the time in {first}"]
        lines[-1] += f" ({min(parts):.3f}–{max(parts):.3f})"
    if case.get("predicted_s"):
        ours = case["batch"] / statistics.median(rates_of[arguments.ways[0], first, "Convoy"])
        said = case["predicted_s"]
        lines.append(f"\nAn update, {arguments.ways[0]}: predicted {1e3 * said:.2f} ms, measured {1e3 * ours:.2f} ms, ")
        lines[-1] += f"{said / ours - 1:+.1%}"
    for precision, rates in case.get("trainer", {}).items():
        if rates:
            figures = f"{_middle(rates)} images/s, {min(rates):,.1f}–{max(rates):,.1f}"
            lines.append(f"\n`convoy train`, {precision}: {figures}")
    return "\n".join(lines)


def _middle(rates: list[float]) -> str:
    return f"{statistics.median(rates):,.1f}"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _precisions(text: str) -> list[str]:
    if not set(text.split(",")) <= set(DTYPES):
        raise argparse.ArgumentTypeError(f"{text} is none, or several, of {', '.join(DTYPES)}")
    return text.split(",")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--size", type=int, default=224, help="of the images")
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[256, 128])
    parser.add_argument("--precision", type=_precisions, default=["bf16"], help="fp32, bf16 or fp16, or several")
    parser.add_argument("--order", choices=list(FORMATS), default="channels_last", help="memory format")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=["eager", "compiled"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--updates", type=int, default=20, help="timed in a round")
    parser.add_argument("--trainer", action="store_true", help="measure `convoy train` too")
    parser.add_argument("--predict", action="store_true", help="the planner's prediction beside the measurement")
    parser.add_argument("--out", type=Path, help="file for JSON")
    return parser


if __name__ == "__main__":
    main()
