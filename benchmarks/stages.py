"""Stages beside other plans and beside peers, on emulated devices: time, memory, exactness. As root, but for `exact`.

    python benchmarks/stages.py time --cases resnet50 --devices 2 --link 200mbit
    python benchmarks/stages.py time --cases unet --speeds 1,0.5 --link 1gbit       unequal devices
    python benchmarks/stages.py memory                                              four times a device's memory
    python benchmarks/stages.py memory --cases resnet50,vgg16 --no-limit            beside the prediction
    python benchmarks/stages.py exact --networks lenet,unet

`time`: every device is in a host of its own and has one thread; two have a core each, four half a core. One device is
the first of them by itself, in plain PyTorch. The planner predicts before anything is measured; trials, which do not
count, choose for each side how it goes through the batch; then all sides take turns for some rounds, each measurement
of fresh processes, and the median over the rounds counts.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import harness, machine, ranks
from measuring import stage_memory as memory
from measuring.link import bits_per_second
from measuring.results import markdown, predictions
from measuring.stage_cases import CASES, StageCase
from measuring.stage_exactness import KINDS, PLANS, SCHEDULES, table
from measuring.stage_exactness import SUBJECTS as EXACT
from measuring.stage_runs import StageRun

from convoy.bench.emulated import Cluster, ClusterDevice, emulate
from convoy.plans.schedule import Schedule

PEERS = ("torch",)
SPEEDS = {2: 1.0, 4: 0.5}
"""The share of a core of each device, by their number: two cores suffice."""


def main() -> None:
    options = _parser().parse_args()
    ranks.prepare()
    with harness.ended():
        options.run(options)


def _time(options: argparse.Namespace) -> None:
    speeds = options.speeds or [SPEEDS.get(options.devices, 2 / options.devices)] * options.devices
    devices = tuple(ClusterDevice(speed, f"host{number}") for number, speed in enumerate(speeds))
    cluster, about = Cluster(devices, options.link), machine.describe()
    document: dict[str, Any] = {"machine": about, "cluster": str(cluster), "cases": []}
    tables = [f"{about['date']}: `{about['command']}`", machine.sentence(about), f"Emulated: {cluster}."]
    with emulate(cluster) as places:
        document["link_bits_per_second"] = rate = ranks.run_ranks(bits_per_second, 2, 2**23, places=places[:2])[0]
        tables.append(f"An all-reduce of two moved {rate / 1e9:.3f} Gbit/s each way.")
        print("\n".join(tables), flush=True)
        for name in options.cases:
            case, profile = CASES[name].changed(options.batch, None), f"profile-{'-'.join(map(str, speeds))}"
            common = (case, options.rounds, places, options.peers, options.timeout, harness.say)
            run = StageRun(*common, speeds, None if options.no_planner else options.out / profile)
            results = run()
            document["cases"].append(results.to_dict())
            tables.append(f"{markdown(results)}\n\n{predictions(results)}")
            print(f"\n{tables[-1]}", flush=True)
            batch = f"-{options.batch}" if options.batch else ""
            file = options.out / f"{name}{batch}-{len(speeds)}-{options.link}"
            harness.save(file.with_suffix(".json"), document)
            file.with_suffix(".md").write_text("\n\n".join(tables) + "\n", encoding="utf-8")


def _exact(options: argparse.Namespace) -> None:
    harness.heading()
    print(harness.header("network", "plan", "schedule", *KINDS, "weights, perturbed", ""), flush=True)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for *what, found in table(options.networks, options.plans, options.schedules, Path(options.folder or folder)):
            if isinstance(found, str):
                cells, said = ["–"] * (len(KINDS) + 1), found.strip().splitlines()[0]
                harness.say(f"{' '.join(what)}: {found}")
            else:
                cells = [f"{error:.0e}" for error in [*(e for e, _ in found.worst.values()), found.perturbed]]
                said = "ok" if found.ok else f"DIFFERS: {found}"
            failed += said != "ok"
            harness.show(*what, *cells, said)
    sys.exit(bool(failed))


def _memory(options: argparse.Namespace) -> None:
    harness.heading()
    print("The most of each process:\n")
    base = max(memory.peaks(memory.TINY, "1f1b").bytes)
    print(f"- with hardly any network: {base / 2**20:.0f} MiB", flush=True)

    def beside(case: StageCase, schedule: Schedule) -> None:
        free = memory.peaks(case, schedule)
        said = [each + base for each in memory.predicted(case, schedule)]
        errors = ", ".join(f"{one / other - 1:+.0%}" for one, other in zip(said, free.bytes, strict=True))
        print(f"- {memory.PLAN}, {schedule}: {free}; predicted {memory.Peaks(tuple(said))} ({errors})", flush=True)

    for name in options.cases:
        case = memory.CASES[name]
        print(f"\n{name}, {case.image_size} px, global batch {case.batch}, {memory.PARTS} parts:\n")
        if not options.limited:
            beside(case, "1f1b")
            continue
        alone = memory.peaks(case, "")
        print(f"- one device, one pass: {alone}", flush=True)
        limit = alone.bytes[0] // memory.DEVICES
        print(f"- one device with a limit of {limit / 2**20:.0f} MiB: {memory.peaks(case, '', limit)}", flush=True)
        for schedule in ("1f1b", "gpipe"):
            beside(case, schedule)
            limited = memory.peaks(case, schedule, limit)
            print(f"- {memory.PLAN}, {schedule}, each with that limit: {limited}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = harness.parser(__doc__)
    verbs = parser.add_subparsers(required=True, metavar="time, memory or exact")
    time = verbs.add_parser("time", help="seconds of an update, all sides in turn")
    time.set_defaults(run=_time)
    time.add_argument("--cases", type=harness.some(CASES), default=list(CASES), help=f"of {', '.join(CASES)}")
    time.add_argument("--batch", type=int, help="samples of an update in place of those of the case")
    time.add_argument("--devices", type=int, choices=list(SPEEDS), default=2)
    time.add_argument(
        "--speeds",
        type=lambda text: [float(part) for part in text.split(",")],
        help="of the devices in place of equal ones, e.g. 1,0.5",
    )
    time.add_argument("--link", metavar="RATE", default="1gbit", help="of every host, e.g. 200mbit")
    time.add_argument(
        "--peers", type=harness.some(PEERS), default=list(PEERS), help=f"of {', '.join(PEERS)}; '' for none"
    )
    time.add_argument("--no-planner", action="store_true", help="neither predictions nor the planner's own plans")
    time.add_argument("--rounds", type=int, default=3)
    time.add_argument("--timeout", type=float, default=120.0, help="seconds after which a side is given up")
    time.add_argument("--out", type=Path, default=Path("stages-results"), help="folder for JSON and Markdown")
    peaks = verbs.add_parser("memory", help="a network of four times a device's memory")
    peaks.set_defaults(run=_memory)
    peaks.add_argument(
        "--cases", type=harness.some(memory.CASES), default=["resnet152"], help="of measuring/stage_memory.py"
    )
    peaks.add_argument("--no-limit", dest="limited", action="store_false", help="only 1F1B beside its prediction")
    exact = verbs.add_parser("exact", help="distance from one device in float64")
    exact.set_defaults(run=_exact)
    exact.add_argument("--networks", type=harness.some(EXACT), default=list(EXACT), help=f"of {', '.join(EXACT)}")
    exact.add_argument("--plans", type=lambda text: text.split(), default=list(PLANS), help="with spaces between them")
    exact.add_argument(
        "--schedules", type=harness.some(SCHEDULES), default=list(SCHEDULES), help=f"of {', '.join(SCHEDULES)}"
    )
    exact.add_argument("--folder", type=Path, help="keeps what one device has, for later calls")
    return parser


if __name__ == "__main__":
    main()
