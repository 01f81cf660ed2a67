"""Predictions of the planner beside measurements: every plan of every network is predicted before it is measured.

    python benchmarks/planner_accuracy.py                                   all networks, on one and two devices
    python benchmarks/planner_accuracy.py --networks alexnet,vgg11 --updates 5
    python benchmarks/planner_accuracy.py --cluster benchmarks/clusters/four-3gbit.yaml        emulated devices, as root

A device is one core and one thread, or an emulated one with a share of a core. In each round of a network and batch
the planner measures the layers and the link on the devices, predicts one device, all plans and the plan that it would
choose itself, and only then are they trained and timed, by processes of their own. Predictions and plans so take
turns: a machine whose speed drifts slows all of them. Printed are the medians over the rounds, the relative error of
each, its mean over all and over `sample` plans, how the order of the plans agrees (Kendall's tau, ties left out), how
far the chosen plan is from the best measured one, and how much better the errors are than those of "N devices are N
times as fast".
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import combinations

from measuring import harness
from measuring.cases import SUBJECTS, Case
from measuring.ranks import run_ranks
from measuring.runs import SERIAL, Row
from measuring.sides import AUTO, Arrangement, Side, predict, train

from convoy.bench.emulated import Cluster, EmulatedDevice, emulate
from convoy.errors import ConvoyError

PLANS = {
    2: ("sample=2", "filter=2", "channel=2", "height=2", "width=2", "owt=2"),
    4: ("sample=4", "filter=4", "channel=4", "height=4", "owt=4", "sample=2,filter=2", "sample=2,height=2"),
}
"""By how many devices there are."""
APART = 0.03
"""From how much on, as a part of their time, plans are told apart by their measurement."""


def main() -> None:
    parser = harness.parser(__doc__, rounds=2)
    names = dict.fromkeys(subject.name for subject in SUBJECTS)
    harness.choice(parser, "--networks", names, names)
    batches = "in place of each network's own, e.g. 32,64"
    parser.add_argument("--batches", type=harness.numbers, default=[], help=batches)
    parser.add_argument("--image-size", type=int, help="instead of each network's own")
    parser.add_argument("--cluster", metavar="FILE", help="emulated devices: a YAML file")
    parser.add_argument("--updates", type=int, default=5, help="timed of each plan in a round")
    parser.add_argument("--warm-up", type=int, default=5, help="updates of each plan before these")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for the predictions, and for each plan")
    options = parser.parse_args()
    tables: list[tuple[str, list[Row]]] = []
    with harness.report(options.out) as report, ExitStack() as stack:
        cluster = Cluster.read(options.cluster) if options.cluster else None
        places = stack.enter_context(emulate(cluster)) if cluster else []
        num = report.machine["devices"] = len(places) or 2
        if num not in PLANS:
            raise ConvoyError(f"there are plans for {' or '.join(map(str, PLANS))} devices, but the cluster has {num}")
        if cluster:
            report.print(f"Emulated: {cluster}.")
        for subject in _subjects(options):
            tables.append((subject.name, measured(subject, num, places, options)))
            show(report, subject, tables[-1][1])
        report.print(f"\n{summary(tables, num)}")


def _subjects(options: argparse.Namespace) -> list[Case]:
    """What was asked for; batches that are asked for are those of each network, known here or not."""
    found = [subject for subject in SUBJECTS if subject.name in options.networks]
    if options.batches:
        first = {subject.name: subject for subject in reversed(found)}
        found = [replace(one, batch=batch) for one in reversed(first.values()) for batch in options.batches]
    return [replace(one, image_size=options.image_size or one.image_size, updates=options.updates) for one in found]


def measured(case: Case, num: int, places: Sequence[EmulatedDevice], options: argparse.Namespace) -> list[Row]:
    """Predictions and measurements in turn."""
    predictions, seconds, plans = dict[str, list[float]](), dict[str, list[float]](), dict[str, str]()
    for _ in range(options.rounds):
        asked = (case, PLANS[num], Arrangement())
        serial, found = run_ranks(predict, num, *asked, places=places, seconds=options.timeout)[0]
        sides = {SERIAL: Side(SERIAL, "serial", keeps=True)}
        predictions.setdefault(SERIAL, []).append(serial)
        plans[SERIAL] = SERIAL
        for one in found:
            if one.name == AUTO or one.name in PLANS[num]:
                name, text = f"{AUTO}: {one.plan}" if one.name == AUTO else one.name, str(one.plan)
                predictions.setdefault(name, []).append(one.seconds)
                plans[name], sides[text] = text, Side(text, "convoy", plan=one.plan)
        for text, side in sides.items():
            ranks, on = (1, places[:1]) if text == SERIAL else (num, places)
            timings = run_ranks(train, ranks, side, case, options.warm_up, places=on, seconds=options.timeout)
            seconds.setdefault(text, []).extend(timings[0].seconds)
    medians = {name: statistics.median(values) for name, values in predictions.items()}
    return [Row(name, "", seconds[plans[name]], predicted=median) for name, median in medians.items()]


def show(report: harness.Report, subject: Case, rows: Sequence[Row]) -> None:
    """The table of a network and batch."""
    report.print(f"\n**{subject.name}**, {subject.image_size} px, global batch {subject.batch}\n")
    report.header("plan", "predicted ms", "measured ms", "error", "smallest–largest")
    for row in rows:
        middle, ends = harness.spread([1e3 * seconds for seconds in row.seconds])
        cells = (f"{1e3 * (row.predicted or 0):.1f}", middle, f"{row.error:+.1%}", ends)
        report.row(row.label, *cells, network=subject.name, batch=subject.batch, **vars(row))
    times = {row.label.split(":")[0]: row.median for row in rows}
    sample = next((seconds for plan, seconds in times.items() if plan.startswith("sample=")), None)
    if AUTO in times and sample:
        report.print(f"\nThe chosen plan is {sample / times[AUTO]:.2f} times as fast as plain `sample`.")


def summary(tables: Sequence[tuple[str, list[Row]]], num: int) -> str:
    """Errors, and the order of plans, of networks by name."""
    rows = [row for _, several in tables for row in several]
    parallel = [row for row in rows if row.label != SERIAL]
    linear, gaps = list[float](), list[float]()
    pairs: dict[str, list[list[tuple[float, float]]]] = {}
    for name, several in tables:
        one = next(row.median for row in several if row.label == SERIAL)
        others = [row for row in several if row.label != SERIAL]
        linear += [abs(one / num / row.median - 1) for row in others]
        pairs.setdefault(name, []).append([(row.predicted or 0, row.median) for row in others])
        chosen = max(row.median for row in several if row.label.startswith(AUTO))
        gaps.append(chosen / min(row.median for row in others) - 1)

    def errors(what: str, among: Sequence[Row]) -> str:
        return f"{len(among)} {what}: {statistics.mean(abs(row.error) for row in among):.1%}"

    lines = [
        f"{len(rows)} predictions: mean absolute error {statistics.mean(abs(row.error) for row in rows):.1%}",
        errors("of sample plans", [row for row in rows if row.label == f"sample={num}"]),
        f"{errors(f'on {num} devices', parallel)}; predicting linear speed-up: {statistics.mean(linear):.1%}",
        f"Kendall's tau of the plans' order within a network: {_order(pairs)}",
        f"of plans measured at least {APART:.0%} apart: {_order(pairs, APART)}",
        f"the chosen plan against the best measured one: within 3 % in {sum(gap <= 0.03 for gap in gaps)} of "
        f"{len(gaps)}, {max(gaps):+.1%} at most",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _order(pairs: Mapping[str, Sequence[Sequence[tuple[float, float]]]], apart: float = 0.0) -> str:
    taus = {name: _tau(batches, apart) for name, batches in pairs.items()}
    each = ", ".join(f"{name} {tau:.2f}" for name, tau in taus.items())
    return f"mean {statistics.mean(taus.values()):.2f}, least {min(taus.values()):.2f} ({each})"


def _tau(batches: Sequence[Sequence[tuple[float, float]]], apart: float = 0.0) -> float:
    """Kendall's tau of two orders of the plans of each batch, over what the second has apart by more than a part of
    itself."""
    agreeing = disagreeing = 0
    for (a, b), (c, d) in (two for pairs in batches for two in combinations(pairs, 2)):
        product = (a - c) * (b - d) if abs(b - d) > apart * min(b, d) else 0.0
        agreeing += product > 0
        disagreeing += product < 0
    return (agreeing - disagreeing) / max(1, agreeing + disagreeing)


if __name__ == "__main__":
    main()
