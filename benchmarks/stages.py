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
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import machine, ranks
from measuring.link import bits_per_second
from measuring.results import markdown, predictions
from measuring.stage_cases import CASES, StageCase
from measuring.stage_exactness import KINDS, PLANS, SCHEDULES, table
from measuring.stage_exactness import SUBJECTS as EXACT
from measuring.stage_runs import StageRun

from convoy.bench.emulated import Cluster, ClusterDevice, emulate
from convoy.errors import ConvoyError
from convoy.plans.schedule import Schedule

PEERS = ("torch", "rows")
SPEEDS = {2: 1.0, 4: 0.5}
"""The share of a core of each device, by their number: two cores suffice."""


def main() -> None:
    arguments = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that hosts and processes are cleaned up
    ranks.prepare()
    try:
        arguments.run(arguments)
    except ConvoyError as error:
        raise SystemExit(f"{error}") from None


def _time(arguments: argparse.Namespace) -> None:
    if unknown := set(arguments.cases) - set(CASES):
        raise ConvoyError(f"there is no case {min(unknown)}: there are {', '.join(CASES)}")
    speeds = arguments.speeds or [SPEEDS.get(arguments.devices, 2 / arguments.devices)] * arguments.devices
    devices = tuple(ClusterDevice(speed, f"host{number}") for number, speed in enumerate(speeds))
    cluster, about = Cluster(devices, arguments.link), machine.describe()
    document: dict[str, Any] = {"machine": about, "cluster": str(cluster), "cases": []}
    tables = [f"{about['date']}: `{about['command']}`", machine.sentence(about), f"Emulated: {cluster}."]
    with emulate(cluster) as places:
        document["link_bits_per_second"] = rate = ranks.run_ranks(bits_per_second, 2, 2**23, places=places[:2])[0]
        tables.append(f"An all-reduce of two moved {rate / 1e9:.3f} Gbit/s each way.")
        print("\n".join(tables), flush=True)
        for name in arguments.cases:
            run = StageRun(
                CASES[name].changed(arguments.batch, None),
                arguments.rounds,
                places,
                speeds,
                arguments.peers,
                arguments.timeout,
                None if arguments.no_planner else arguments.out / f"profile-{'-'.join(map(str, speeds))}",
                lambda text: print(f"  {text}", file=sys.stderr, flush=True),
            )
            results = run()
            document["cases"].append(results.to_dict())
            tables.append(f"{markdown(results)}\n\n{predictions(results)}")
            print(f"\n{tables[-1]}", flush=True)
            batch = f"-{arguments.batch}" if arguments.batch else ""
            _store(arguments.out, f"{name}{batch}-{len(speeds)}-{arguments.link}", document, tables)


def _exact(arguments: argparse.Namespace) -> None:
    if unknown := set(arguments.networks) - set(EXACT):
        raise ConvoyError(f"there is no network {min(unknown)}: there are {', '.join(EXACT)}")
    about = machine.describe()
    print(f"{about['date']}: `{about['command']}`\n\n{machine.sentence(about)}\n")
    print(f"| network | plan | schedule | {' | '.join(KINDS)} | weights, perturbed | |")
    print("| --- " * (len(KINDS) + 5) + "|", flush=True)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for *what, found in table(
            arguments.networks, arguments.plans, arguments.schedules, Path(arguments.folder or folder)
        ):
            if isinstance(found, str):
                cells, said = ["–"] * (len(KINDS) + 1), found.strip().splitlines()[0]
                print(f"{' '.join(what)}: {found}", file=sys.stderr, flush=True)
            else:
                cells = [f"{error:.0e}" for error in [*(e for e, _ in found.worst.values()), found.perturbed]]
                said = "ok" if found.ok else f"DIFFERS: {found}"
            failed += said != "ok"
            print(f"| {' | '.join([*what, *cells, said])} |", flush=True)
    if failed:
        raise SystemExit(1)


def _memory(arguments: argparse.Namespace) -> None:
    from measuring import stage_memory as memory

    if unknown := set(arguments.cases) - set(memory.CASES):
        raise ConvoyError(f"there is no case {min(unknown)}: there are {', '.join(memory.CASES)}")
    about = machine.describe()
    print(f"{about['date']}: `{about['command']}`\n\n{machine.sentence(about)}\n\nThe most of each process:\n")
    base = max(memory.peaks(memory.TINY, "1f1b").bytes)
    print(f"- with hardly any network: {base / 2**20:.0f} MiB", flush=True)

    def beside(case: StageCase, schedule: Schedule) -> None:
        free = memory.peaks(case, schedule)
        said = [each + base for each in memory.predicted(case, schedule)]
        errors = ", ".join(f"{one / other - 1:+.0%}" for one, other in zip(said, free.bytes, strict=True))
        print(f"- {memory.PLAN}, {schedule}: {free}; predicted {memory.Peaks(tuple(said))} ({errors})", flush=True)

    for name in arguments.cases:
        case = memory.CASES[name]
        print(f"\n{name}, {case.image_size} px, global batch {case.batch}, {memory.PARTS} parts:\n")
        if not arguments.limited:
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


def _store(folder: Path, name: str, document: dict[str, Any], tables: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text("\n\n".join(tables) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True, metavar="time, memory or exact")
    time = verbs.add_parser("time", help="seconds of an update, all sides in turn")
    time.set_defaults(run=_time)
    time.add_argument("--cases", type=_names, default=list(CASES), help=f"of {', '.join(CASES)}")
    time.add_argument("--batch", type=int, help="samples of an update in place of those of the case")
    time.add_argument("--devices", type=int, choices=list(SPEEDS), default=2)
    time.add_argument("--speeds", type=_shares, help="of the devices in place of equal ones, e.g. 1,0.5")
    time.add_argument("--link", metavar="RATE", default="1gbit", help="of every host, e.g. 200mbit")
    time.add_argument("--peers", type=_names, default=list(PEERS), help=f"of {', '.join(PEERS)}; '' for none")
    time.add_argument("--no-planner", action="store_true", help="neither predictions nor the planner's own plans")
    time.add_argument("--rounds", type=int, default=3)
    time.add_argument("--timeout", type=float, default=120.0, help="seconds after which a side is given up")
    time.add_argument("--out", type=Path, default=Path("stages-results"), help="folder for JSON and Markdown")
    memory = verbs.add_parser("memory", help="a network of four times a device's memory")
    memory.set_defaults(run=_memory)
    memory.add_argument("--cases", type=_names, default=["resnet152"], help="of measuring/stage_memory.py")
    memory.add_argument("--no-limit", dest="limited", action="store_false", help="only 1F1B beside its prediction")
    exact = verbs.add_parser("exact", help="distance from one device in float64")
    exact.set_defaults(run=_exact)
    exact.add_argument("--networks", type=_names, default=list(EXACT), help=f"of {', '.join(EXACT)}")
    exact.add_argument("--plans", type=lambda text: text.split(), default=list(PLANS), help="with spaces between them")
    exact.add_argument("--schedules", type=_names, default=list(SCHEDULES), help=f"of {', '.join(SCHEDULES)}")
    exact.add_argument("--folder", type=Path, help="keeps what one device has, for later calls")
    return parser


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _shares(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
