"""The trainer's modes beside each other: fast, reproducible, compiled. The same updates of ResNet-18 on random images.

    python benchmarks/modes.py                                   fast and reproducible on two devices
    python benchmarks/modes.py --modes fast,compiled

Each run is a `convoy train` of its own, and the runs take turns for some rounds. Images a second come from the run's
own metrics, of every update after the first few, and the median over the rounds counts.
"""

import statistics
import sys
import tempfile
from pathlib import Path

from measuring import harness, ranks

MODES = {"fast": [], "reproducible": ["--reproducible"], "compiled": ["--compile"]}
SIZE, WARM_UP = 64, 3


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--modes", type=harness.some(MODES), default=["fast", "reproducible"], help="ratios: to the first"
    )
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--updates", type=int, default=8, help="in a round, after those that are not counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for JSON")
    options = parser.parse_args()
    about, rates = harness.heading(), {mode: list[float]() for mode in options.modes}
    common = ["--devices", str(options.devices), "--cores-per-device", "1", "--batch", str(options.batch)]
    common += ["--channels-last", "--workers", "0"]
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "data"
        harness.write_images(data, 4 * options.batch, SIZE)
        for number, mode, flags in harness.turns({mode: MODES[mode] for mode in options.modes}, options.rounds):
            out, updates, keys = Path(name) / f"{mode}-{number}", WARM_UP + options.updates, {"data__channels": 3}
            flags = [*common, *flags, "--set", "threads=1"]
            lines, _ = harness.train(options.model, data, out, updates, *flags, environment=ranks.ENVIRONMENT, **keys)
            rates[mode].append(statistics.median(float(line["images_per_s"]) for line in lines[WARM_UP:]))
            print(f"  round {number + 1}: {mode} {rates[mode][-1]:,.1f} images/s", file=sys.stderr, flush=True)
    print(f"{options.model}, {SIZE} px, global batch {options.batch}, {options.devices} devices\n")
    print(harness.header("mode", "images/s", f"time to {options.modes[0]}'s", "min–max"))
    first = statistics.median(rates[options.modes[0]])
    for mode, values in rates.items():
        middle = statistics.median(values)
        ends = f"{min(values):,.1f}–{max(values):,.1f}"
        harness.show(mode, f"{middle:,.1f}", f"{first / middle:.3f}", ends)
    harness.save(options.out, {"machine": about, "images_per_s": rates})


if __name__ == "__main__":
    main()
