"""The trainer's fast and its reproducible mode beside each other: the same updates of ResNet-18 on random images.

    python benchmarks/modes.py --rounds 2

Each run is a `convoy train` of its own on two devices, and the runs take turns for some rounds. Images a second come
from the run's own metrics, of every update after the first few, and the median over the rounds counts.
"""

import statistics
import tempfile
from pathlib import Path

from measuring import harness, ranks

MODES = {"fast": [], "reproducible": ["--reproducible"]}
MODEL, SIZE, BATCH, WARM_UP = "resnet18", 64, 128, 3


def main() -> None:
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("--updates", type=int, default=8, help="in a round, after those that are not counted")
    options = parser.parse_args()
    rates: dict[str, list[float]] = {mode: [] for mode in MODES}
    common = ["--devices", "2", "--cores-per-device", "1", "--batch", str(BATCH), "--channels-last", "--workers", "0"]
    common += ["--set", "threads=1", "--set", "data.channels=3", "--set", "log_every=1ba"]
    with harness.report(options.out) as report, tempfile.TemporaryDirectory() as name:
        data = Path(name) / "data"
        harness.write_images(data, 4 * BATCH, SIZE)
        for number, mode, flags in harness.turns(MODES, options.rounds):
            out, updates = Path(name) / f"{mode}-{number}", WARM_UP + options.updates
            lines = harness.train(MODEL, data, out, updates, *common, *flags, environment=ranks.ENVIRONMENT)
            rates[mode].append(statistics.median(float(line["images_per_s"]) for line in lines[WARM_UP:]))
            harness.say(f"round {number + 1}: {mode} {rates[mode][-1]:,.1f} images/s")
        report.print(f"{MODEL}, {SIZE} px, global batch {BATCH}, two devices\n")
        report.header("mode", "images/s", "time to that of fast mode", "min–max")
        for mode, values in rates.items():
            middle, ends = harness.spread(values)
            ratio = statistics.median(rates["fast"]) / statistics.median(values)
            report.row(mode, middle, f"{ratio:.3f}", ends, mode=mode, images_per_s=values)


if __name__ == "__main__":
    main()
