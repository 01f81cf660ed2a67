"""The course of a study of the batch: the trainings, then what several devices would gain."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from convoy.bench.ask import GUESSES, Ask
from convoy.bench.batches import LEAST, USUAL, BatchStudy, Search, is_broken
from convoy.bench.jobs import Job, Jobs, Outcome
from convoy.bench.measure import MeasurementTask, network_of
from convoy.bench.processes import RankFailed, Say, reason_of, run_ranks
from convoy.bench.records import CONVOY
from convoy.bench.study import machine_facts, opened, plain_recipe
from convoy.comm.ranks import Ranks
from convoy.errors import ConvoyError
from convoy.planner.planner import Question, make_plan
from convoy.plans.plan import Plan
from convoy.recipe.optim import ConstantConfig
from convoy.recipe.recipe import Recipe
from convoy.recipe.schema import Duration
from convoy.training import choose_device
from convoy.training.precision import set_numerics, settle
from convoy.training.workloads import workload_of_recipe
from convoy.units import plural


def recipes_of(ask: Ask) -> dict[str, Recipe]:
    """The recipe of each optimizer of a study. The rate is constant after the warm-up unless a schedule is said: one
    that falls would tie the updates that are needed to the length of a training, and the length is looked for."""
    first, recipes = ask.recipe_of(), {}
    for name in ask.optimizers.split(",") if ask.optimizers else [first.optimizer.name]:
        other = name != first.optimizer.name and not ask.says("optimizer.lr") and not ask.says("optimizer.base_lr")
        rate = [f"optimizer.base_lr={GUESSES[name]}"] if other else []
        settings = (*ask.settings, f"optimizer.name={name}", *rate)
        recipe = Ask(**{**vars(ask), "settings": settings}).recipe_of()
        warmup = recipe.schedule.warmup
        if warmup.unit == "%":  # of a length that a search changes
            warmup = Duration(round(warmup.value / 100 * recipe.epochs.value, 6), recipe.epochs.unit)
        constant = {"schedule": ConstantConfig(name="constant", warmup=warmup)}
        alone = {"parallel": recipe.parallel.model_copy(update={"devices": 1, "plan": None, "shares": None})}
        recipes[name] = recipe.model_copy(update=alone | ({} if ask.says("schedule") else constant))
    return recipes


def study_batches(ask: Ask, progress: Say, tell: Callable[[str], None]) -> None:
    """Train all that is not trained yet, one training a device, and take the time of updates."""
    device, batches = choose_device(ask.device), ask.batch_numbers()
    recipes = {name: settle(recipe, device).recipe for name, recipe in recipes_of(ask).items()}
    recipe = next(iter(recipes.values()))
    num_train = len(opened(recipe, progress).train)
    if batches[-1] > num_train:
        raise ConvoyError(f"--batches {batches[-1]} is more than the {num_train:,} training images: leave it out")
    jobs, machine = Jobs.here(device.type, ask.cores_per_device or 1, ask.command), machine_facts(device)
    jobs.timeout_s = ask.timeout
    facts: dict[str, Any] = {"model": recipe.model.name, "target": ask.target, "tune": ask.tune, "num_train": num_train}
    facts |= {"recipes": {name: plain_recipe(recipe, None) | {"batch": None} for name, recipe in recipes.items()}}
    facts |= {"device": device.type, "cores_per_device": jobs.places.cores_per_device, "machine": machine["machine"]}
    with BatchStudy.alone(ask.folder, tell, facts=facts) as study:
        study.begin(machine, ask.command)
        study.facts["recipes"] |= facts["recipes"]  # to which another optimizer is added
        study.batches, study.seeds = sorted({*study.batches, *batches}), max(study.seeds, ask.seeds or 1)
        pairs, rates = len(study.batches) * len(recipes), (LEAST, USUAL) if ask.tune else (1, 1)
        least, usual = (pairs * (number + study.seeds - 1) for number in rates)
        tell(f"about {least} to {usual} trainings, {jobs.number} at a time" if ask.tune else plural(least, "training"))
        done: Mapping[Path, Outcome] = {}

        def wanted(outcomes: Mapping[Path, Outcome]) -> list[Job]:
            nonlocal done
            done, search = outcomes, Search(study, recipes, outcomes)
            if search.rows != study.rows:
                study.rows = search.rows
                study.save()
            return search.jobs

        def say(job: Job, text: str, _: int, __: int) -> None:
            progress(f"{len(done)} trained, {job.out.name}: {text}", len(done), max(usual, len(done) + 1))

        study.save()
        jobs.say = say
        jobs.train(wanted)
        if broken := [f"{out.name}: {outcome.failure}" for out, outcome in done.items() if is_broken(outcome)]:
            which = f"{plural(len(broken), 'training')} failed, of which nothing follows for the rate"
            raise ConvoyError(f"{which}; the same command tries again: {broken[0]}")
        if not study.reached():
            best = max(study.rows, key=lambda row: row.top1)
            why = f"the best was {best.top1:.2%} ({best.run})" if best.top1 else str(best.failure)
            more = "lower it, or train longer (--set epochs=…)"
            raise ConvoyError(f"no training reached --target {ask.target:g}: {why}; {more}")
        if not ask.predict:
            return
        progress("what devices would gain", len(done), len(done))
        numbers = ask.numbers(0) if ask.devices else [1, 2, 4, 8]
        asked = {row.batch: [n for n in numbers if 1 < n <= row.batch] for row in study.reached()}
        try:
            (study.speedups,) = run_ranks(
                predict_speedups, jobs.places.of(1), recipe, device.type, asked, seconds=ask.timeout
            )
        except (RankFailed, ConvoyError) as error:
            tell(f"nothing is predicted for several devices: {reason_of(error)}")
        study.save()


Speedups = dict[int, dict[int, float]]


def predict_speedups(recipe: Recipe, device_type: str, asked: dict[int, list[int]], say: Say) -> Speedups:
    """By batch and number of devices like this one, with assumed links, under data parallelism; nothing where the
    batch cannot be divided so."""
    data, (_, device) = opened(recipe), MeasurementTask(CONVOY, recipe, None, device_type).join()
    set_numerics(recipe)
    model, _ = network_of(recipe, data, device)
    shape, speedups = (data.channels, data.image_size, data.image_size), Speedups()
    for batch, numbers in asked.items():
        for devices in numbers:
            with suppress(ConvoyError):
                at_batch = recipe.model_copy(update={"batch": batch})
                workload = workload_of_recipe(at_batch, model.train(), shape, devices, device)
                question = Question(workload, devices, plans=[Plan.by_samples(devices)])
                speedups.setdefault(batch, {})[devices] = min(devices, make_plan(question, Ranks(), say).speedup)
    return speedups
