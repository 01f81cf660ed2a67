"""The page of a study of the batch, its pictures and its table; and what the numbers say, in sentences."""

import json
import math
import statistics
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from convoy import units
from convoy.bench.batches import LONGEST, NAME, PERFECT, BatchRow, BatchStudy, agreement
from convoy.bench.page import Written, render
from convoy.bench.plots import COLORS, DASHES, MARKERS
from convoy.bench.results import Table
from convoy.documents import dump
from convoy.report import axes as ax
from convoy.report.pages import Drawing, Tile, drawn

_PLOT, _NOTHING = 170, "No training has reached the target yet."
_LEAD = (
    "Updates to the target fall as 1/batch where scaling is perfect (the gray line), then more slowly, then not at all "
    "(Shallue et al., 2019). Bands reach from the fewest to the most updates of the seeds."
)


def write_batches(folder: Path) -> Written:
    """Write all files of the study in a folder, as far as it has come."""
    study = BatchStudy.read(folder)
    facts, names = study.facts, list(study.facts["recipes"])
    records = [_record(study, row) for name in names for row in study.reached(name)]
    table = Table(list(map(_cells, records)), records, facts["model"])
    missing = list(_missing(study))
    remarks = [line for line in (*_regimes(study), *_agreement(study, folder), *_how(study)) if line]
    lines = {name: [(row.batch, row.updates, row.ends) for row in study.reached(name)] for name in names}
    panels = [
        drawn(
            "updates", f"Updates to {facts['target']:.1%} test accuracy", partial(_over_batch, lines, True), _NOTHING
        ),
        drawn("times", "Time to the target, s", partial(_over_batch, _times(study), False), _NOTHING),
    ]
    content = {
        "name": "study of the batch",
        "title": units.shorten(facts["model"], 60),
        "subject": f"batches {', '.join(map(str, study.batches))}",
        "status": "incomplete" if missing else "complete",
        "status_kind": "warn" if missing else "good",
        "facts": [f"target {facts['target']:.1%}", str(study.machine.get("machine", ""))],
        "tiles": [Tile("Perfect scaling up to", _last_perfect(study, name), name) for name in names if lines[name]],
        "timed": False,
        "trained_lead": _LEAD,
        "trained_title": "Table",
        "trained_remarks": remarks,
        "missing": missing,
        "commands": study.commands,
        "machine": study.machine,
        "cluster": "",
        "recipe": dump(facts["recipes"]).rstrip(),
    }
    report = render(folder, NAME, content, panels, {"batches.csv": table.csv()}, trained=table)
    return Written({"batches": table}, [*missing, *remarks], report)


def _last_perfect(study: BatchStudy, optimizer: str) -> str:
    regimes = study.regimes(optimizer)
    largest = max((batch for batch, regime in regimes.items() if regime == PERFECT), default=None)
    return f"less than {min(regimes)}" if largest is None else str(largest)


def _record(study: BatchStudy, row: BatchRow) -> dict[str, Any]:
    alone = [step.seconds for step in study.step_times if (step.batch, step.devices) == (row.batch, 1)]
    record = {"optimizer": row.optimizer, "batch": row.batch, "lr": row.lr, "updates": row.updates}
    record |= {"fewest": row.ends[0], "most": row.ends[-1], "reached": len(row.ends)}
    record |= {"epochs": round(row.updates * row.batch / study.facts["num_train"], 3), "noise_scale": row.noise_scale}
    regime = study.regimes(row.optimizer).get(row.batch, "")
    return record | {"one_device_s": round(row.updates * alone[0], 3) if alone else None, "regime": regime}


def _cells(record: Mapping[str, Any]) -> dict[str, str]:
    seconds, scale = record["one_device_s"], record["noise_scale"]
    return {
        "configuration": f"{record['optimizer']}, batch {record['batch']}",
        "rate": f"{record['lr']:g}",
        "updates": f"{record['updates']:,g}",
        "of all seeds": f"{record['fewest']} to {record['most']}" if record["reached"] > 1 else units.UNKNOWN,
        "epochs": units.significant(record["epochs"]),
        "one device": units.UNKNOWN if seconds is None else units.seconds(seconds),
        "noise scale": units.UNKNOWN if scale is None else units.significant(scale, 2),
        "regime": record["regime"],
    }


