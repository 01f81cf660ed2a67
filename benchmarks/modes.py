"""The trainer's modes beside each other: fast, reproducible, compiled. The same updates of ResNet-18 on random images.

    python benchmarks/modes.py                                   fast and reproducible on two devices
    python benchmarks/modes.py --modes fast,compiled

Each run is a `convoy train` of its own, and the runs take turns for some rounds. Images a second come from the run's
own metrics, of every update after the first few, and the median over the rounds counts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from measuring import machine, ranks

MODES = {"fast": [], "reproducible": ["--reproducible"], "compiled": ["--compile"]}
SIZE = 64
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default="fast,reproducible", help=f"of {', '.join(MODES)}; ratios are to the first")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--updates", type=int, default=8, help="in a round, after those that are not counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for JSON")
    arguments = parser.parse_args()
    modes = arguments.modes.split(",")
    unknown = set(modes) - set(MODES)
    if unknown:
        parser.error(f"there is no mode {min(unknown)}: there are {', '.join(MODES)}")
    about = machine.describe()
    print(machine.sentence(about))
    found: dict[str, list[float]] = {mode: [] for mode in modes}
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "data"
        write_images(data, arguments.batch)
        for number in range(arguments.rounds):
            for mode in modes if number % 2 == 0 else reversed(modes):
                found[mode].append(images_per_second(arguments, mode, data, Path(name) / f"{mode}-{number}"))
                print(f"  round {number + 1}: {mode} {found[mode][-1]:,.1f} images/s", file=sys.stderr, flush=True)
    first = statistics.median(found[modes[0]])
    print(f"\n{arguments.model}, {SIZE} px, global batch {arguments.batch}, {arguments.devices} devices\n")
    print(f"| mode | images/s | time to {modes[0]}'s | min–max |\n| --- | --- | --- | --- |")
    for mode, rates in found.items():
        middle = statistics.median(rates)
        print(f"| {mode} | {middle:,.1f} | {first / middle:.3f} | {min(rates):,.1f}–{max(rates):,.1f} |")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"machine": about, "images_per_s": found}, indent=1) + "\n", "utf-8")


def images_per_second(arguments: argparse.Namespace, mode: str, data: Path, out: Path) -> float:
    """The median over the counted updates of one run."""
    settings = {
        "threads": 1,
        "data.channels": 3,
        "log_every": "1ba",
        "evaluate_every": "100000ba",
        "checkpoint.every": "100000ba",
    }
    command = [sys.executable, "-m", "convoy", "train", arguments.model, "--data", str(data), "--out", str(out)]
    command += ["--devices", str(arguments.devices), "--cores-per-device", "1", "--batch", str(arguments.batch)]
    command += [
        "--epochs",
        f"{WARM_UP + arguments.updates}ba",
        "--channels-last",
        "--workers",
        "0",
        "--set",
        "threads=1",
    ]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    done = subprocess.run(
        [*command, *MODES[mode]],
        env={**os.environ, **ranks.ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{mode} failed: {done.stderr.strip()}")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rates = [float(line["images_per_s"]) for line in lines if line["split"] == "train"]
    return statistics.median(rates[WARM_UP:])


def write_images(folder: Path, batch: int, size: int = SIZE) -> None:
    """Random grey pictures as files of MNIST's kind, which are kept in memory and need no decoding."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for split, number in (("train", 4 * batch), ("t10k", 8)):
        pixels = random.integers(256, size=(number, size, size), dtype=np.uint8)
        header = b"".join(part.to_bytes(4, "big") for part in (0x803, number, size, size))
        (folder / f"{split}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        labels = random.integers(10, size=number, dtype=np.uint8)
        header = b"".join(part.to_bytes(4, "big") for part in (0x801, number))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


if __name__ == "__main__":
    main()
