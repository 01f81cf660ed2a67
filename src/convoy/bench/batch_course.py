"""The course of a study of the batch: the trainings, then what an update takes on several devices."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from convoy.bench.ask import GUESSES, Ask
from convoy.bench.batches import BatchCourse, BatchFacts, BatchStudy, StepTime
from convoy.bench.jobs import Jobs
from convoy.bench.measure import MeasurementTask, measure_rank, network_of
from convoy.bench.processes import Places, RankFailed, Say, run_ranks
from convoy.bench.records import CONVOY
from convoy.bench.search import LEAST, USUAL
from convoy.bench.study import machine_facts, plain_recipe
from convoy.comm.ranks import Ranks
from convoy.data import open_data
from convoy.errors import ConvoyError
from convoy.planner import Question, make_plan
from convoy.plans.plan import Plan
from convoy.resources import own_cores
from convoy.training import Recipe, RunDirectory, choose_device
from convoy.training.optim import ConstantConfig
from convoy.training.precision import set_numerics, settle
from convoy.training.schema import Duration
from convoy.training.workloads import workload_of_recipe
from convoy.units import plural

_UPDATES, _WARM_UP, _PLAN_S = 10, 2, 120.0


def recipes_of(ask: Ask) -> dict[str, Recipe]:
    """The recipe of each optimizer of a study: SGD has Nesterov's momentum, and the rate is constant after the warm-up,
    unless the command line says otherwise."""
    first = ask.recipe_of()
    names = [name.strip() for name in (ask.optimizers or first.optimizer.name).split(",")]
    recipes = {}
    for name in names:
        recipe = first
        if name != first.optimizer.name:
            rate = [] if ask.says("optimizer.lr") or ask.says("optimizer.base_lr") else [f"base_lr={GUESSES[name]}"]
            settings = [f"optimizer.{setting}" for setting in (f"name={name}", *rate)]
            recipe = replace(ask, settings=(*ask.settings, *settings)).recipe_of()
        changes: dict[str, Any] = {}
        if name == "sgd" and not ask.says("optimizer.nesterov"):
            changes["optimizer"] = recipe.optimizer.model_copy(update={"nesterov": True})
        if not ask.says("schedule."):
            warmup = recipe.schedule.warmup
            if warmup.unit == "%":  # of a length that a search changes
                warmup = Duration(round(warmup.value / 100 * recipe.epochs.value, 6), recipe.epochs.unit)
            changes["schedule"] = ConstantConfig(name="constant", warmup=warmup)
        recipes[name] = recipe.model_copy(update=changes)
    return recipes


def study_batches(ask: Ask, progress: Say, tell: Callable[[str], None]) -> BatchStudy:
    """Train all that is not trained yet, one training a device, as far as there is time."""
    began, device = time.monotonic(), choose_device(ask.device)
    recipes = {name: settle(recipe, device).recipe for name, recipe in recipes_of(ask).items()}
    recipe, batches = next(iter(recipes.values())), ask.batch_numbers()
    data = open_data(recipe.data, progress)
    if batches[-1] > len(data.train):
        raise ConvoyError(
            f"--batches {batches[-1]} is more than the {len(data.train):,} training images of {data.name}: leave it out"
        )
    width = 0 if device.type == "cuda" else ask.cores_per_device or 1
    number = len(own_cores()) // width if width else torch.cuda.device_count()
    facts = BatchFacts(
        model=recipe.model.name,
        recipes={name: plain_recipe(recipe, None) | {"batch": None} for name, recipe in recipes.items()},
        target=ask.target or 1.0,
        tune=ask.tune,
        device_type=device.type,
        cores_per_device=width,
        num_train=len(data.train),
    )
    BatchStudy.open(ask.folder, facts)
    ask.folder.mkdir(parents=True, exist_ok=True)
    with RunDirectory(ask.folder).lock(tell=tell):
        study = BatchStudy.open(ask.folder, facts)
        study.machine, study.commands = machine_facts(device), list(dict.fromkeys([*study.commands, ask.command]))
        study.batches, study.seeds = sorted({*study.batches, *batches}), max(study.seeds, ask.seeds or 1)
        pairs, more = len(study.batches) * len(recipes), study.seeds - 1
        least, usual = (pairs * (rates + more if ask.tune else study.seeds) for rates in (LEAST, USUAL))
        tell(
            f"{least} trainings{f' at least, about {usual} in all' if ask.tune else ''}, {number} at a time: "
            f"{plural(len(study.batches), 'batch', 'batches')}, {plural(len(recipes), 'optimizer')}, "
            f"{f'{LEAST} to {USUAL} rates or more, then ' if ask.tune else ''}{plural(study.seeds, 'seed')}"
        )
        course = BatchCourse(study, recipes, ask.folder)

        def say(text: str) -> None:
            done = sum(trial.done for trial in study.trials)
            progress(f"{done} trained, {text}", done, max(usual, done + 1))

        jobs = Jobs(ask.folder, device.type, Places(width), number, ask.command, ask.timeout, say)
        until = began + 60 * ask.minutes if ask.minutes is not None else None
        if not jobs.run(course.wanted, course.ended, until):
            tell(f"--minutes {ask.minutes:g} are over: the same command goes on")
        course.check_reached()
        devices = ask.numbers(0) if ask.devices else [1, 2, 4, 8]
        for batch in study.batches:
            progress(f"what an update of {batch} takes", len(study.trials), len(study.trials))
            _time_steps(study, recipe.model_copy(update={"batch": batch}), devices, jobs, until)
            study.save(ask.folder)
    return study


def _time_steps(study: BatchStudy, recipe: Recipe, devices: Sequence[int], jobs: Jobs, until: float | None) -> None:
    """What an update takes: on one device in the trainings, on as many as there are measured, on more predicted."""
    batch, optimizer = recipe.batch, recipe.optimizer.name
    ended = [trial for trial in study.of(optimizer, batch) if trial.updates and trial.train_s]
    times = {}
    if ended:
        times[1] = statistics.median(trial.train_s / trial.updates for trial in ended)
    missing = [num for num in devices if 1 < num <= batch and study.step_s(batch, num) is None]
    for num in missing if until is None or time.monotonic() < until else ():
        parallel = recipe.parallel.model_copy(update={"devices": num, "plan": Plan.by_samples(num)})
        task = MeasurementTask(
            CONVOY, recipe.model_copy(update={"parallel": parallel}), None, jobs.device_type, _UPDATES, _WARM_UP
        )
        try:
            if num <= jobs.number:
                ranks = run_ranks(measure_rank, jobs.places.of(num), task, seconds=_PLAN_S)
                times[num] = max(statistics.median(rank.seconds) for rank in ranks)
            else:
                (times[num],) = run_ranks(predict_step, jobs.places.of(1), task, num, seconds=_PLAN_S)
        except (RankFailed, ConvoyError):
            continue  # such a batch cannot be divided so
    kept = [step for step in study.step_times if step.batch != batch or step.devices not in times]
    new = [StepTime(batch=batch, devices=n, seconds=s, measured=n <= jobs.number) for n, s in times.items()]
    study.step_times = [*kept, *new]


def predict_step(task: MeasurementTask, devices: int, say: Say) -> float:
    """The planner's prediction of an update on devices like this one, whose links are assumed."""
    recipe = task.recipe
    alone = recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"devices": 1, "plan": None})})
    _, device = replace(task, recipe=alone).join()
    data = open_data(recipe.data)
    set_numerics(recipe)
    model, _ = network_of(recipe, data, device)
    shape = data.channels, data.image_size, data.image_size
    workload = workload_of_recipe(alone, model.train(), shape, devices, device)
    return make_plan(Question(workload, devices, plans=[Plan.by_samples(devices)]), Ranks(), say).best.seconds
