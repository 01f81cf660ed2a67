"""Studies of short trainings: trials of values that a sampler chooses by the scores so far, and folds of the data.

A trial belongs to the host that was first to make its file, so that the same command on hosts with one folder does
different ones. All else is computed anew from the run directories.
"""

import json
import re
import shutil
import socket
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from convoy.bench.jobs import Job, Jobs, Outcome, kept
from convoy.bench.processes import Say
from convoy.bench.records import Record, TrainingStudy
from convoy.bench.study import machine_facts, plain_recipe
from convoy.data.dataset import open_data
from convoy.errors import ConvoyError
from convoy.recipe.recipe import Recipe
from convoy.recipe.schema import fields_of, number_type
from convoy.tasks.own import add_own
from convoy.tasks.registry import create_task
from convoy.training import choose_device

Load = Callable[[Mapping[str, Any]], Recipe]  # the recipe with such values
Tell = Callable[[str], None]
_NUMBER = r"(-?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?)"
_RANGE, _COMMA = re.compile(rf"{_NUMBER}\.\.{_NUMBER}(:log)?"), re.compile(r",(?![^\[{]*[\]}])")


def space_of(overs: list[str]) -> dict[str, Any]:
    """The distribution of each key that `KEY=LO..HI`, `KEY=LO..HI:log` or `KEY=a,b,c` names."""
    space: dict[str, Any] = {}
    for text in overs:
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        key, _, values = text.partition("=")
        if key in space:
            raise ConvoyError(f"--over {key} is said twice: give it one range, or all choices at once")
        form, choices = _RANGE.fullmatch(values), _COMMA.split(values)
        low, high = map(float, form.groups()[:2] if form is not None else (0, len({*choices} - {""}) - 1))
        log = form is not None and form[3] is not None
        if low >= high or (log and low <= 0):
            ways = "write optimizer.lr=0.01..1:log (from the smaller number, above 0 for log) or data.mix.mixup=0,0.2"
            raise ConvoyError(f"--over {text} is neither a range of numbers nor choices: {ways}")
        if form is None:
            space[key] = CategoricalDistribution(choices)
            continue
        of_key = [number_type(field.annotation) for name, _, field in fields_of(Recipe) if name == key]
        whole = float not in of_key and all(end.lstrip("-").isdecimal() for end in form.groups()[:2])
        whole |= int in of_key and low.is_integer() and high.is_integer()  # as 8.0 is
        space[key] = IntDistribution(int(low), int(high), log) if whole else FloatDistribution(low, high, log)
    return space


class Trial(Record):
    """A training, and what came of it so far."""

    name: str  # of its run directory
    host: str = ""
    values: dict[str, Any] = Field({})  # by key of the recipe
    score: float | None = None
    epochs: float | None = None
    train_s: float | None = None
    failure: str | None = None


