"""The page of a study of trials or folds: its table, its pictures, and the command that trains with the best values."""

import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from convoy import units
from convoy.bench.page import Written, write_trainings
from convoy.bench.results import Table
from convoy.bench.trials import TrialStudy, space_of
from convoy.documents import dump
from convoy.report import axes as ax
from convoy.report.pages import Drawing, Tile, drawn
from convoy.tasks.metric import metric_in_words, metric_name

_OF_TRIALS = re.compile(r" --(over|budget|devices|out)[ =]('[^']*'|\S+)| --json\b")  # what one training has not


def write_trials(folder: Path) -> Written:
    """Write all files of the study in a folder, as far as it has come."""
    study = TrialStudy.read(folder)
    ranked, folds, metric = study.ranked(), study.facts["folds"], metric_name(study.facts["metric"])
    unscored = [one for one in study.trials if one.score is None]
    rows = [one for one in (study.trials if folds else [*ranked, *unscored]) if one.values]
    table = Table([], [], study.facts["recipe"]["model"]["name"])
    for one in rows:
        values = {key: str(value) for key, value in one.values.items()} | {"score": _words(study, one.score)}
        about = {"epochs": units.significant(one.epochs), "time": units.duration(one.train_s)}
        table.rows.append({"trained": one.name, **values, **about})
        table.records.append(one.model_dump(exclude={"values"}) | one.values)
    remarks, tiles, commands = list[str](), list[Tile](), list(study.commands)
    failed = {one.name: one.failure or f"not trained to the end on {one.host}" for one in rows if one.score is None}
    missing = [f"{name} has no score: {reason.rstrip('.')}." for name, reason in failed.items()]
    missing += [f"{study.number - len(rows)} are not begun yet: the same command goes on."] * (study.number > len(rows))
    if ranked and folds:
        scores, of = [one.score or 0.0 for one in ranked], units.plural(len(ranked), "fold")
        mean = f"{_words(study, np.mean(scores))} ± {_words(study, np.std(scores, ddof=len(scores) > 1))}"
        remarks = [f"{metric} {mean}: mean and standard deviation of {of}, at the end of each on what it did not see."]
        tiles = [Tile(f"Mean {metric}", mean, f"of {of}", main=True)]
    elif ranked:
        words = [word for key, value in ranked[0].values.items() for word in ("--set", f"{key}={value}")]
        train = _OF_TRIALS.sub("", commands[-1]).replace(" trials", " train", 1)
        commands.append(f"{train} {shlex.join(words)}")
        remarks = [f"A score is the best {metric} on the validation split.", f"The best, longer: {commands[-1]}"]
        tiles = [Tile(f"Best {metric}", _words(study, ranked[0].score), ranked[0].name, main=True)]
        tiles += [Tile(key, units.shorten(str(value), 16)) for key, value in ranked[0].values.items()]
    pictures = {metric: None, **space_of(study.facts["over"])}.items() if ranked else ()
    panels = [drawn(re.sub("[ .]", "-", f"by-{key}"), key, partial(_scores, study, of), "") for key, of in pictures]
    recipe = study.facts["recipe"]
    return write_trainings(
        study,
        table,
        panels,
        missing,
        remarks,
        name="folds" if folds else "trials",
        subject=units.shorten(recipe["data"]["path"], 60),
        facts=[f"{units.plural(study.number, 'training')} of {recipe['epochs']}", study.machine["machine"]],
        tiles=tiles,
        trained_lead="Each dot is a training.",
        trained_remarks=remarks[:1],
        commands=commands,
        recipe=dump(recipe).rstrip(),
    )


def _words(study: TrialStudy, value: Any) -> str:
    return "-" if value is None else metric_in_words(study.facts["metric"], value).rpartition(" ")[2]


def _scores(study: TrialStudy, shape: Any, title: str) -> Drawing:
    """The scores over the values of a key; or in the order of the trainings, with the best so far or folds' mean."""
    trials = [one for one in study.trials if one.score is not None]
    scores, folds = np.array([one.score for one in trials], float), study.facts["folds"]
    axes = ax.panel(title, "" if shape else "fold" if folds else "trial", ["a training", "best so far"])
    ax.wide_axis(axes, scores)
    places: list[Any] = [one.values[title] if shape else int(one.name.rpartition("-")[2]) for one in trials]
    if shape is None:
        best = (np.minimum if study.facts["is_lower"] else np.maximum).accumulate(scores)
        level, line = (np.full_like(scores, scores.mean()), "mean") if folds else (best, "best so far")
        axes.step(places, level, where="post", color=ax.TEST, label=line)
        ax.set_ticks(axes.xaxis, 8, integer=True)
    elif choices := getattr(shape, "choices", None):
        places = [choices.index(value) for value in places]
        axes.set_xticks(range(len(choices)), [units.shorten(choice, 12) for choice in choices])
    elif shape.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
    axes.plot(places, scores, "o", color=ax.TRAIN, markersize=5, clip_on=False, label="a training")
    return " ".join(f"{one.name}: {_words(study, one.score)}." for one in trials), ax.with_legend(axes)
