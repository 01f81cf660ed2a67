"""Runs `convoy doctor`: examines a training on its devices, and prints what follows."""

import json
from collections.abc import Callable

import click
import torch

from convoy import interfaces, launch
from convoy.cli.on_devices import run_as_rank
from convoy.cli.options import is_verbose
from convoy.cli.requests import TrainRequest
from convoy.comm.memory import memory_explained
from convoy.comm.ranks import Ranks
from convoy.doctor.diagnosis import Diagnosis
from convoy.launch import cores
from convoy.terminal import Console
from convoy.training import ConsoleReporter, choose_device
from convoy.training.examination import examine
from convoy.training.parallel_config import num_devices
from convoy.training.set_up import check_devices, set_up

Complete = Callable[[Diagnosis], Diagnosis]


def run(request: TrainRequest, complete: Complete, seconds: float, as_json: bool) -> int:
    """Examine, and print the diagnosis.

    Args:
        request: the training.
        complete: puts into the diagnosis what the command line knows.
        seconds: of trying changes.
        as_json: in place of text.

    Returns:
        The exit status.

    Raises:
        ConvoyError: an option is wrong, or the training cannot be.
    """
    if request.interface is not None:
        interfaces.use(request.interface)
    place = launch.find_place()
    if place is not None:

        def work(ranks: Ranks, device: torch.device) -> int:
            return _examined(request, complete, ranks, device, seconds, as_json)

        per_device = request.recipe_of().parallel.cores_per_device
        return run_as_rank(place, request.devices, request.device, work, per_device)
    recipe, _ = request.resolve(Ranks())
    number, per_device = num_devices(recipe.parallel), recipe.parallel.cores_per_device
    if number > 1:
        cores.share(cores.own_cores(), number, 0, per_device)
        turns = cores.in_turns(number, len(cores.own_cores()))
        if turns is not None and choose_device(request.device).type == "cpu":
            click.echo(turns, err=True)
        check_devices(recipe, number)
        return launch.start(request.arguments, number, is_verbose(request.arguments))
    if per_device is not None:
        cores.pin(cores.share(cores.own_cores(), 1, 0, per_device))
    with memory_explained(0, 1):
        return _examined(request, complete, Ranks(), choose_device(request.device), seconds, as_json)


def _examined(
    request: TrainRequest, complete: Complete, ranks: Ranks, device: torch.device, seconds: float, as_json: bool
) -> int:
    recipe, out = request.resolve(ranks)
    console = Console(highlight=False, quiet=ranks.rank > 0, stderr=as_json)
    with ConsoleReporter(console) as reporter:
        session = set_up(recipe, device, reporter.prepare, ranks)
        say = reporter.prepare if ranks.rank == 0 else lambda *work: None
        facts = examine(session, seconds=seconds, say=say, folder=out)
    if ranks.rank == 0:
        found = complete(Diagnosis.of(facts))
        click.echo(json.dumps(found.to_document(), indent=2) if as_json else found.text())
    ranks.barrier()
    return 0
