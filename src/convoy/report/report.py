"""Writes the report of a run: one HTML file that holds everything, opens from disk and asks nothing of a network."""

import re
from collections.abc import Iterable
from datetime import datetime
from itertools import count
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from convoy import units
from convoy.files import write_atomically, writing
from convoy.planner.comparison import WORDS, Both, Comparison, Group, apart, difference, shown
from convoy.plans.traffic import listed, some_ranks
from convoy.report import pages
from convoy.report.pages import Download, read_picture
from convoy.report.plots import draw_panels
from convoy.report.remarks import about, bench_command, num_test_images, remarks, result_tiles, status
from convoy.report.run import Run, column, counts_of, read_run
from convoy.run.records import EvaluationFile, StageRecord
from convoy.tasks.metric import metric_name, palette
from convoy.terminal import printable
from convoy.version import __version__

LARGEST_MATRIX = 20  # more classes than this are not readable as a table on a page


def write_report(run: Path) -> Path:
    """Write `report.html` into the run directory `run`, as a whole or not at all, and give its path.

    The same run gives the same bytes. Everything but `config.yaml` may be missing or incomplete: the page says so. A
    ConvoyError where `run` is no run directory, a file in it is corrupt, or the page cannot be written.
    """
    content = render(read_run(run)).encode("utf-8", errors="replace")
    report = Path(run) / "report.html"
    with writing(report, "free space there, or copy the run"):
        write_atomically(report, lambda path: path.write_bytes(content))
    return report


def render(run: Run) -> str:
    """The page of a run as HTML."""
    return pages.render("report.html.jinja", ("report.css", "bars.css"), ("copy.js",), **_content(run))


def _content(run: Run) -> dict[str, Any]:
    word, kind = status(run)
    summary, evaluation, lines = run.summary, run.evaluation, reversed([*run.metrics.train, *run.metrics.test])
    model = summary.model or _text(run.setting("model.name"))
    data = summary.data or _text(run.setting("data.path"))
    return {
        "name": "report",
        "over": "training report",
        "title": units.shorten(model or run.path.resolve().name, 60),
        "subject": units.shorten(PurePath(data).name or data, 60),
        "status": word,
        "status_kind": kind,
        "facts": [run.path.resolve().name, *_facts(run)],
        "remarks": remarks(run),
        "about": about(run),
        "bench": bench_command(run),
        "tiles": result_tiles(run),
        "panels": draw_panels(run),
        "updates_per_epoch": next((round(line.step / line.epoch) for line in lines if line.epoch), None),
        "pieces": len(run.metrics.train) > 600,
        "tests": _tests(run),
        "split": run.metrics.split,
        "final_split": summary.split or run.metrics.split,
        "places": units.percent_places(num_test_images(run)),
        "compared": compared(run.prediction),
        "stages": _stages(run),
        "words": {"ranks": some_ranks, "takes": listed, "time": shown},
        "evaluation": evaluation,
        **confusion(evaluation),
        "mistakes": _mistakes(run.path, evaluation),
        "task": run.task,
        "named": {name: metric_name(name) for name in run.named},
        "best_name": metric_name(run.summary.best_metric or "top1") if run.decides else "",
        "colors": [f"rgb({red},{green},{blue})" for red, green, blue in palette()],
        "class_columns": [
            name if (name := metric_name(key)) != key else key.capitalize()
            for key in next(iter(run.evaluation.per_class), {})
        ],
        "shown": [(shown, read_picture(run.path, shown.picture)) for shown in evaluation.pictures],
        "summary": summary,
        "command": _text(run.environment.get("command")),
        "configuration": _highlighted(run.config_text),
        "environment": {
            key: value for key, value in run.environment.items() if key not in ("command", "restarts", "data")
        },
        "restarts": _restarts(run),
        "download": Download.of("metrics.jsonl", run.metrics.raw) if run.metrics.raw else None,
        "version": _text(run.environment.get("convoy")) or __version__,
    }


def _facts(run: Run) -> list[str]:
    environment, seed = run.environment, run.setting("seed")
    started, torch = _moment(environment.get("started")), environment.get("torch")
    facts = [f"started {started}" if started else "", f"seed {seed}" if seed is not None else ""]
    return [fact for fact in (*facts, _text(environment.get("machine")), f"PyTorch {torch}" if torch else "") if fact]


def _moment(value: object) -> str:
    """A moment as people write it, or whatever stands in its place."""
    try:
        moment = datetime.fromisoformat(_text(value))
    except ValueError:
        return _text(value)
    return moment.strftime("%Y-%m-%d %H:%M") + (f" {moment.tzname()}" if moment.tzinfo else "")


def _restarts(run: Run) -> list[dict[str, Any]]:
    """When the run was started again, after how many updates, on how many devices, under which plan, on other data."""
    restarts = run.environment.get("restarts")
    records = [restart for restart in restarts if isinstance(restart, dict)] if isinstance(restarts, list) else []
    blank = dict.fromkeys(("after", "devices", "plan", "data"))
    return [{**blank, **record, "started": _moment(record.get("started"))} for record in records]


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _tests(run: Run) -> list[dict[str, Any]]:
    """The rows of the table of evaluations: each test line, and the training loss of the last line before it."""
    train, train_steps = run.metrics.train, column(run.metrics.train, "step")
    best = max(run.metrics.test, key=lambda line: -1.0 if line.top1 is None else line.top1, default=None)
    rows = []
    for line in run.metrics.test:
        number = int(train_steps.searchsorted(line.step, side="right"))
        train_loss = train[number - 1].loss if number else None
        is_best = line.step == run.summary.best_step if run.decides else line is best and line.top1 is not None
        rows.append({"line": line, "train_loss": train_loss, "best": is_best})
    return rows


