"""The course of a study of the batch: the trainings, then what an update takes on several devices."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from convoy.bench.ask import GUESSES, Ask
from convoy.bench.batches import BatchCourse, BatchFacts, BatchStudy, StepTime
from convoy.bench.jobs import Jobs
from convoy.bench.measure import MeasurementTask, measure_rank, network_of
from convoy.bench.processes import RankFailed, Say, run_ranks
from convoy.bench.records import CONVOY
from convoy.bench.search import LEAST, USUAL
from convoy.bench.study import machine_facts, plain_recipe
from convoy.comm.ranks import Ranks
from convoy.data import open_data
from convoy.errors import ConvoyError
from convoy.planner.planner import Question, make_plan
from convoy.plans.plan import Plan
from convoy.training import Recipe, RunDirectory, choose_device
from convoy.training.optim import ConstantConfig
from convoy.training.precision import set_numerics, settle
from convoy.training.schema import Duration
from convoy.training.workloads import workload_of_recipe
from convoy.units import plural

_UPDATES, _WARM_UP, _PATIENCE_S = 10, 2, 120.0


def recipes_of(ask: Ask) -> dict[str, Recipe]:
    """The recipe of each optimizer of a study. The rate is constant after the warm-up unless a schedule is said: one
    that falls would tie the updates that are needed to the length of a training, and the length is looked for."""
    first = ask.recipe_of()
    recipes = {}
    for name in (part.strip() for part in (ask.optimizers or first.optimizer.name).split(",")):
        recipe = first
        if name != first.optimizer.name:
            is_set = ask.says("optimizer.lr") or ask.says("optimizer.base_lr")
            rate = () if is_set else (f"optimizer.base_lr={GUESSES[name]}",)
            recipe = replace(ask, settings=(*ask.settings, f"optimizer.name={name}", *rate)).recipe_of()
        if not ask.says("schedule."):
            warmup = recipe.schedule.warmup
            if warmup.unit == "%":  # of a length that a search changes
                warmup = Duration(round(warmup.value / 100 * recipe.epochs.value, 6), recipe.epochs.unit)
            recipe = recipe.model_copy(update={"schedule": ConstantConfig(name="constant", warmup=warmup)})
        recipes[name] = recipe
    return recipes


def study_batches(ask: Ask, progress: Say, tell: Callable[[str], None]) -> None:
    """Train all that is not trained yet, one training a device, as far as there is time."""
    began, device = time.monotonic(), choose_device(ask.device)
    recipes = {name: settle(recipe, device).recipe for name, recipe in recipes_of(ask).items()}
    recipe, batches = next(iter(recipes.values())), ask.batch_numbers()
    num_train = len(open_data(recipe.data, progress).train)
    if batches[-1] > num_train:
        raise ConvoyError(f"--batches {batches[-1]} is more than the {num_train:,} training images: leave it out")
    jobs = Jobs(ask.folder, device.type, ask.cores_per_device or 1, ask.command)
    facts = BatchFacts(
        model=recipe.model.name,
        recipes={name: plain_recipe(recipe, None) | {"batch": None} for name, recipe in recipes.items()},
        target=ask.target or 1.0,
        tune=ask.tune,
        device_type=device.type,
        cores_per_device=jobs.places.cores_per_device,
        num_train=num_train,
    )
    BatchStudy.open(ask.folder, facts)
    ask.folder.mkdir(parents=True, exist_ok=True)
    with RunDirectory(ask.folder).lock(tell=tell):
        study = BatchStudy.open(ask.folder, facts)
        study.machine, study.commands = machine_facts(device), list(dict.fromkeys([*study.commands, ask.command]))
        study.batches, study.seeds = sorted({*study.batches, *batches}), max(study.seeds, ask.seeds or 1)
        rates = (LEAST, USUAL) if study.facts.tune else (1, 1)
        least, usual = (len(study.batches) * len(recipes) * (number + study.seeds - 1) for number in rates)
        tell(
            f"about {least}{f' to {usual}' if usual > least else ''} trainings, {jobs.number} at a time: of "
            f"{plural(len(study.batches), 'batch', 'batches')} with {plural(len(recipes), 'optimizer')}, "
            f"{' to '.join(map(str, dict.fromkeys(rates)))} rates each, then {plural(study.seeds, 'seed')}"
        )
        course = BatchCourse(study, recipes, ask.folder)

        def say(text: str) -> None:
            done = sum(trial.done for trial in study.trials)
            progress(f"{done} trained, {text}", done, max(usual, done + 1))

        jobs.progress = say
        until = began + 60 * ask.minutes if ask.minutes is not None else math.inf
        if not jobs.run(course.wanted, course.ended, until):
            tell(f"{ask.minutes:g} minutes are over: the same command goes on")
        course.check_reached()
        for batch in study.batches:
            progress(f"what an update of {batch} takes", len(study.trials), len(study.trials))
            for devices in ask.numbers(0) if ask.devices else (1, 2, 4, 8):
                if time.monotonic() < until:
                    _time_step(study, recipe.model_copy(update={"batch": batch}), devices, jobs)
        study.save(ask.folder)


def _time_step(study: BatchStudy, recipe: Recipe, devices: int, jobs: Jobs) -> None:
    """What an update takes, measured on as many devices as there are, predicted on more; nothing where the batch cannot
    be divided so."""
    batch = recipe.batch
    if devices > batch or any((step.batch, step.devices) == (batch, devices) for step in study.step_times):
        return
    parallel = recipe.parallel.model_copy(update={"devices": devices, "plan": Plan.by_samples(devices)})
    recipe = recipe.model_copy(update={"parallel": parallel})
    task = MeasurementTask(CONVOY, recipe, None, jobs.device_type, _UPDATES, _WARM_UP)
    try:
        if devices <= jobs.number:
            ranks = run_ranks(measure_rank, jobs.places.of(devices), task, seconds=_PATIENCE_S)
            took_s = max(statistics.median(rank.seconds) for rank in ranks)
        else:
            (took_s,) = run_ranks(predict_step, jobs.places.of(1), task, seconds=_PATIENCE_S)
    except (RankFailed, ConvoyError):
        return
    new = StepTime(batch=batch, devices=devices, seconds=took_s, measured=devices <= jobs.number)
    study.step_times = [*study.step_times, new]


def predict_step(task: MeasurementTask, say: Say) -> float:
    """The planner's prediction of an update on devices like this one, whose links are assumed."""
    recipe, devices = task.recipe, task.num_devices
    parallel: dict[str, Any] = {"devices": 1, "plan": None}
    alone = recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update=parallel)})
    _, device = replace(task, recipe=alone).join()
    data = open_data(recipe.data)
    set_numerics(recipe)
    model, _ = network_of(recipe, data, device)
    shape = data.channels, data.image_size, data.image_size
    workload = workload_of_recipe(alone, model.train(), shape, devices, device)
    return make_plan(Question(workload, devices, plans=[Plan.by_samples(devices)]), Ranks(), say).best.seconds
