"""Four hosts behind slow links: test error over samples and over time, by exact and by approximate methods.

    python benchmarks/slow_links.py --data DIR --folder runs/slow --small     some minutes, to try it (as root)
    python benchmarks/slow_links.py --data DIR --folder runs/slow --out slow.json

Three sorts of jobs, kept in --folder one by one, so that the same command goes on where it was stopped:

- `rate`: a short training on nine tenths of the training pictures with each learning rate; the rest of them decide.
- `curve`: a whole training with that rate and each seed. What it learns does not depend on how fast links and devices
  are (tests/training/test_averaging.py), so these run on this machine's cores as they are.
- `time`: updates on four emulated hosts of half a core (Linux, root), with links of 25 and 100 Mbit/s and 1 Gbit/s,
  and devices that are equal, one of half the speed, or one that stops for seconds at random; and what each host sends.

Seconds to an error are updates to it by `curve`, times the seconds of an update by `time`, evaluations left out. Beside
--out lie pictures of the error over samples and over time, of equal devices on the slowest link.
"""

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measuring import harness

from convoy.bench.course import add_evaluations
from convoy.bench.emulated import Cluster, ClusterDevice, emulate
from convoy.bench.namespaces import INTERFACE
from convoy.bench.processes import Places, Say, run_ranks
from convoy.bench.records import Training
from convoy.comm.joining import meeting_store
from convoy.files import write_json
from convoy.progress import Reporter
from convoy.recipe.recipe import load_recipe
from convoy.report import axes as ax
from convoy.training import Trainer
from convoy.training.environment import join_ranks
from convoy.training.watchdog import Watchdog

HOSTS = 4
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
    "8 late rounds of 4": {LOCAL: "4", f"{OUTER}staleness": "8"},
    "4 late rounds of 16": ROUND | {f"{OUTER}staleness": "4"},
}
CURVE_OF = {"auto": "sample"}  # exact plans have one curve
LINKS = ("25mbit", "100mbit", "1gbit")
DEVICES = ("equal", "half", "stutter")
STOPS_S, BETWEEN_S = (1.0, 3.0), 20.0  # how long the last device stops, and for how long it runs before, on average
RECIPE = {
    "model.name": "cifar-quick",
    "microbatches": str(HOSTS),
    "optimizer": "{name: sgd, lr: 0.05, momentum: 0.9, nesterov: true, weight_decay: 5e-4}",
    "data.augment": "{crop: pad, flip: true}",
    "clip_norm": "null",
    "checkpoint.every": "1ep",
}
WHOLE: dict[str, Any] = {"rates": (0.00125, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1), "tuning": "0.5ep"}
WHOLE |= {"every": "0.5ep", "target": 0.3}
SMALL: dict[str, Any] = {"rates": (0.05,), "tuning": "16ba", "every": "32ba", "updates": "64ba", "target": 0.85}
SMALL |= {"methods": ["sample", "local SGD 16", "8 late rounds of 4"], "links": ["100mbit"], "devices": ["equal"]}
SMALL |= {"seeds": [0], "epochs": "64ba"}


@dataclass(frozen=True)
class Job:
    """One training, by its name a folder; it is done where `done.json` lies there."""

    name: str
    settings: Mapping[str, str]
    link: str = ""  # of emulated hosts; the machine's cores where it is empty
    devices: str = "equal"


STOP = """
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


def train_rank(job: Job, folder: Path, say: Say) -> int:
    """A rank's part of a training, gone on with if it has begun: bytes sent in all."""
    ranks, device = join_ranks(600.0, "cpu")
    before = _sent_bytes()
    recipe = load_recipe("default", [f"{key}={value}" for key, value in job.settings.items()])
    with ExitStack() as stack:
        if job.devices == "stutter" and ranks.rank == HOSTS - 1:
            stack.enter_context(harness.beside(STOP, os.getpid(), *STOPS_S, BETWEEN_S))
        here: dict[str, Any] = {"device": device, "ranks": ranks, "reporter": Reporter()}
        here["watchdog"] = stack.enter_context(Watchdog(ranks, meeting_store()))
        Trainer(recipe, folder, resume=True, keep=False, **here).run()
    return _sent_bytes() - before


def _sent_bytes() -> int:
    """What this host has sent through its link; 0 where it has none."""
    lines = map(str.split, Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines())
    return next((int(words[9]) for words in lines if words[0] == f"{INTERFACE}:"), 0)


