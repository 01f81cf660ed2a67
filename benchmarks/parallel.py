"""Two devices beside one, and Convoy beside its peers: seconds of a weight update, all sides in turn in one run.

    python benchmarks/parallel.py                                       all cases
    python benchmarks/parallel.py --cases alexnet-32 --link 1gbit       two emulated hosts, as root
    python benchmarks/parallel.py --cases resnet18 --compile            with compiled sides beside the others

A device is one core and one thread, also where one device runs alone. Every measurement is one of fresh processes;
the sides take turns for some rounds, and the median over the rounds counts. One device gets the best of its
arrangements (memory format, size of a pass), the data-parallel sides the one that is best for
DistributedDataParallel, and the best plan is found in trials before the rounds, which do not count. Lightning Fabric
and accelerate are measured if they are installed (pip install lightning accelerate).
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from measuring import harness
from measuring.cases import CASES, Case
from measuring.ranks import bits_per_second, run_ranks
from measuring.runs import SERIAL, Results, Runs
from measuring.sides import Arrangement, Side, Timing, train

from convoy.bench.ask import missing
from convoy.bench.emulated import Cluster, EmulatedDevice, emulate
from convoy.bench.records import PEERS
from convoy.errors import ConvoyError

SAMPLE = "Convoy sample=2"


def main() -> None:
    parser = harness.parser(__doc__, rounds=3)
    harness.choice(parser, "--cases", CASES, CASES)
    harness.choice(parser, "--peers", PEERS, PEERS)
    parser.add_argument("--link", metavar="RATE", help="between two emulated hosts, e.g. 1gbit")
    parser.add_argument("--compile", action="store_true", help="measure compiled sides too")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a side is given up")
    options = parser.parse_args()
    with harness.report(options.out) as report, ExitStack() as stack:
        if report.machine["cores"] < 2:
            raise ConvoyError("two devices of one core each need two cores, but here is one")
        places = stack.enter_context(emulate(Cluster.alike(2, rate=options.link))) if options.link else []
        if places:
            rate = report.machine["link_bits_per_second"] = run_ranks(bits_per_second, 2, 2**25, places=places)[0]
            report.print(f"Between the hosts {options.link}; an all-reduce moved {rate / 1e9:.2f} Gbit/s each way.")
        for name in options.cases:
            measured(CASES[name], places, options).show(report)


def measured(case: Case, places: Sequence[EmulatedDevice], options: argparse.Namespace) -> Results:
    """Trials, then rounds: on two ranks, or on one that takes another core in each round."""

    def measure(side: Side, number: int, trial: bool) -> list[Timing]:
        serial, warm_up = side.kind == "serial", 1 if case.updates == 1 else 2
        how: dict[str, Any] = {"first_core": number} if serial else {"places": places}
        return run_ranks(train, 1 if serial else 2, side, case, warm_up, seconds=options.timeout, **how)

    runs = Runs(case, options.rounds, places, options.timeout, measure)
    return runs.take_turns(_sides(runs, options))


def _sides(runs: Runs, options: argparse.Namespace) -> list[Side]:
    """Those of the rounds: one device and the peers, `sample` and the plan that is best of all, each arranged as is
    best for it; all peers as is best for DistributedDataParallel, which they use."""
    case, one = runs.case, runs.one_device(keeps=False)
    ways = list(dict.fromkeys([one.for_batch(case.batch // 2), Arrangement(one.channels_last)]))
    sides = [Side(SERIAL, "serial", one), Side(f"{SERIAL}, memory kept", "serial", one, keeps=True)]
    by_data = runs.best([Side("DDP", "ddp", way) for way in ways])
    for kind in options.peers:
        if package := missing(kind):
            runs.results.skipped[PEERS[kind]] = f"pip install {package}"
        else:
            sides.append(Side(PEERS[kind], kind, by_data[0].arrangement if by_data else ways[0]))
    samples = [Side(SAMPLE, "convoy", way, "sample=2") for way in ways]
    sample = (runs.best(samples) or samples)[0]
    if case.batch_norm:
        sides.append(replace(sample, label=f"{SAMPLE}, batch norm of each rank", batch_norm="local"))
    sides.append(sample)
    rivals = [Side(f"Convoy {name}", "convoy", way, plan) for name, plan in case.plans.items() for way in ways]
    sides += [side for side in runs.best([sample, *rivals]) if side != sample]
    if options.compile:
        sides += [replace(s, label=f"{s.label}, compiled", compiled=True) for s in sides if s.kind not in PEERS]
    return sides


if __name__ == "__main__":
    main()
