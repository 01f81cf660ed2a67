"""Writes the report of a run: one HTML file that holds everything, opens from disk and asks nothing of a network."""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from convoy import units
from convoy.errors import ConvoyError
from convoy.files import write_atomically
from convoy.planner.comparison import WORDS, Both, Comparison, Group, apart, difference, shown
from convoy.plans.traffic import listed, some_ranks
from convoy.report import pages
from convoy.report.pages import Download, read_picture
from convoy.report.plots import draw_panels
from convoy.report.remarks import about, bench_command, num_test_images, remarks, result_tiles, status
from convoy.report.run_directory import Run, column, read_run
from convoy.run.records import EvaluationFile, StageRecord
from convoy.tasks.metric import metric_name, palette
from convoy.terminal import printable
from convoy.version import __version__

MOST_BAD_IMAGES = 200
LARGEST_MATRIX = 20  # more classes than this are not readable as a table on a page


def write_report(run: Path) -> Path:
    """Write `report.html` into the run directory `run`, as a whole or not at all, and give its path.

    The same run gives the same bytes. Everything but `config.yaml` may be missing or incomplete: the page says so. A
    ConvoyError where `run` is no run directory, a file in it is corrupt, or the page cannot be written.
    """
    content = render(read_run(run)).encode("utf-8", errors="replace")
    report = Path(run) / "report.html"
    try:
        write_atomically(report, lambda path: path.write_bytes(content))
    except OSError as error:
        raise ConvoyError(
            f"{report} cannot be written ({error.strerror}); free space there or make the directory writable."
        ) from None
    return report


def render(run: Run) -> str:
    """The page of a run as HTML."""
    return pages.render("report.html.jinja", ("report.css", "bars.css"), ("copy.js",), **_content(run))


def _content(run: Run) -> dict[str, Any]:
    word, kind = status(run)
    summary, evaluation, lines = run.summary, run.evaluation, reversed([*run.metrics.train, *run.metrics.test])
    model = summary.model or _text(run.setting("model.name"))
    data = summary.data or _text(run.setting("data.path"))
    table = Confusion(evaluation)
    many = len(evaluation.classes) > LARGEST_MATRIX
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
        "notes": summary.notes,
        "tiles": result_tiles(run),
        "panels": [(panel, panel.svg()) for panel in draw_panels(run)],
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
        "matrix": table.matrix(),
        "pairs": table.pairs(12 if many else 8),
        "classes": table.classes(),
        "hardest": table.hardest(12) if many else [],
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
        "derived": summary.derived,
        "bad_images": summary.bad_images[:MOST_BAD_IMAGES],
        "num_bad_images": len(summary.bad_images),
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
    best = max((line.top1 for line in run.metrics.test if line.top1 is not None), default=None)
    rows = []
    for line in run.metrics.test:
        number = int(train_steps.searchsorted(line.step, side="right"))
        train_loss = train[number - 1].loss if number else None
        is_best = line.step == run.summary.best_step if run.decides else line.top1 is not None and line.top1 == best
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
    groups = [(group, _sum([group.computes, group.waits])) for group in comparison.groups]
    longest = max((total.longest for _, total in groups), default=0.0) or 1.0
    return {
        "comparison": comparison,
        "sentence": f"{sentence}.",
        "both": update.predicted_s is not None,  # there is a prediction
        "whole": _row("All parts", whole, tracks=_tracks(parts, max(whole.longest, 1e-12))),
        "parts": [_row(WORDS[name], both, _COLORS.get(name, name)) for name, both in parts.items()],
        "groups": [
            _row(group.title, total, tracks=_tracks({"forward": group.computes, "waiting": group.waits}, longest))
            for group, total in groups
        ],
        # what the measured parts add up to, and why that is not what an update takes
        "sum": f"{shown(whole.measured_s)}{apart(whole.measured_s or 0.0, update.measured_s)}",
    }


