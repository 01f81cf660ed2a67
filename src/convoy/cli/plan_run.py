"""Where `convoy plan` runs: on this device, or on as many as the plan is for, where this machine has them."""

import torch

from convoy import launch
from convoy.cli.line import is_verbose
from convoy.cli.plan_answer import answer
from convoy.cli.plan_network import network_of
from convoy.cli.plan_request import Request
from convoy.launch import cores
from convoy.planning import Ranks
from convoy.search.layers import Layers
from convoy.training import Devices, Recipe, choose_device
from convoy.training.planning.workloads import workload_of_recipe


def run(request: Request, recipe: Recipe) -> int:
    """Plan, and say what came of it.

    Args:
        request: what is asked, checked.
        recipe: of the network.

    Returns:
        The exit status.

    Raises:
        ConvoyError: there is no such device, a fix matches no layer, or no plan.
    """
    number = request.num_devices
    place = launch.find_place()
    if place is not None:
        place.check(number if request.devices is not None or request.scores else None)
        with launch.as_rank(place):
            joined, own = Devices.join()
            cores.take_share(joined.gather, joined.rank, request.cores_per_device)
            chosen = own if request.device is None or own.type == request.device else choose_device(request.device)
            answer(request, recipe, place.num_ranks, Ranks.here(), chosen)
            Devices.leave()
            return launch.ended(place, 0)
    chosen = choose_device(request.device)
    if number > 1 and request.link is None and _fits(number, chosen, request.cores_per_device):
        if request.fixes:
            _check_fixes(request, recipe, number)
        return launch.start(request.arguments, number, verbose=is_verbose(request.arguments))
    if request.cores_per_device is not None:
        cores.pin(cores.share(cores.own_cores(), 1, 0, request.cores_per_device))
    answer(request, recipe, number, Ranks(), chosen)
    return 0


def _check_fixes(request: Request, recipe: Recipe, number: int) -> None:
    """Refuse fixes that match no layer before ranks are started, which takes longer than to look at the network."""
    here = torch.device("cpu")
    model, shape = network_of(request, recipe, here)
    Layers(workload_of_recipe(recipe, model, shape, number, here).graph, request.fixes, ())


def _fits(devices: int, device: torch.device, cores_per_device: int | None) -> bool:
    """Whether this machine has so many devices."""
    if device.type == "cuda":
        return torch.cuda.device_count() >= devices
    return len(cores.own_cores()) >= devices * (cores_per_device or 1)