def _stages(run: Run) -> list[tuple[int, StageRecord, Group | None]]:
    """The stages, numbered; what each computes and waits for is measured, and missing in short runs."""
    stages, times = run.summary.stages, run.prediction.stages if run.prediction is not None else ()
    return list(zip(count(1), stages, times if len(times) == len(stages) else [None] * len(stages)))


def _mistakes(run: Path, evaluation: EvaluationFile) -> list[dict[str, Any]]:
    """Mistakes with names for their classes and their pictures, as far as there are any."""
    names = dict(enumerate(evaluation.classes))
    return [
        {
            "name": mistake.name or f"test image {mistake.sample}",
            "true": names.get(mistake.label, f"class {mistake.label}"),
            "predicted": names.get(mistake.predicted, f"class {mistake.predicted}"),
            "probability": mistake.probability,
            "picture": read_picture(run, mistake.picture),
        }
        for mistake in evaluation.mistakes[:24]
    ]


def _highlighted(text: str) -> Markup:
    """The configuration with its keys marked; all of it is escaped before."""
    safe = str(escape(printable(text.rstrip(), keep="\n\t")))
    return Markup(
        re.sub(r"^([ \t]*(?:- )?)([\w./-]+)(?=:(?:\s|$))", r'\1<span class="key">\2</span>', safe, flags=re.M)
    )


# The parts of an update whose color has another name.
_COLORS = {"rest": "around", "waiting": "transfer", "stages": "idle", "optimizer": "update"}


def compared(comparison: Comparison | None) -> dict[str, Any] | None:
    """The section on an update, predicted beside measured; None where nothing was measured."""
    if comparison is None or comparison.update.measured_s is None:
        return None
    update = comparison.update
    parts = {name: both for name, both in comparison.parts.items() if name in WORDS and both.longest > 0}
    whole = _sum(parts.values())
    sentence = f"An update took {shown(update.measured_s)}, the median of {comparison.timed}"
    if off := _difference(update):
        sentence += f"; {shown(update.predicted_s)} were predicted ({off})"
    groups = {group.title: {"forward": group.computes, "waiting": group.waits} for group in comparison.groups}
    return {
        "comparison": comparison,
        "sentence": f"{sentence}.",
        "both": update.predicted_s is not None,  # there is a prediction
        "parts": parts,
        "groups": groups,
        "sum_of": _sum,
        "longest": max((_sum(times.values()).longest for times in groups.values()), default=0.0) or 1.0,
        "off": _difference,
        "words": WORDS,
        "colors": {name: _COLORS.get(name, name) for name in WORDS},
        # what the measured parts add up to, and why that is not what an update takes
        "sum": f"{shown(whole.measured_s)}{apart(whole.measured_s or 0.0, update.measured_s)}",
    }


def _difference(both: Both) -> str:
    if not both.predicted_s or both.error is None:
        return ""
    return difference(both.error) if both.error < 9.995 else f"{both.error + 1:.0f} ×"


def _sum(times: Iterable[Both]) -> Both:
    sides = zip(*((both.predicted_s, both.measured_s) for both in times), strict=True)
    sums = [[seconds for seconds in side if seconds is not None] for side in sides]
    return Both(*(sum(seconds) if seconds else None for seconds in sums))


def confusion(evaluation: EvaluationFile) -> dict[str, Any]:
    """The counts of an evaluation, [true class, predicted class], as the page shows them."""
    names = evaluation.classes if evaluation.confusion else []
    counts = counts_of(evaluation)
    right, images, predicted = np.diag(counts), counts.sum(1), counts.sum(0)
    wrong, shares = counts - np.diag(right), counts / np.maximum(images[:, None], 1)
    both = np.where((images > 0) & (predicted > 0), images + predicted, 0)
    # every class in the order of the data; a share is None where there is nothing that it is of
    classes: list[dict[str, Any]] = [
        {
            "name": name,
            "images": int(images[place]),
            "recall": _share(right[place], images[place]),
            "precision": _share(right[place], predicted[place]),  # of the images taken for it
            "f1": _share(2 * right[place], both[place]),  # harmonic mean of both
            # what it is taken for most often
            "mostly": names[int(wrong[place].argmax())] if wrong[place].any() else "",
        }
        for place, name in enumerate(names)
    ]
    many = len(names) > LARGEST_MATRIX
    order = np.argsort(-wrong, axis=None, kind="stable")[: 12 if many else 8]
    pairs = [
        {
            "true": names[true],
            "predicted": names[taken_for],
            "count": int(wrong[true, taken_for]),
            "share": shares[true, taken_for],  # of the images of the true class
        }
        for true, taken_for in zip(*np.unravel_index(order, wrong.shape), strict=True)
        if wrong[true, taken_for] > 0
    ]
    matrix = None
    if names and not many:
        # Right answers are shaded by recall, mistakes by the square root of their share relative to the worst, so that
        # rare ones are still seen.
        recalls = np.diag(np.diag(shares))
        mistakes = shares - recalls
        shades = (recalls + np.sqrt(mistakes / max(mistakes.max(), 1e-12))).round(3).tolist()
        cells = [list(zip(*row, strict=True)) for row in zip(counts.tolist(), shades, strict=True)]
        matrix = list(zip(classes, cells, strict=True))
    return {
        "classes": sorted(classes, key=lambda row: 2 if row["recall"] is None else row["recall"]) if many else classes,
        "pairs": pairs,  # that were confused most often, the most frequent first
        "matrix": matrix,
    }


def _share(part: int, whole: int) -> float | None:
    return float(part / whole) if whole else None
