"""Runs `convoy doctor`: examines a training on its devices, and prints what follows."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import click
import torch

from convoy import interfaces, launch, resources
from convoy.cli.on_devices import run_alone, run_as_rank
from convoy.cli.options import is_verbose
from convoy.cli.requests import TrainRequest
from convoy.comm.ranks import Ranks
from convoy.doctor.diagnosis import Diagnosis
from convoy.doctor.examination import examine
from convoy.doctor.trials import Budget
from convoy.progress import ConsoleReporter
from convoy.terminal import Console
from convoy.training import choose_device
from convoy.training.parallel_config import num_devices
from convoy.training.set_up import check_devices, set_up

Complete = Callable[[Diagnosis], Diagnosis]


@dataclass(frozen=True)
class Look:
    """How a training is looked at."""

    began: float  # by `time.perf_counter`
    seconds: float  # from then on, for all of it
    trials: bool  # whether changes are tried
    as_json: bool  # print JSON in place of text


def run(request: TrainRequest, complete: Complete, look: Look) -> int:
    """Examine, and print the diagnosis, into which `complete` puts what the command line knows; the exit status."""
    if request.interface is not None:
        interfaces.use(request.interface)
    work, place = partial(_examined, request, complete, look), launch.find_place()
    if place is not None:
        per_device = request.recipe_of().parallel.cores_per_device
        return run_as_rank(place, request.devices, request.device, work, per_device)
    recipe, _ = request.resolve(Ranks())
    number, per_device = num_devices(recipe.parallel), recipe.parallel.cores_per_device
    if number > 1:
        resources.share(resources.own_cores(), number, 0, per_device)
        turns = resources.in_turns(number, len(resources.own_cores()))
        if turns is not None and choose_device(request.device).type == "cpu":
            click.echo(turns, err=True)
        check_devices(recipe, number)
        return launch.start(request.arguments, number, is_verbose(request.arguments))
    return run_alone(request.device, work, per_device)


def _examined(request: TrainRequest, complete: Complete, look: Look, ranks: Ranks, device: torch.device) -> int:
    recipe, out = request.resolve(ranks)
    data = recipe.data.model_copy(update={"bad_images": "skip"})  # they are counted, as the others tell the speed
    recipe = recipe.model_copy(update={"data": data})
    console = Console(highlight=False, quiet=ranks.rank > 0, stderr=True)
    with ConsoleReporter(console) as reporter:
        budget = Budget(ranks, look.seconds, look.began, reporter.prepare)
        session = set_up(recipe, device, reporter.prepare, ranks)
        facts = examine(session, budget, trials=look.trials, folder=out)
    if ranks.rank == 0:
        diagnosis = complete(Diagnosis.of(facts))
        click.echo(json.dumps(diagnosis.to_document(), indent=2) if look.as_json else diagnosis.text())
    ranks.barrier()
    return 0
