"""Runs `convoy doctor`: examines a training on its devices, and prints what follows."""

from collections.abc import Callable
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

Show = Callable[[Diagnosis], str]  # what is printed of a diagnosis


def run(request: TrainRequest, show: Show, began: float, seconds: float, trials: bool) -> int:
    """Examine within some seconds of when it `began` (by `time.perf_counter`), with or without trials of changes, and
    print what `show` makes of it; the exit status."""
    if request.interface is not None:
        interfaces.use(request.interface)
    work, place = partial(_examined, request, show, began, seconds, trials), launch.find_place()
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


def _examined(
    request: TrainRequest,
    show: Show,
    began: float,
    seconds: float,
    trials: bool,
    ranks: Ranks,
    device: torch.device,
) -> int:
    recipe, out = request.resolve(ranks)
    data = recipe.data.model_copy(update={"bad_images": "skip"})  # they are counted, as the others tell the speed
    recipe = recipe.model_copy(update={"data": data})
    console = Console(highlight=False, quiet=ranks.rank > 0, stderr=True)
    with ConsoleReporter(console) as reporter:
        budget = Budget(ranks, seconds, began, reporter.prepare)
        session = set_up(recipe, device, reporter.prepare, ranks)
        facts = examine(session, budget, trials=trials, folder=out)
    if ranks.rank == 0:
        click.echo(show(Diagnosis.of(facts)))
    ranks.barrier()
    return 0