def _row(name: str, both: Both, color: str = "", tracks: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Predicted beside measured, drawn and in numbers; empty where there is nothing."""
    sides = {"predicted": shown(both.predicted_s), "measured": shown(both.measured_s)}
    return {"name": name, "color": color, "tracks": tracks, **sides, "difference": _difference(both)}


def _difference(both: Both) -> str:
    if not both.predicted_s or both.error is None:
        return ""
    return difference(both.error) if both.error < 9.995 else f"{both.error + 1:.0f} ×"


def _tracks(parts: Mapping[str, Both], longest: float) -> list[dict[str, Any]]:
    """A bar of what was predicted and one of what was measured: parts as color, share of the longest bar, and text."""
    tracks = []
    for side in ("predicted", "measured"):
        seconds = {name: getattr(both, f"{side}_s") for name, both in parts.items()}
        drawn = [
            (_COLORS.get(name, name), 100 * number / longest, f"{WORDS[name]}, {side}: {shown(number)}")
            for name, number in seconds.items()
            if number
        ]
        if any(number is not None for number in seconds.values()):
            tracks.append({"name": side, "parts": drawn})
    return tracks


def _sum(times: Iterable[Both]) -> Both:
    sides = zip(*((both.predicted_s, both.measured_s) for both in times), strict=True)
    sums = [[seconds for seconds in side if seconds is not None] for side in sides]
    return Both(*(sum(seconds) if seconds else None for seconds in sums))


class Confusion:
    """The counts of an evaluation, int64 [true class, predicted class], ready to be shown."""

    def __init__(self, evaluation: EvaluationFile) -> None:
        self._names = evaluation.classes if evaluation.confusion else []
        self._counts = np.array(evaluation.confusion, dtype=np.int64).reshape(len(self._names), len(self._names))
        self._wrong = self._counts - np.diag(np.diag(self._counts))
        self._shares = self._counts / np.maximum(self._counts.sum(1, keepdims=True), 1)

    def matrix(self) -> list[dict[str, Any]] | None:
        """For each true class its cells by predicted class, or None if there is none or too many for a table.

        Right answers are shaded by recall, mistakes by the square root of their share relative to the worst, so that
        rare ones are still seen.
        """
        if not 0 < len(self._names) <= LARGEST_MATRIX:
            return None
        right = np.diag(np.diag(self._shares))
        mistakes = self._shares - right
        shades = right + (np.sqrt(mistakes / mistakes.max()) if mistakes.max() > 0 else mistakes)

        def cell(true: int, predicted: int) -> dict[str, Any]:
            count, name = int(self._counts[true, predicted]), self._names[true]
            text = f"{name}: {count} right"
            if true != predicted:
                text = f"{name} taken for {self._names[predicted]}: {count}"
            shade = round(float(shades[true, predicted]), 3)
            return {"count": count, "right": true == predicted, "shade": shade, "text": text}

        places = range(len(self._names))
        return [{**row, "cells": [cell(true, place) for place in places]} for true, row in enumerate(self.classes())]

    def pairs(self, most: int) -> list[dict[str, Any]]:
        """The `most` pairs of different classes that were confused most often, the most frequent first."""
        order = np.argsort(-self._wrong, axis=None, kind="stable")[:most]
        return [
            {
                "true": self._names[true],
                "predicted": self._names[predicted],
                "count": int(self._wrong[true, predicted]),
                "share": self._shares[true, predicted],  # of the images of the true class
            }
            for true, predicted in zip(*np.unravel_index(order, self._wrong.shape), strict=True)
            if self._wrong[true, predicted] > 0
        ]

    def classes(self) -> list[dict[str, Any]]:
        """Every class in numbers, in the order of the data; a share is None where there is nothing that it is of."""
        right, images, predicted = np.diag(self._counts), self._counts.sum(1), self._counts.sum(0)
        both = np.where((images > 0) & (predicted > 0), images + predicted, 0)
        return [
            {
                "name": name,
                "images": int(images[place]),
                "recall": _share(right[place], images[place]),
                "precision": _share(right[place], predicted[place]),  # of the images taken for it
                "f1": _share(2 * right[place], both[place]),  # harmonic mean of both
                "mostly": self._names[int(wrong.argmax())] if wrong.any() else "",  # what it is taken for most often
            }
            for place, (name, wrong) in enumerate(zip(self._names, self._wrong, strict=True))
        ]

    def hardest(self, most: int) -> list[dict[str, Any]]:
        """The `most` classes of lowest recall, the hardest first; classes without images or mistakes are left out."""
        mistaken = [row for row in self.classes() if row["recall"] is not None and row["recall"] < 1]
        return sorted(mistaken, key=lambda row: float(row["recall"]))[:most]


def _share(part: int, whole: int) -> float | None:
    return float(part / whole) if whole else None
