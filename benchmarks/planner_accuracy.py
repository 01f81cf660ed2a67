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
import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from measuring import harness, machine, ranks
from measuring.prediction import CHOSEN, SERIAL, Predicted, Row, Subject, beside, measure, predict

from convoy.bench.emulated import Cluster, EmulatedDevice, emulate
from convoy.errors import ConvoyError

SUBJECTS = (
    Subject("lenet", "lenet", 28, 64),
    Subject("lenet", "lenet", 28, 512),
    Subject("alexnet", "alexnet", 224, 32, 1000),
    Subject("alexnet", "alexnet", 224, 64, 1000),
    Subject("vgg11", "vgg11-cifar", 32, 64),
    Subject("vgg11", "vgg11-cifar", 32, 128),
    Subject("vgg11-imagenet", "vgg11", 64, 32, 1000),
    Subject("googlenet", "googlenet-cifar", 32, 16, options={"aux_logits": False}),
    Subject("googlenet", "googlenet-cifar", 32, 32, options={"aux_logits": False}),
    Subject("squeezenet", "squeezenet1_1-cifar", 32, 32),
    Subject("squeezenet", "squeezenet1_1-cifar", 32, 128),
    Subject("resnet18", "resnet18", 64, 32),
    Subject("resnet18", "resnet18", 64, 128),
    Subject("resnet50", "resnet50", 64, 16),
    Subject("resnet50", "resnet50", 64, 64),
)
UNSEEN = (
    Subject("vgg16", "vgg16", 64, 32),
    Subject("wide", "measuring.networks:wide", 32, 64),
    Subject("mobilenet", "measuring.networks:mobilenet_v2", 96, 32),
    Subject("resnext", "measuring.networks:resnext50", 64, 32),
)
"""Networks on which nothing was tuned."""
PLANS = {
    2: ("sample=2", "filter=2", "channel=2", "height=2", "width=2", "owt=2"),
    4: ("sample=4", "filter=4", "channel=4", "height=4", "owt=4", "sample=2,filter=2", "sample=2,height=2"),
}
"""By how many devices there are."""
APART = 0.03
"""From how much on, as a part of their time, plans are told apart by their measurement."""


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.collect:
        _collect(arguments.collect)
        return
    ranks.prepare()
    try:
        with ExitStack() as stack:
            cluster = Cluster.read(arguments.cluster) if arguments.cluster else None
            places = stack.enter_context(emulate(cluster)) if cluster else []
            _run(arguments, cluster, places)
    except ConvoyError as error:
        raise SystemExit(f"{error}") from None


def _run(arguments: argparse.Namespace, cluster: Cluster | None, places: Sequence[EmulatedDevice]) -> None:
    about = machine.describe()
    num = len(places) or 2
    if num not in PLANS:
        raise ConvoyError(f"there are plans for {' or '.join(map(str, PLANS))} devices, but the cluster has {num}")
    print(f"{about['date']}: `{about['command']}`\n{machine.sentence(about)}", flush=True)
    if cluster:
        about["cluster"] = str(cluster)
        print(f"Emulated: {cluster}.", flush=True)
    found: list[tuple[Subject, list[Row]]] = []
    for subject in _subjects(arguments):
        limits = ranks.Limits(arguments.timeout)
        predictions: dict[str, list[Predicted]] = {}
        seconds: dict[str, list[float]] = {}
        for _ in range(arguments.rounds):
            predicted = ranks.run_ranks(predict, num, subject, PLANS[num], places=places, limits=limits)[0]
            for one in predicted:
                predictions.setdefault(one.name, []).append(one)
            for text, plan in {str(one.plan): one.plan for one in predicted}.items():
                given = (subject, plan, arguments.updates, arguments.warm_up)
                seconds.setdefault(text, []).extend(
                    ranks.run_ranks(measure, num, *given, places=places, limits=limits)[0]
                )
        rows = [beside(several, seconds[str(several[0].plan)]) for several in predictions.values()]
        found.append((subject, rows))
        print("\n" + _table(subject, rows), flush=True)
        _store(arguments.out, {**about, "devices": num}, found)
    print("\n" + _summary(found, num))


def _subjects(arguments: argparse.Namespace) -> list[Subject]:
    """What was asked for; batches that are asked for are those of each network, known here or not."""
    found = [
        subject for subject in (*SUBJECTS, *UNSEEN) if not arguments.networks or subject.name in arguments.networks
    ]
    if arguments.batches:
        first = {subject.name: subject for subject in reversed(found)}
        names = dict.fromkeys(subject.name for subject in found)
        found = [replace(first[name], batch=batch) for name in names for batch in arguments.batches]
    return [replace(subject, image_size=arguments.image_size or subject.image_size) for subject in found]


