"""Stages beside other plans and beside peers, on emulated devices: seconds of an update. As root.

    python benchmarks/stages.py --cases resnet50 --devices 2 --link 200mbit
    python benchmarks/stages.py --cases unet --speeds 1,0.5 --link 1gbit       unequal devices
    python benchmarks/stages.py exact                                          how far from one device, in float64

Every device is in a host of its own and has one thread; two have a core each, four half a core. One device is the first
of them by itself, in plain PyTorch. The planner predicts before anything is measured; trials, which do not count,
choose for each side how it goes through the batch; then all sides take turns for some rounds, each measurement of fresh
processes, and the median over the rounds counts. What stages take of memory: `memory.py stages`.
"""

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from measuring import harness
from measuring.cases import STAGED, Case
from measuring.ranks import bits_per_second, run_ranks
from measuring.runs import SERIAL, Results, Runs
from measuring.sides import AUTO, Arrangement, Predicted, Side, Timing, predict, train

from convoy.bench.emulated import Cluster, ClusterDevice, EmulatedDevice, emulate

EXACT = Path(__file__).parents[1] / "tests" / "engine" / "test_exact.py"
SPEEDS = {2: 1.0, 4: 0.5}
"""The share of a core of each device, by their number: two cores suffice."""
WARM_UP = 4
"""Updates that do not count: memory still grows in the first three, in which Convoy also compares the ranks."""
SLOW = 3.0
"""Seconds of an update from which one is enough."""


def main() -> None:
    parser = harness.parser(__doc__, rounds=3)
    harness.choice(parser, "--cases", STAGED, STAGED)
    harness.choice(parser, "--peers", ("torch",), ("torch",))
    parser.add_argument("--devices", type=int, choices=list(SPEEDS), default=2)
    some = partial(harness.numbers, kind=float)
    parser.add_argument("--speeds", type=some, help="of the devices in place of equal ones, e.g. 1,0.5")
    parser.add_argument("--link", metavar="RATE", default="1gbit", help="of every host, e.g. 200mbit")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which a side is given up")
    parser.add_argument("what", nargs="?", choices=("times", "exact"), default="times")
    options = parser.parse_args()
    if options.what == "exact":  # a table of the suite, with the bound that each network keeps to
        raise SystemExit(pytest.main(["-v", "-m", "matrix", "-k", "stage", str(EXACT)]))
    speeds = options.speeds or [SPEEDS[options.devices]] * options.devices
    devices = tuple(ClusterDevice(speed, f"host{number}") for number, speed in enumerate(speeds))
    cluster = Cluster(devices, options.link)
    with harness.report(options.out) as report, tempfile.TemporaryDirectory() as profiles, emulate(cluster) as places:
        rate = run_ranks(bits_per_second, 2, 2**23, places=places[:2])[0]
        report.machine.update({"cluster": str(cluster), "link_bits_per_second": rate})
        report.print(f"Emulated: {cluster}.\nAn all-reduce of two moved {rate / 1e9:.3f} Gbit/s each way.")
        for name in options.cases:
            measured(STAGED[name], speeds, places, Path(profiles), options).show(report)


def measured(
    case: Case, speeds: Sequence[float], places: Sequence[EmulatedDevice], profiles: Path, options: argparse.Namespace
) -> Results:
    """Predictions, trials, then rounds."""
    num, slow = len(places), set[str]()

    def measure(side: Side, number: int, trial: bool) -> list[Timing]:
        on = places[:1] if side.kind == "serial" else places
        updates = 1 if trial else case.updates
        warm_up = 1 if any(side.label.startswith(label) for label in slow) else WARM_UP
        asked = (side, replace(case, updates=updates), warm_up)
        return run_ranks(train, len(on), *asked, places=on, seconds=options.timeout)

    runs = Runs(case, options.rounds, places, options.timeout, measure)
    runs.results.share = speeds[0]
    one = runs.one_device(keeps=True)
    asked = (case, (f"sample={num}", *case.divided.get(num, ())), one, profiles)
    serial, predictions = run_ranks(predict, num, *asked, places=places, seconds=5 * options.timeout)[0]
    expected = {f"Convoy {each.name}": each for each in predictions}
    slow.update(label for label, each in expected.items() if each.seconds > SLOW)

    def predicted(side: Side) -> float | None:
        if side.label == SERIAL:
            return float(serial)
        return expected[side.label].of(side) if side.label in expected else None

    local = [round(case.batch * speed / sum(speeds)) for speed in speeds]
    local[0] += case.batch - sum(local)
    bound = Side("no exchange", "apart", one.for_batch(max(local)), samples=tuple(local), keeps=True)
    sides = [Side(SERIAL, "serial", one, keeps=True), bound, *_convoy(runs, predictions, one)]
    return runs.take_turns([*sides, *(_torch(runs) if options.peers else ())], predicted)


def _convoy(runs: Runs, predictions: Sequence[Predicted], one: Arrangement) -> list[Side]:
    """A side for each plan, arranged as is best for it. A plan that comes twice is measured once."""
    sides, known = list[Side](), set[str]()
    case, way = runs.case, Arrangement(one.channels_last)
    for each in sorted(predictions, key=lambda each: each.name.startswith(AUTO)):
        if str(each.plan) in known:
            continue
        known.add(str(each.plan))
        label = f"Convoy {each.name}"
        made = partial(Side, label, "convoy", plan=each.plan, keeps=True)
        if each.plan.mesh.stage_axis is None:
            ways = dict.fromkeys([one.for_batch(case.batch // each.plan.parts), way])
            best = runs.best([made(arrangement=tried) for tried in ways])
        else:
            numbers = sorted({*case.parts, *([each.parts] if each.parts > 1 else [])})
            tries = itertools.product(numbers, ("1f1b", "zero-bubble"))
            best = runs.best([made(arrangement=way, parts=parts, schedule=schedule) for parts, schedule in tries])
            best += [replace(side, label=f"{label}, plain loop", schedule="gpipe") for side in best]
        sides += best
        if best and not case.dense:  # the trainer is for images with a class each
            sides.append(replace(best[0], label=f"{label}, trainer", kind="trainer"))
    return sides


def _torch(runs: Runs) -> list[Side]:
    """torch's pipelining: its best cut and number of parts under GPipe, and the same under 1F1B.

    It refuses to receive what lies channels_last: "input tensor has to be contiguous" (torch 2.13).
    """
    made = partial(Side, "torch, gpipe", "torch", Arrangement(False), keeps=True, schedule="gpipe")
    cuts = runs.case.cuts.get(len(runs.places), ())
    found = runs.best([made(parts=parts, cuts=cut) for cut, parts in itertools.product(cuts, runs.case.parts)])
    return found + runs.best([replace(side, label="torch, 1f1b", schedule="1f1b") for side in found])


if __name__ == "__main__":
    main()
