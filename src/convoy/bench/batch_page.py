"""The files of a study of the batch: a page, its pictures and its table; and what the numbers say, in sentences."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from convoy import units
from convoy.bench.batches import LONGEST, NAME, BatchRow, BatchStudy
from convoy.bench.page import Written, render
from convoy.bench.plots import COLORS, DASHES, MARKERS
from convoy.bench.results import Table
from convoy.bench.search import PERFECT, regimes
from convoy.documents import dump
from convoy.report import axes as ax
from convoy.report.pages import Drawing, Tile, drawn

Rows = Mapping[str, list[BatchRow]]  # by optimizer, those that reached the target
_PLOT, _NOTHING = 170, "No training has reached the target yet."
_LEAD = (
    "Updates to the target fall as 1/batch where scaling is perfect (the gray line), then more slowly, then not at all "
    "(Shallue et al., 2019). Bands reach from the fewest to the most updates of the seeds."
)


def write_batches(folder: Path) -> Written:
    """Write all files of the study in a folder, as far as it has come."""
    study = BatchStudy.read(folder)
    rows = {name: [row for row in study.rows(name) if row.reached] for name in study.facts.recipes}
    records = [_record(study, name, row, regime) for name in rows for row, regime in _with_regime(rows[name])]
    table = Table(list(map(_cells, records)), records, study.facts.model)
    missing, remarks = list(_missing(study)), [*_remarks(rows), *_how(study)]
    panels = [
        drawn("updates", f"Updates to {study.facts.target:.1%} test accuracy", partial(_updates, rows), _NOTHING),
        drawn("rates", "Best learning rate", partial(_rates, rows), _NOTHING),
        drawn("times", "Time to the target", partial(_times, study, rows), _NOTHING),
    ]
    content = {
        "name": "study of the batch",
        "title": units.shorten(study.facts.model, 60),
        "subject": f"batches {', '.join(map(str, study.batches))}",
        "status": "incomplete" if missing else "complete",
        "status_kind": "warn" if missing else "good",
        "facts": [f"target {study.facts.target:.1%}", str(study.machine.get("machine", ""))],
        "tiles": [Tile("Perfect scaling up to", str(_last_perfect(rows[name])), name) for name in rows if rows[name]],
        "timed": False,
        "trained_lead": _LEAD,
        "trained_title": "Table",
        "trained_remarks": remarks,
        "missing": missing,
        "commands": study.commands,
        "machine": study.machine,
        "cluster": "",
        "recipe": dump(study.facts.recipes).rstrip(),
    }
    report = render(folder, NAME, content, panels, {"batches.csv": table.csv()}, trained=table)
    return Written({"batches": table}, [*missing, *remarks], report)


def _with_regime(rows: list[BatchRow]) -> list[tuple[BatchRow, str]]:
    names = regimes([row.best.batch for row in rows], [row.updates for row in rows])
    return list(zip(rows, names or [""] * len(rows), strict=True))


def _last_perfect(rows: list[BatchRow]) -> int:
    """The largest batch up to which twice the batch needs about half the updates."""
    return max((row.best.batch for row, regime in _with_regime(rows) if regime == PERFECT), default=rows[0].best.batch)


def _record(study: BatchStudy, name: str, row: BatchRow, regime: str) -> dict[str, Any]:
    batch, (low, high), alone = row.best.batch, row.band, study.step_s(row.best.batch, 1)
    return {
        "optimizer": name,
        "batch": batch,
        "lr": row.best.lr,
        "updates": row.updates,
        "fewest": low,
        "most": high,
        "seeds": len(row.trials),
        "epochs": round(row.updates * batch / study.facts.num_train, 3),
        "one_device_s": None if alone is None else round(row.updates * alone.seconds, 3),
        "regime": regime,
    }


def _cells(record: Mapping[str, Any]) -> dict[str, str]:
    seconds = record["one_device_s"]
    return {
        "configuration": f"{record['optimizer']}, batch {record['batch']}",
        "rate": f"{record['lr']:g}",
        "updates": f"{record['updates']:,g}",
        **({"of all seeds": f"{record['fewest']} to {record['most']}"} if record["seeds"] > 1 else {}),
        "epochs": units.significant(record["epochs"]),
        "one device": units.UNKNOWN if seconds is None else units.seconds(seconds),
        "regime": record["regime"],
    }


def _missing(study: BatchStudy) -> Iterator[str]:
    for name in study.facts.recipes:
        rows = {row.best.batch: row for row in study.rows(name)}
        if absent := [str(batch) for batch in study.batches if batch not in rows]:
            yield f"{name} is not trained to the end yet at {', '.join(absent)}; the same command goes on."
        for batch, row in rows.items():
            if not row.reached:
                yield f"{name} did not reach the target at a batch of {batch}: the best was {row.best.top1:.2%}."


def _remarks(rows: Rows) -> Iterator[str]:
    for name, of_name in rows.items():
        largest = {regime: row.best.batch for row, regime in _with_regime(of_name)}
        if len(of_name) > 1:
            yield f"{name}: {', '.join(f'{regime} up to {batch}' for regime, batch in largest.items())}."


def _how(study: BatchStudy) -> Iterator[str]:
    found = "the optimizer's rule, not tuned"
    if study.facts.tune:
        found = "a search from the rate of the neighboring batch, scaled: by factors of two until the best is inside, "
        found += "then the middle to its better neighbor"
    yield f"Rates are by {found}. A training ends at {LONGEST:g} times the updates of the best rate so far."
    measured = max((step.devices for step in study.step_times if step.measured), default=1)
    yield (
        f"Time is updates times the seconds of one: measured on up to {units.plural(measured, 'device')}, on more "
        "predicted by the planner with assumed links; evaluations and checkpoints are left out."
    )


def _panel(title: str, rows: Rows, words: list[str]) -> Axes:
    axes = ax.panel(title, "batch", _PLOT, words, 2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    batches = sorted({row.best.batch for of_name in rows.values() for row in of_name})
    axes.xaxis.set_major_locator(FixedLocator(batches[:: -(-len(batches) // 7)]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: units.tick(value)))
    return axes


def _over_batch(
    title: str, rows: Rows, value: Callable[[BatchRow], float], rules: Mapping[str, float]
) -> tuple[str, Axes] | None:
    """A value of each row, and powers of the batch through the first point, by their names."""
    if not any(rows.values()):
        return None
    axes = _panel(title, rows, [*rules, *rows])
    first = next(of_name for of_name in rows.values() if of_name)
    batches = [row.best.batch for row in first]
    for (label, power), dashes in zip(rules.items(), DASHES[1:], strict=False):
        y = [value(first[0]) * (batch / batches[0]) ** power for batch in batches]
        axes.plot(batches, y, color=ax.MUTED, linestyle=dashes, linewidth=1, label=label)
    for place, (name, of_name) in enumerate(rows.items()):
        look: dict[str, Any] = {"color": COLORS[place], "marker": MARKERS[place], "markersize": 4.5, "clip_on": False}
        axes.plot([row.best.batch for row in of_name], list(map(value, of_name)), label=name, **look)
    words = (f"{name} at {row.best.batch}: {units.significant(value(row))}." for name in rows for row in rows[name])
    axes.yaxis.set_major_locator(_ticks(*axes.get_ylim()))
    return " ".join(words), axes


def _ticks(low: float, high: float) -> FixedLocator:
    """At most about six round numbers on a logarithmic axis."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high < 100 * low else (1, 3) if high < 1000 * low else (1,)
    return FixedLocator([step * 10.0**decade for decade in decades for step in steps])