def do(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """What came of a job, done now or before: evaluations with their step and error, and bytes sent."""
    done = options.folder / job.name / "done.json"
    if not done.exists():
        speeds = [0.5] * (HOSTS - 1) + [0.25 if job.devices == "half" else 0.5]
        devices = tuple(ClusterDevice(speed, f"host{number}") for number, speed in enumerate(speeds))
        cores = nullcontext(Places(1).of(HOSTS))
        with emulate(Cluster(devices, job.link)) if job.link else cores as places:
            sent = sum(run_ranks(train_rank, places, job, done.parent, seconds=86400.0, quiet=True))
        training = Training()
        add_evaluations(training, done.parent, options.batch)
        rows = [evaluation.model_dump() for evaluation in training.evaluations]
        write_json(done, {"evaluations": rows, "sent": sent})
        harness.say(f"{job.name}: {rows[-1]['error']:.1%} wrong after {rows[-1]['step']:,} updates")
    result: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
    return result


def settings_of(method: str, options: argparse.Namespace) -> dict[str, str]:
    """Those of all jobs of a method."""
    common = {"data.path": str(options.data), "parallel.devices": str(HOSTS), "batch": str(options.batch)}
    return RECIPE | common | METHODS[method]


def tuned(method: str, options: argparse.Namespace) -> float:
    """The rate with the least error on held-out training pictures after a short training, by steps from the middle."""
    rates, errors, best = options.rates, dict[int, float](), len(options.rates) // 2
    while missing := [
        place for place in (best - 1, best, best + 1) if place in range(len(rates)) and place not in errors
    ]:
        for place in missing:
            settings = settings_of(method, options) | {
                "optimizer.lr": str(rates[place]),
                "data.validation_fraction": "0.1",
            }
            settings |= {"epochs": options.tuning, "evaluate_every": options.tuning}
            done = do(Job(f"rate-{options.batch}-{method}-{rates[place]:g}", settings), options)
            errors[place] = done["evaluations"][-1]["error"]
        best = min(errors, key=lambda place: errors[place])
    return float(rates[best])


def updates_to(curve: Sequence[Mapping[str, float]], target: float) -> float | None:
    """Updates to an error, in a line between evaluations; None where it is not reached."""
    before = {"step": 0.0, "error": 0.9}
    for now in curve:
        if now["error"] <= target:
            part = (before["error"] - target) / max(before["error"] - now["error"], 1e-9)
            return before["step"] + part * (now["step"] - before["step"])
        before = dict(now)
    return None


def learn(report: harness.Report, options: argparse.Namespace) -> dict[str, float | None]:
    """Rates and curves: for each method the median over the seeds of its updates to the error; None where one seed does
    not reach it."""
    reached: dict[str, float | None] = {}
    report.header("method", "rate", "error at the end", f"updates to {options.target:.0%} error")
    for method in dict.fromkeys(CURVE_OF.get(method, method) for method in options.methods):
        rate = tuned(method, options)
        settings = settings_of(method, options) | {"optimizer.lr": str(rate)}
        settings |= {"epochs": options.epochs, "evaluate_every": options.every}
        named = f"curve-{options.batch}-{method}-{rate:g}"
        jobs = [Job(f"{named}-{seed}", settings | {"seed": str(seed)}) for seed in options.seeds]
        curves = [do(job, options)["evaluations"] for job in jobs]
        report.document["rates"][method], report.document["curves"][method] = rate, curves
        numbers = [updates_to(curve, options.target) for curve in curves]
        reached[method] = None if None in numbers else statistics.median(filter(None, numbers))
        error, _ = harness.spread([100 * curve[-1]["error"] for curve in curves])
        report.row(method, f"{rate:g}", f"{error} %", _number(reached[method]))
    return reached


def study(report: harness.Report, options: argparse.Namespace) -> None:
    """All jobs, and the tables as they come."""
    report.document |= {"batch": options.batch, "target": options.target, "methods": METHODS, "rates": {}, "curves": {}}
    reached = learn(report, options)
    report.print("")
    times = dict[str, float]()
    report.header("link", "devices", "method", "s an update", "kB of each host", "s to the error", "times as soon")
    for link, devices in itertools.product(options.links, options.devices):
        exact_s = None
        for method in options.methods:
            every = dict.fromkeys(("epochs", "evaluate_every", "log_every"), options.updates)
            named = f"time-{options.batch}-{options.updates}-{link}-{devices}-{method}"
            result = do(Job(named, settings_of(method, options) | every, link, devices), options)
            last = result["evaluations"][-1]
            update_s, sent = last["train_s"] / last["step"], result["sent"] / HOSTS / last["step"]
            times.setdefault(method, update_s)
            updates = reached[CURVE_OF.get(method, method)]
            to_s = None if updates is None else updates * update_s
            exact_s = to_s if method == "sample" else exact_s
            ratio = f"{exact_s / to_s:.2f}" if exact_s and to_s else ""
            cells = (f"{update_s:.3f}", f"{sent / 1e3:,.0f}", _number(to_s), ratio)
            where, figures = {"link": link, "devices": devices, "method": method}, {"update_s": update_s, "sent": sent}
            report.row(*where.values(), *cells, **where, **figures, to_s=to_s)
    if options.out is not None:
        with ax.house_style():
            draw(report.document, times, options.out)


def draw(document: Mapping[str, Any], update_s: Mapping[str, float], out: Path) -> None:
    """The median error of the seeds over samples and over time, in the range between them."""
    for unit, scale in {"samples": dict.fromkeys(update_s, document["batch"]), "seconds": update_s}.items():
        axes = ax.panel("Test error, %", unit, list(scale))
        for place, (method, factor) in enumerate(scale.items()):
            curves, look = document["curves"][CURVE_OF.get(method, method)], ax.look(place)
            x = [factor * evaluation["step"] for evaluation in curves[0]]
            errors = 100 * np.array([[evaluation["error"] for evaluation in curve] for curve in curves])
            ax.band(axes, x, errors.min(0), errors.max(0), look["color"])
            axes.plot(x, np.median(errors, 0), label=method, markersize=4, **look)
        ax.course_axis(axes, axes.get_xlim()[1])
        ax.figure_of(ax.with_legend(axes)).savefig(out.with_name(f"{out.stem}-{unit}.svg"))


def _number(value: float | None) -> str:
    return "not reached" if value is None else f"{value:,.0f}"


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
    parser.add_argument("--epochs", default="4ep", help="of a whole training (4)")
    parser.add_argument("--updates", default="400ba", help="on emulated hosts (400ba); stops need thousands")
    options = parser.parse_args()
    vars(options).update(SMALL if options.small else WHOLE)
    with harness.report(options.out) as report:
        options.folder.mkdir(parents=True, exist_ok=True)
        study(report, options)


if __name__ == "__main__":
    main()