def _missing(study: BatchStudy) -> Iterator[str]:
    for name in study.facts["recipes"]:
        rows = {row.batch: row for row in study.rows if row.optimizer == name}
        if absent := [str(batch) for batch in study.batches if batch not in rows]:
            yield f"{name} is not trained to the end yet at {', '.join(absent)}; the same command goes on."
        for batch, row in rows.items():
            if row.updates == math.inf:
                best = row.failure if row.failure is not None else f"the best was {row.top1:.2%}"
                yield f"{name} did not reach the target at a batch of {batch}: {best.rstrip('.')}."


def _regimes(study: BatchStudy) -> Iterator[str]:
    for name in study.facts["recipes"]:
        if largest := {regime: batch for batch, regime in study.regimes(name).items()}:
            yield f"{name}: {', '.join(f'{regime} up to {batch}' for regime, batch in largest.items())}."


def _agreement(study: BatchStudy, folder: Path) -> Iterator[str]:
    """What study, branches and noise scale say of the largest useful batch. Branches are those in the folder."""
    branches = [json.loads(path.read_bytes())["useful"] for path in sorted(folder.glob("*/branches.json"))]
    scales = [row.noise_scale for row in study.rows if row.noise_scale]
    sizes = {"the study": study.critical()}
    sizes |= {"branches": statistics.median(branches) if branches else None}
    yield agreement(sizes | {"the gradient noise scale": statistics.median(scales) if scales else None})


def _how(study: BatchStudy) -> Iterator[str]:
    rule = "the optimizer's rule, not tuned"
    if study.facts["tune"]:
        rule = "a search from the rate of the neighboring batch, scaled: by factors of two until the best is inside, "
        rule += "then the middle to its better neighbor"
    yield f"Rates are by {rule}. A training ends at {LONGEST:g} times the updates of the best rate so far."
    measured = max((step.devices for step in study.step_times if step.measured), default=1)
    yield (
        f"Time is updates times the seconds of one: measured on up to {units.plural(measured, 'device')}, on more "
        "predicted by the planner with assumed links; evaluations and checkpoints are left out."
    )


Lines = Mapping[str, list[tuple[int, float, list[int]]]]  # batch, value, and all values of a band; by name


def _times(study: BatchStudy) -> Lines:
    """Of the optimizer with the fewest updates at each batch, on each number of devices."""
    fewest, lines = {row.batch: row.updates for row in study.reached()}, dict[str, list[tuple[int, float, list[int]]]]()
    for step in sorted(study.step_times, key=lambda step: (step.devices, step.batch)):
        if step.batch in fewest:
            name = f"{units.plural(step.devices, 'device')}{'' if step.measured else ', predicted'}"
            lines.setdefault(name, []).append((step.batch, fewest[step.batch] * step.seconds, []))
    return lines


def _over_batch(lines: Lines, with_rule: bool, title: str) -> Drawing:
    """Lines over the batch, both axes logarithmic; those that are predicted are hollow."""
    if not any(lines.values()):
        return None
    axes = ax.panel(title, "batch", _PLOT, [*(["perfect scaling"] if with_rule else []), *lines], 2)
    axes.set_xscale("log")
    if with_rule:
        (batch, most, _), *_ = points = next(points for points in lines.values() if points)
        x = [point[0] for point in points]
        axes.plot(x, [most * batch / b for b in x], color=ax.MUTED, linestyle=DASHES[2], label="perfect scaling")
    for place, (name, points) in enumerate(lines.items()):
        look: dict[str, Any] = {"color": COLORS[place % len(COLORS)], "marker": MARKERS[place % len(MARKERS)]}
        look |= {"markerfacecolor": "none", "linestyle": DASHES[1]} if "predicted" in name else {}
        x = [batch for batch, _, _ in points]
        axes.plot(x, [value for _, value, _ in points], label=name, markersize=4.5, clip_on=False, **look)
        if points and points[0][2]:
            low, high = [min(band) for _, _, band in points], [max(band) for _, _, band in points]
            axes.fill_between(x, low, high, color=look["color"], alpha=0.2, linewidth=0)
    ax.wide_axis(axes, np.array([value for points in lines.values() for _, value, _ in points]))
    batches = sorted({batch for points in lines.values() for batch, _, _ in points})
    axes.xaxis.set_major_locator(FixedLocator(batches[:: -(-len(batches) // 7)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.tick(value)))
    words = (f"{name} at {b}: {units.significant(y)}." for name, points in lines.items() for b, y, _ in points)
    return " ".join(words), ax.with_legend(axes, 2)
