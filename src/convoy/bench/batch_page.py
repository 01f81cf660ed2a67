"""The page of a study of the batch, its pictures and its table; and what the numbers say, in sentences."""

import json
import math
import statistics
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from convoy import units
from convoy.bench.batches import LONGEST, PERFECT, BatchRow, BatchStudy, agreement
from convoy.bench.page import Written, write_trainings
from convoy.bench.results import Table
from convoy.documents import dump
from convoy.report import axes as ax
from convoy.report.pages import Drawing, Tile, drawn

_NOTHING = "No training has reached the target yet."
Point = tuple[int, float, list[int]]  # batch, value, and all values of a band
Lines = Mapping[str, list[Point]]  # by name
_LEAD = (
    "Updates to the target fall as 1/batch where scaling is perfect (the gray line), then more slowly, then not at all "
    "(Shallue et al., 2019). Bands reach from the fewest to the most updates of the seeds."
)


def write_batches(folder: Path) -> Written:
    """Write all files of the study in a folder, as far as it has come."""
    study = BatchStudy.read(folder)
    names, target = list(study.facts["recipes"]), f"{study.facts['target']:.1%}"
    lines: Lines = {name: [(row.batch, row.updates, row.ends) for row in study.reached(name)] for name in names}
    times: dict[str, list[Point]] = {}
    for row, devices, took_s in sorted(study.times(), key=lambda time: time[1]):
        name = f"{units.plural(devices, 'device')}{', predicted' * (devices > 1)}"
        times.setdefault(name, []).append((row.batch, took_s, []))
    rows = [row for name in names for row in study.reached(name)]
    records = [row.model_dump(exclude={"failure"}) | {"fewest": row.ends[0], "most": row.ends[-1]} for row in rows]
    table = Table([_cells(study, row) for row in rows], records, study.facts["model"])
    panels = [
        drawn(
            "updates", f"Updates to {target} test accuracy", partial(_over_batch, lines, "perfect scaling"), _NOTHING
        ),
        drawn("times", "Time to the target, s", partial(_over_batch, times, ""), _NOTHING),
    ]
    largest = {row.optimizer: row.batch for row in rows if row.regime == PERFECT}
    return write_trainings(
        study,
        table,
        panels,
        list(_missing(study)),
        [line for line in (*_regimes(study), *_agreement(study, folder), *_how(study)) if line],
        name="study of the batch",
        subject=f"batches {', '.join(map(str, study.batches))}",
        facts=[f"target {target}", str(study.machine.get("machine", ""))],
        tiles=[Tile("Perfect scaling up to", str(batch), name) for name, batch in largest.items()],
        trained_lead=_LEAD,
        recipe=dump(study.facts["recipes"]).rstrip(),
    )


def _cells(study: BatchStudy, row: BatchRow) -> dict[str, str]:
    return {
        "configuration": f"{row.optimizer}, batch {row.batch}",
        "rate": f"{row.lr:g}",
        "updates": f"{row.updates:,g}",
        **({"of all seeds": f"{row.ends[0]} to {row.ends[-1]}"} if study.seeds > 1 else {}),
        "epochs": units.significant(row.updates * row.batch / study.facts["num_train"]),
        "one device": units.seconds(row.updates * row.update_s),
        "noise scale": units.UNKNOWN if row.noise_scale is None else units.significant(row.noise_scale, 2),
        "regime": row.regime,
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
        if largest := {row.regime: row.batch for row in study.reached(name) if row.regime}:
            yield f"{name}: {', '.join(f'{regime} up to {batch}' for regime, batch in largest.items())}."


def _agreement(study: BatchStudy, folder: Path) -> Iterator[str]:
    """What study, branches and noise scale say of the largest useful batch. Branches are those in the folder."""
    branches = list[float]()
    for path in sorted(folder.glob("*/branches.json")):
        try:
            branches.append(float(json.loads(path.read_bytes())["useful"]))
        except (OSError, ValueError, LookupError, TypeError):
            yield f"{path.parent.name}/{path.name} is damaged, and left out."
    scales = [row.noise_scale for row in study.rows if row.noise_scale]
    sizes = {"branches": branches, "the gradient noise scale": scales}
    medians = {name: statistics.median(numbers) if numbers else None for name, numbers in sizes.items()}
    yield agreement({"the study": study.critical()} | medians)


def _how(study: BatchStudy) -> Iterator[str]:
    tuned = "tuned by factors of two, from that of the neighboring batch, then of the square root of two"
    tuned = tuned if study.facts["tune"] else "by the optimizer's rule, not tuned"
    yield f"Rates are {tuned}. A training ends at {LONGEST:g} times the updates of the best rate so far."
    yield (
        "The target is of the test split at every evaluation, as time-to-accuracy is published; of a validation split "
        "where the data have one, or data.validation_fraction holds one out."
    )
    yield (
        "Time on one device is that of the training, without evaluations and checkpoints; on more it is divided by the "
        "speed-up that the planner predicts with assumed links."
    )


def _over_batch(lines: Lines, rule: str, title: str) -> Drawing:
    """Lines over the batch, both axes logarithmic; those that are predicted are hollow."""
    if not any(lines.values()):
        return None
    axes = ax.panel(title, "batch", [*filter(None, [rule]), *lines])
    if rule:
        (batch, most, _), *_ = points = next(points for points in lines.values() if points)
        x = [point[0] for point in points]
        axes.plot(x, [most * batch / b for b in x], color=ax.MUTED, linestyle=ax.DASHES[2], label=rule)
    for place, (name, points) in enumerate(lines.items()):
        look = ax.look(place)
        look |= {"markerfacecolor": "none", "linestyle": ax.DASHES[1]} if "predicted" in name else {}
        x = [batch for batch, _, _ in points]
        axes.plot(x, [value for _, value, _ in points], label=name, markersize=4.5, clip_on=False, **look)
        if points and points[0][2]:
            low, high = [min(band) for _, _, band in points], [max(band) for _, _, band in points]
            ax.band(axes, x, low, high, look["color"])
    every = [point for points in lines.values() for point in points]
    ax.log_axes(axes, [batch for batch, _, _ in every], [value for _, value, _ in every])
    words = (f"{name} at {b}: {units.significant(y)}." for name, points in lines.items() for b, y, _ in points)
    return " ".join(words), ax.with_legend(axes)
