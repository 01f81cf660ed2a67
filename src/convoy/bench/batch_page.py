"""The page of a study of the batch, its pictures and its table; and what the numbers say, in sentences."""

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

Rows = Mapping[str, list[tuple[BatchRow, str]]]  # by optimizer, those that reached the target, with their regimes
Points = Mapping[str, list[tuple[int, float]]]  # lines over the batch, by their names
_PLOT, _NOTHING = 170, "No training has reached the target yet."
_LEAD = (
    "Updates to the target fall as 1/batch where scaling is perfect (the gray line), then more slowly, then not at all "
    "(Shallue et al., 2019). Bands reach from the fewest to the most updates of the seeds."
)


def write_batches(folder: Path) -> Written:
    """Write all files of the study in a folder, as far as it has come."""
    study = BatchStudy.read(folder)
    rows: dict[str, list[tuple[BatchRow, str]]] = {}
    for name in study.facts.recipes:
        of_name = [row for row in study.rows(name) if row.reached]
        names = regimes([row.best.batch for row in of_name], [row.updates for row in of_name])
        rows[name] = list(zip(of_name, names, strict=True))
    records = [_record(study, row, regime) for of_name in rows.values() for row, regime in of_name]
    table = Table(list(map(_cells, records)), records, study.facts.model)
    missing, remarks = list(_missing(study)), [*_regimes(rows), *_how(study)]
    panels = [
        drawn("updates", f"Updates to {study.facts.target:.1%} test accuracy", partial(_updates, rows), _NOTHING),
        drawn("rates", "Best learning rate", partial(_rates, rows), _NOTHING),
        drawn("times", "Time to the target, s", partial(_times, study), _NOTHING),
    ]
    content = {
        "name": "study of the batch",
        "title": units.shorten(study.facts.model, 60),
        "subject": f"batches {', '.join(map(str, study.batches))}",
        "status": "incomplete" if missing else "complete",
        "status_kind": "warn" if missing else "good",
        "facts": [f"target {study.facts.target:.1%}", str(study.machine.get("machine", ""))],
        "tiles": [Tile("Perfect scaling up to", _last_perfect(rows[name]), name) for name in rows if rows[name]],
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


def _last_perfect(rows: list[tuple[BatchRow, str]]) -> str:
    """The largest batch up to which twice the batch needs about half the updates."""
    largest = max((row.best.batch for row, regime in rows if regime == PERFECT), default=None)
    return f"less than {rows[0][0].best.batch}" if largest is None else str(largest)


def _record(study: BatchStudy, row: BatchRow, regime: str) -> dict[str, Any]:
    best, (low, high) = row.best, row.band
    alone = [step.seconds for step in study.step_times if (step.batch, step.devices) == (best.batch, 1)]
    record = {"optimizer": best.optimizer, "batch": best.batch, "lr": best.lr, "updates": row.updates}
    record |= {"fewest": low, "most": high, "seeds": len(row.trials)}
    record |= {"epochs": round(row.updates * best.batch / study.facts.num_train, 3)}
    return record | {"one_device_s": round(row.updates * alone[0], 3) if alone else None, "regime": regime}


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


def _regimes(rows: Rows) -> Iterator[str]:
    for name, of_name in rows.items():
        largest = {regime: row.best.batch for row, regime in of_name}
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


def _panel(title: str, lines: Points, rules: Mapping[str, float], hollow: str = ", predicted") -> tuple[str, Axes]:
    """Lines over the batch, both axes logarithmic, and powers of the batch through the first point, by their names;
    hollow are those of whose names this is a part."""
    axes = ax.panel(title, "batch", _PLOT, [*rules, *lines], 2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    first = next(points for points in lines.values() if points)
    for (label, power), dashes in zip(rules.items(), DASHES[1:], strict=False):
        y = [first[0][1] * (batch / first[0][0]) ** power for batch, _ in first]
        axes.plot([batch for batch, _ in first], y, color=ax.MUTED, linestyle=dashes, linewidth=1, label=label)
    for place, (name, points) in enumerate(lines.items()):
        look: dict[str, Any] = {"color": COLORS[place % len(COLORS)], "marker": MARKERS[place % len(MARKERS)]}
        look |= {"markerfacecolor": "none", "linestyle": DASHES[1]} if hollow in name else {}
        x, y = [batch for batch, _ in points], [value for _, value in points]
        axes.plot(x, y, label=name, markersize=4.5, clip_on=False, **look)
    batches = sorted({batch for points in lines.values() for batch, _ in points})
    axes.xaxis.set_major_locator(FixedLocator(batches[:: -(-len(batches) // 7)]))
    axes.yaxis.set_major_locator(FixedLocator(_ticks(*axes.get_ylim())))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: units.tick(value)))
    words = (f"{name} at {batch}: {units.significant(y)}." for name, points in lines.items() for batch, y in points)
    return " ".join(words), axes


def _ticks(low: float, high: float) -> list[float]:
    """Some round numbers of a logarithmic axis."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (
        (1, 2, 3, 5, 7) if high < 10 * low else (1, 2, 5) if high < 100 * low else (1, 3) if high < 1e3 * low else (1,)
    )
    return [step * 10.0**decade for decade in decades for step in steps]


def _over_batch(rows: Rows, value: Callable[[BatchRow], float]) -> Points:
    return {name: [(row.best.batch, value(row)) for row, _ in of_name] for name, of_name in rows.items()}


def _updates(rows: Rows, title: str) -> Drawing:
    if not any(rows.values()):
        return None
    words, axes = _panel(title, _over_batch(rows, lambda row: row.updates), {"perfect scaling": -1})
    for color, of_name in zip(COLORS, rows.values(), strict=False):
        low, high = zip(*(row.band for row, _ in of_name), strict=True) if of_name else ((), ())
        axes.fill_between([row.best.batch for row, _ in of_name], low, high, color=color, alpha=0.2, linewidth=0)
    return words, ax.with_legend(axes, 2)


def _rates(rows: Rows, title: str) -> Drawing:
    if not any(rows.values()):
        return None
    rules = {"linear rule": 1, "square-root rule": 0.5}
    words, axes = _panel(title, _over_batch(rows, lambda row: row.best.lr), rules)
    return words, ax.with_legend(axes, 2)


def _times(study: BatchStudy, title: str) -> Drawing:
    """Of the optimizer with the fewest updates at each batch, on each number of devices."""
    fewest, lines = study.fewest(), dict[str, list[tuple[int, float]]]()
    for step in sorted(study.step_times, key=lambda step: (step.devices, step.batch)):
        if step.batch in fewest:
            name = f"{units.plural(step.devices, 'device')}{'' if step.measured else ', predicted'}"
            lines.setdefault(name, []).append((step.batch, fewest[step.batch] * step.seconds))
    if not lines:
        return None
    words, axes = _panel(title, lines, {})
    return words, ax.with_legend(axes, 2)