def _updates(rows: Rows, title: str) -> Drawing:
    panel = _over_batch(title, rows, lambda row: row.updates, {"perfect scaling": -1})
    if panel is None:
        return None
    for color, of_name in zip(COLORS, rows.values(), strict=False):
        low, high = [row.band[0] for row in of_name], [row.band[1] for row in of_name]
        panel[1].fill_between([row.best.batch for row in of_name], low, high, color=color, alpha=0.2, linewidth=0)
    return panel[0], ax.with_legend(panel[1], 2)


def _rates(rows: Rows, title: str) -> Drawing:
    panel = _over_batch(title, rows, lambda row: row.best.lr, {"linear rule": 1, "square-root rule": 0.5})
    return None if panel is None else (panel[0], ax.with_legend(panel[1], 2))


def _times(study: BatchStudy, rows: Rows, title: str) -> Drawing:
    """Of the optimizer with the fewest updates at each batch, on each number of devices; predicted points are
    hollow."""
    fewest = study.fewest()
    times: dict[int, list[tuple[int, float, bool]]] = {}
    for step in sorted(study.step_times, key=lambda step: (step.devices, step.batch)):
        if step.batch in fewest:
            point = step.batch, fewest[step.batch] * step.seconds, step.measured
            times.setdefault(step.devices, []).append(point)
    if not times:
        return None
    predicted = {number for number, points in times.items() if not all(measured for _, _, measured in points)}
    labels = {n: f"{units.plural(n, 'device')}{', predicted' if n in predicted else ''}" for n in times}
    axes, words = _panel(f"{title}, s", rows, list(labels.values())), []
    for place, (number, points) in enumerate(times.items()):
        look: dict[str, Any] = {"color": COLORS[place % len(COLORS)], "marker": MARKERS[place % len(MARKERS)]}
        look |= {"markerfacecolor": "none", "linestyle": DASHES[1]} if number in predicted else {}
        axes.plot(*zip(*(point[:2] for point in points), strict=True), label=labels[number], markersize=4.5, **look)
        batch, seconds, _ = min(points, key=lambda point: point[1])
        words.append(f"{labels[number]}: fastest at {batch}, {units.seconds(seconds)}.")
    axes.yaxis.set_major_locator(_ticks(*axes.get_ylim()))
    return " ".join(words), ax.with_legend(axes, 2)