class TrialStudy(TrainingStudy):
    """The file of a study."""

    NAME, VERB = "trials.json", "convoy trials or folds"
    number: int = 0  # of trials
    trials: list[Trial] = Field([])

    def ranked(self) -> list[Trial]:
        """Those with a score, the best first."""
        sign, there = 1 if self.facts["is_lower"] else -1, [one for one in self.trials if one.score is not None]
        return sorted(there, key=lambda one: sign * (one.score or 0.0))

    def jobs(self, load: Load, host: str, slots: int, outcomes: Mapping[Path, Outcome]) -> list[Job]:
        """The trials of a host that are not done, and as many new ones as there are free slots."""
        kind = "fold" if self.facts["folds"] else "trial"
        self.trials = [self._read(path, load, outcomes) for path in sorted(self.folder.glob(f"{kind}-*.json"))]
        for one in [one for one in self.ranked()[1:] if one.host == host and kind == "trial"]:  # the best may go on
            shutil.rmtree(self.folder / one.name / "checkpoints", ignore_errors=True)
        mine = [one for one in self.trials if one.host == host and one.score is None and one.failure is None]
        free = [n for n in range(1, self.number + 1) if f"{kind}-{n:03}" not in {one.name for one in self.trials}]
        if not free or len(mine) >= slots:
            return [Job(self.folder / one.name, load(one.values)) for one in mine]
        claim = json.dumps({"values": self.propose(free[0]), "host": host})
        with suppress(FileExistsError), (self.folder / f"{kind}-{free[0]:03}.json").open("x", encoding="utf-8") as file:
            file.write(claim)
        return self.jobs(load, host, slots, outcomes)

    def _read(self, path: Path, load: Load, outcomes: Mapping[Path, Outcome]) -> Trial:
        out, claim = path.with_suffix(""), dict[str, Any]()
        with suppress(ValueError):  # its host is just writing it, or was stopped there
            claim = json.loads(path.read_bytes())
        one, outcome = Trial(name=out.name, **claim), outcomes.get(out) or kept(out)
        try:
            _ = outcome or load(one.values)
        except ConvoyError as error:  # they do not go together
            outcome = Outcome({}, str(error))
        if outcome is not None:
            summary, one.failure = outcome.summary, outcome.failure
            one.epochs, one.train_s = summary.get("epochs"), summary.get("train_s")
            score = (summary.get("metrics") or {}).get(self.facts["metric"])
            one.score = None if one.failure else score if self.facts["folds"] else summary.get("best")
            one.failure = None if one.score is not None else one.failure or "it has no score"
        return one

    def propose(self, number: int) -> dict[str, Any]:
        """The values of a trial: a function of its number and of what came of others."""
        if folds := self.facts["folds"]:
            return {"data.fold": f"[{number}, {folds}]"}
        import optuna
        from optuna.trial import TrialState, create_trial

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        space, seed = space_of(self.facts["over"]), zlib.crc32(f"{self.facts['recipe']['seed']} {number}".encode())
        direction: Any = "minimize" if self.facts["is_lower"] else "maximize"
        study = optuna.create_study(direction=direction, sampler=optuna.samplers.TPESampler(seed=seed))
        # One that failed counts as worse than all with a score, one that runs as bad so far.
        for one in [one for one in self.trials if one.values]:
            state = (
                TrialState.PRUNED if one.failure else TrialState.RUNNING if one.score is None else TrialState.COMPLETE
            )
            study.add_trial(create_trial(state=state, value=one.score, params=one.values, distributions=space))
        values = study.ask(space).params
        for key in [key for key, value in values.items() if isinstance(value, float)]:  # four digits can be copied
            values[key] = min(max(float(f"{values[key]:.4g}"), space[key].low), space[key].high)
        return values


def train_trials(
    folder: Path, overs: list[str], number: int, load: Load, command: str, devices: Any, progress: Say, tell: Tell
) -> None:
    """Train all trials, or folds where nothing varies, that are not trained yet and that no other host has begun."""
    for key, values in space_of(overs).items():
        for value in getattr(values, "choices", None) or (values.low, values.high):
            try:
                load({key: value})
            except ConvoyError as error:
                raise ConvoyError(f"--over {key}, with {value}: {error}") from None
    device, recipe, folds = choose_device(devices[1]), load({}), 0 if overs else number
    jobs = Jobs.here(device.type, recipe.parallel.cores_per_device or 1, command)
    here, each, jobs.number = jobs.number, recipe.parallel.devices or 1, devices[0] or jobs.number
    if not each <= jobs.number <= here:
        needed = f"{each} to {here}, as there are {here} here" + f" and a training takes {each}" * (each > 1)
        raise ConvoyError(f"--devices {jobs.number} is not possible: give {needed}")
    data = open_data(recipe.data, progress, selects=not folds, task=recipe.task)
    task, num_train = create_task(recipe, data.classes, data.task, data.train.labels), len(data.train)
    del data
    add_own(task, recipe)
    metric = task.metrics[0] if recipe.best is None else task.metric(recipe.best)
    facts: dict[str, Any] = {"folds": folds, "metric": metric.name, "is_lower": metric.better == "lower"}
    facts |= {"over": overs, "num_train": num_train, "recipe": plain_recipe(recipe, None)}
    if not (folder / TrialStudy.NAME).exists() and any(folder.glob("*-[0-9]*.json")):
        raise ConvoyError(f"{folder} holds trainings of a study without its {TrialStudy.NAME}: give another --out")
    host, best = socket.gethostname(), {"best": None if folds else metric.name}  # a fold would choose what it measures
    with TrialStudy.alone(folder, tell, folder / ".hosts" / host, facts=facts) as study:
        study.begin(machine_facts(device), command)
        study.number = max(study.number, number)
        study.save()
        jobs.say = lambda job, text, _, __: progress(f"{job.out.name}: {text}", len(study.ranked()), study.number)
        wanted = partial(study.jobs, lambda v: load(v).model_copy(update=best), host, jobs.number // each)
        try:
            jobs.train(wanted)
        finally:
            study.save()
        if study.trials and all(one.failure for one in study.trials):
            raise ConvoyError(f"no training has a score: {study.trials[-1].failure}")
