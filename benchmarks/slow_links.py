"""Four hosts behind slow links: test error over samples and over time, by exact and by approximate methods.

    python benchmarks/slow_links.py --data DIR --folder runs/slow --small     two minutes, to try it (as root)
    python benchmarks/slow_links.py --data DIR --folder runs/slow --out slow.json

Three sorts of jobs, kept in --folder one by one, so that the same command goes on where it was stopped:

- `rate`: a short training on nine tenths of the training pictures with each learning rate; the rest of them decide.
- `curve`: a whole training with that rate and each seed. What it learns does not depend on how fast links and devices
  are (tests/training/test_averaging.py), so these run on this machine's cores as they are.
- `time`: updates on four emulated hosts of half a core (Linux, root), with links of 100 Mbit/s and 1 Gbit/s, and
  devices that are equal, one of half the speed, or one that stops for seconds at random; and what each host sends.

Seconds to an error are updates to it by `curve`, times the seconds of an update by `time`, evaluations left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import harness

from convoy.bench.course import add_evaluations
from convoy.bench.emulated import Cluster, ClusterDevice, emulate
from convoy.bench.namespaces import INTERFACE
from convoy.bench.processes import Place, Places, RankFailed, Say, run_ranks
from convoy.bench.records import Training
from convoy.errors import ConvoyError
from convoy.files import write_json
from convoy.progress import Reporter
from convoy.recipe.recipe import load_recipe
from convoy.training import Trainer
from convoy.training.environment import join_ranks

HOSTS, TARGET = 4, 0.3
LOCAL, OUTER = "parallel.local_sgd", "parallel.averaging."
ROUND = {LOCAL: "16"}
METHODS: dict[str, dict[str, str]] = {
    "sample": {},
    "auto": {"parallel.plan": "auto"},
    "bf16": {"parallel.gradient_compression": "bf16"},
    "PowerSGD 2": {"parallel.gradient_compression": "powersgd:2"},
    "top-k 1 %": {"parallel.gradient_compression": "topk:0.01"},
    "local SGD 4": {LOCAL: "4"},
    "local SGD 16": ROUND,
    "post-local 16": ROUND | {f"{OUTER}start": "decay"},
    "SlowMo 16": ROUND | {f"{OUTER}outer_momentum": "0.5"},
    "DiLoCo 16": ROUND | {f"{OUTER}outer_momentum": "0.9", f"{OUTER}outer_nesterov": "true", f"{OUTER}outer_lr": "0.7"},
    "late 4, 2 rounds": {LOCAL: "4", f"{OUTER}staleness": "2"},
    "late 4, 8 rounds": {LOCAL: "4", f"{OUTER}staleness": "8"},
}
CURVE_OF = {"auto": "sample"}  # exact plans have one curve
LINKS = ("100mbit", "1gbit")
DEVICES = ("equal", "half", "stutter")
STOPS_S, BETWEEN_S = (1.0, 3.0), 20.0  # how long the last device stops, and for how long it runs before, on average
RATES = (0.005, 0.01, 0.02, 0.05, 0.1)
RECIPE = {
    "model.name": "cifar-quick",
    "microbatch": "8",
    "optimizer": "{name: sgd, lr: 0.05, momentum: 0.9, nesterov: true, weight_decay: 5e-4}",
    "data.augment.crop": "pad",
    "data.augment.flip": "true",
    "clip_norm": "null",
    "threads": "1",
    "checkpoint.every": "1ep",
    "checkpoint.keep": "1",
}


@dataclass(frozen=True)
class Job:
    """One training, by its name a folder; it is done where `done.json` lies there."""

    name: str
    settings: Mapping[str, str]
    link: str = ""  # of emulated hosts; the machine's cores where it is empty
    devices: str = "equal"


class Quiet(Reporter):
    """Says nothing."""


_STOP = """
import os, random, signal, sys, time
rank, (least, most), mean = int(sys.argv[1]), map(float, sys.argv[2:4]), float(sys.argv[4])
numbers = random.Random(0)
while os.getppid() == rank:
    time.sleep(numbers.expovariate(1 / mean))
    if os.getppid() == rank:
        os.kill(rank, signal.SIGSTOP)
        time.sleep(numbers.uniform(least, most))
        os.kill(rank, signal.SIGCONT)