def _table(subject: Subject, rows: Sequence[Row]) -> str:
    lines = [
        f"**{subject.name}**, {subject.image_size} px, global batch {subject.batch}",
        "",
        "| plan | predicted ms | measured ms | error | smallest–largest |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        low, high = (1e3 * seconds for seconds in row.spread)
        cells = [row.plan, f"{row.predicted * 1e3:.1f}", f"{row.measured * 1e3:.1f}", f"{_error(row):+.1%}"]
        lines.append("| " + " | ".join([*cells, f"{low:.1f}–{high:.1f}"]) + " |")
    times = {row.plan.split(":")[0]: row.measured for row in rows}
    sample = next((seconds for plan, seconds in times.items() if plan.startswith("sample=")), None)
    if CHOSEN in times and sample:
        lines += ["", f"The chosen plan is {sample / times[CHOSEN]:.2f} times as fast as plain `sample`."]
    return "\n".join(lines)


def _summary(found: Sequence[tuple[Subject, Sequence[Row]]], num: int) -> str:
    rows = [row for _, several in found for row in several]
    by_data = [row for row in rows if row.plan == f"sample={num}"]
    naive = []
    for _, several in found:
        one = next(row.measured for row in several if row.plan == SERIAL)
        naive += [abs(one / num / row.measured - 1) for row in several if row.plan != SERIAL]
    parallel = [abs(_error(row)) for row in rows if row.plan != SERIAL]
    pairs: dict[str, list[list[tuple[float, float]]]] = {}
    for subject, several in found:
        pairs.setdefault(subject.name, []).append([(r.predicted, r.measured) for r in several if r.plan != SERIAL])
    gaps = []
    for _, several in found:
        chosen = max((row.measured for row in several if row.plan.startswith(CHOSEN)), default=None)
        if chosen is not None:
            gaps.append(chosen / min(row.measured for row in several if row.plan != SERIAL) - 1)
    lines = [
        f"{len(rows)} predictions: mean absolute error {statistics.mean(abs(_error(row)) for row in rows):.1%}",
        f"{len(by_data)} of sample plans: {statistics.mean(abs(_error(row)) for row in by_data):.1%}",
        f"{len(parallel)} on {num} devices: {statistics.mean(parallel):.1%}; predicting linear speed-up: "
        f"{statistics.mean(naive):.1%}",
        f"Kendall's tau of the plans' order within a network: {_order(pairs)}",
        f"of plans measured at least {APART:.0%} apart: {_order(pairs, APART)}",
        f"the chosen plan against the best measured one: within 3 % in {sum(gap <= 0.03 for gap in gaps)} of "
        f"{len(gaps)}, {max(gaps):+.1%} at most",
    ]
    return "\n".join(lines)


def _error(row: Row) -> float:
    return row.predicted / row.measured - 1


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


def _store(folder: Path, about: dict[str, Any], found: Sequence[tuple[Subject, Sequence[Row]]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    cases = [
        {
            **{key: getattr(subject, key) for key in ("name", "model", "image_size", "batch")},
            "rows": [
                {key: getattr(row, key) for key in ("plan", "predicted", "measured", "where", "spread")} for row in rows
            ],
        }
        for subject, rows in found
    ]
    text = json.dumps({"machine": about, "cases": cases}, indent=1)
    (folder / "planner_accuracy.json").write_text(text + "\n", encoding="utf-8")


def _collect(files: Sequence[Path]) -> None:
    """Print what earlier runs have stored, with one summary."""
    stored = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    found: list[tuple[Subject, list[Row]]] = []
    for case in (case for each in stored for case in each["cases"]):
        rows = [Row(**{**row, "spread": tuple(row["spread"])}) for row in case.pop("rows")]
        found.append((Subject(**case), rows))
        print(_table(*found[-1]) + "\n")
    print(_summary(found, stored[0]["machine"].get("devices", 2)))


def _parser() -> argparse.ArgumentParser:
    parser = harness.parser(__doc__)
    parser.add_argument("--networks", type=lambda text: text.split(","), default=[], help="some of them; default: all")
    parser.add_argument("--batches", type=_numbers, default=[], help="some of them, e.g. 32,64; default: all")
    parser.add_argument("--image-size", type=int, help="instead of each network's own")
    parser.add_argument("--cluster", metavar="FILE", help="emulated devices: a YAML file")
    parser.add_argument("--rounds", type=int, default=2, help="of predictions and measurements in turn")
    parser.add_argument("--updates", type=int, default=5, help="timed of each plan in a round")
    parser.add_argument("--warm-up", type=int, default=5, help="updates of each plan before these")
    parser.add_argument(
        "--timeout", type=float, default=900.0, help="seconds for the predictions of a case, and for each plan"
    )
    parser.add_argument("--collect", type=Path, nargs="+", help="JSON files of earlier runs: print them as one")
    parser.add_argument("--out", type=Path, default=Path("runs/planner-accuracy"), help="folder for JSON")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