"""


def train_rank(job: Job, folder: Path, say: Say) -> dict[str, float]:
    """A rank's part of a training, gone on with if it has begun: bytes sent in all."""
    (ranks, device), stops = join_ranks(600.0, "cpu"), None
    if job.devices == "stutter" and ranks.rank == HOSTS - 1:
        arguments = map(str, (os.getpid(), *STOPS_S, BETWEEN_S))
        stops = subprocess.Popen([sys.executable, "-I", "-S", "-c", _STOP, *arguments])
    before = _sent_bytes()
    recipe = load_recipe("default", [f"{key}={value}" for key, value in job.settings.items()])
    try:
        Trainer(recipe, folder, reporter=Quiet(), resume=True, device=device, ranks=ranks, keep=False).run()
    finally:
        if stops is not None:
            stops.kill()
            stops.wait()
    return {"sent": _sent_bytes() - before}


def _sent_bytes() -> int:
    """What this host has sent through its link; 0 where it has none."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    return 0


def cluster(link: str, devices: str) -> Cluster:
    """The emulated hosts of a job."""
    speeds = [0.5] * (HOSTS - 1) + [0.25 if devices == "half" else 0.5]
    return Cluster(tuple(ClusterDevice(speed, f"host{number}") for number, speed in enumerate(speeds)), link)


def do(job: Job, folder: Path) -> dict[str, Any]:
    """What came of a job, done now or before: evaluations with their step and error, and bytes sent."""
    place, done = folder / job.name, folder / job.name / "done.json"
    if not done.exists():
        began = time.perf_counter()
        if job.link:
            with emulate(cluster(job.link, job.devices)) as places:
                sent = _run(job, place, places)
        else:
            sent = _run(job, place, Places(1).of(HOSTS))
        training = Training()
        add_evaluations(training, place, int(job.settings["batch"]))
        rows = [evaluation.model_dump() for evaluation in training.evaluations]
        write_json(done, {"evaluations": rows, "sent": sent, "took_s": round(time.perf_counter() - began, 1)})
        harness.say(f"{job.name}: {rows[-1]['error']:.1%} wrong after {rows[-1]['step']:,} updates")
    result: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
    return result


def _run(job: Job, place: Path, places: Sequence[Place]) -> int:
    results = run_ranks(train_rank, places, job, place, seconds=86400.0, quiet=True)
    return sum(result["sent"] for result in results)


def tuned(method: str, folder: Path, base: Mapping[str, str], options: argparse.Namespace) -> float:
    """The rate with the least error on held-out training pictures after a short training."""
    errors: dict[float, float] = dict.fromkeys(options.rates, 0.0)
    for rate in options.rates if len(options.rates) > 1 else ():
        settings = {**base, **METHODS[method], "optimizer.lr": str(rate), "epochs": options.tuning}
        settings |= {"data.validation_fraction": "0.1", "evaluate_every": options.tuning}
        errors[rate] = do(Job(f"rate-{options.batch}-{slug(method)}-{rate:g}", settings), folder)["evaluations"][-1][
            "error"
        ]
    return min(errors, key=lambda rate: errors[rate])


def slug(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text.lower())


def seconds_to(curve: Sequence[Mapping[str, float]], target: float) -> float | None:
    """Updates to an error, in a line between evaluations; None where it is not reached."""
    before = {"step": 0.0, "error": 0.9}
    for now in curve:
        if now["error"] <= target:
            part = (before["error"] - target) / max(before["error"] - now["error"], 1e-9)
            return before["step"] + part * (now["step"] - before["step"])
        before = dict(now)
    return None


def study(report: harness.Report, options: argparse.Namespace) -> None:
    """All jobs, and the tables as they come."""
    folder, base = options.folder, RECIPE | {"data.path": str(options.data), "parallel.devices": str(HOSTS)}
    base["batch"] = str(options.batch)
    curves: dict[str, list[list[dict[str, float]]]] = {}
    report.document |= {
        "batch": options.batch,
        "target": options.target,
        "methods": METHODS,
        "rates": {},
        "curves": curves,
        "times": [],
    }
    report.header("method", "rate", "error at the end", f"updates to {options.target:.0%} error")
    for method in options.methods:
        if (source := CURVE_OF.get(method, method)) not in curves:
            rate = report.document["rates"][source] = tuned(source, folder, base, options)
            settings = {**base, **METHODS[source], "optimizer.lr": str(rate), "epochs": options.epochs}
            settings["evaluate_every"] = options.every
            jobs = [
                Job(f"curve-{options.batch}-{slug(source)}-{seed}", settings | {"seed": str(seed)})
                for seed in options.seeds
            ]
            curves[source] = [do(job, folder)["evaluations"] for job in jobs]
            ends, reached = [curve[-1]["error"] for curve in curves[source]], _reached(curves[source], options.target)
            report.row(source, f"{rate:g}", harness.spread([100 * e for e in ends], 1)[0] + " %", _number(reached))
    report.print("")
    report.header(
        "link", "devices", "method", "s an update", "kB an update and host", "s to the error", "times as soon"
    )
    for link, devices in ((link, devices) for link in options.links for devices in options.devices):
        exact_s = None
        for method in options.methods:
            settings = {**base, **METHODS[method], "epochs": options.updates, "evaluate_every": options.updates}
            settings["log_every"] = options.updates
            result = do(Job(f"time-{options.batch}-{link}-{devices}-{slug(method)}", settings, link, devices), folder)
            last = result["evaluations"][-1]
            update_s, sent = last["train_s"] / last["step"], result["sent"] / HOSTS / last["step"]
            reached = _reached(curves[CURVE_OF.get(method, method)], options.target)
            to_s = None if reached is None else reached * update_s
            exact_s = to_s if method == "sample" else exact_s
            ratio = "" if to_s is None or exact_s is None else f"{exact_s / to_s:.2f}"
            values = {
                "link": link,
                "devices": devices,
                "method": method,
                "update_s": update_s,
                "sent": sent,
                "to_s": to_s,
            }
            report.document["times"].append(values)
            report.row(link, devices, method, f"{update_s:.3f}", f"{sent / 1e3:,.0f}", _number(to_s), ratio)


def _reached(curves: Sequence[Sequence[Mapping[str, float]]], target: float) -> float | None:
    """The median over the seeds; None where one does not reach it."""
    numbers = [seconds_to(curve, target) for curve in curves]
    return None if None in numbers else statistics.median(filter(None, numbers))


def _number(value: float | None) -> str:
    return "not reached" if value is None else f"{value:,.0f}"


def picture(document: Mapping[str, Any], path: Path) -> None:
    """Error over samples, and over time under each condition."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    conditions = list(dict.fromkeys((row["link"], row["devices"]) for row in document["times"]))
    figure, axes = pyplot.subplots(1 + len(conditions), figsize=(7, 3 * (1 + len(conditions))), squeeze=False)
    for number, condition in enumerate([None, *conditions]):
        panel = axes[number][0]
        for row in document["times"] if condition else [{"method": name} for name in document["curves"]]:
            if condition in (None, (row.get("link"), row.get("devices"))):
                scale = row["update_s"] if condition else document["batch"]
                points = document["curves"][CURVE_OF.get(row["method"], row["method"])][0]
                xs, ys = [p["step"] * scale for p in points], [p["error"] for p in points]
                panel.plot(xs, ys, label=row["method"])
        panel.set_xlabel("seconds: " + ", ".join(condition) if condition else "training samples")
        panel.set_ylabel("test error")
        panel.axhline(document["target"], color="grey", linewidth=0.5)
    axes[0][0].legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="CIFAR-10, as a folder")
    parser.add_argument("--folder", type=Path, required=True, help="where jobs are kept")
    parser.add_argument("--small", action="store_true", help="three methods for a few updates, to try it")
    harness.choice(parser, "--methods", METHODS, METHODS)
    harness.choice(parser, "--links", LINKS, LINKS)
    harness.choice(parser, "--devices", DEVICES, DEVICES)
    parser.add_argument("--seeds", type=harness.numbers, default=[0, 1, 2])
    parser.add_argument("--batch", type=int, default=64, help="samples of an update, of all hosts (64)")
    parser.add_argument("--epochs", default="6ep", help="of a whole training")
    options = parser.parse_args()
    options.rates, options.tuning, options.every = RATES, "1ep", "0.25ep"
    options.updates, options.target = "600ba", TARGET
    if options.small:
        options.methods, options.links, options.devices = (
            ["sample", "local SGD 16", "late 4, 2 rounds"],
            ["100mbit"],
            ["equal"],
        )
        options.rates, options.seeds, options.tuning, options.epochs = (0.05,), [0], "16ba", "64ba"
        options.every, options.updates, options.target = "32ba", "64ba", 0.85
    with harness.report(options.out) as report:
        options.folder.mkdir(parents=True, exist_ok=True)
        try:
            study(report, options)
        except RankFailed as error:
            raise ConvoyError(str(error)) from error
        picture(report.document, (options.out or options.folder / "study.json").with_suffix(".svg"))


if __name__ == "__main__":
    main()
