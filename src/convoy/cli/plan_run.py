"""Where `convoy plan` runs: on this device, or on as many as the plan is for, where this machine has them."""

import torch

from convoy import launch
from convoy.cli.line import is_verbose
from convoy.cli.plan_answer import answer
from convoy.cli.plan_network import recipe_of
from convoy.cli.plan_request import Request
from convoy.launch import cores
from convoy.planning import Ranks
from convoy.planning.link_names import links_named
from convoy.training import Devices, choose_device


def run(request: Request) -> int:
    """Plan, and say what came of it.

    Args:
        request: what is asked, checked.

    Returns:
        The exit status.

    Raises:
        ConvoyError: there is no such recipe, network, link or device, or no plan.
    """
    recipe, number = recipe_of(request), request.num_devices
    if request.link is not None:
        links_named(request.link, on_cpu=True)
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
        return launch.start(request.arguments, number, verbose=is_verbose(request.arguments))
    if request.cores_per_device is not None:
        cores.pin(cores.share(cores.own_cores(), 1, 0, request.cores_per_device))
    answer(request, recipe, number, Ranks(), chosen)
    return 0


def _fits(devices: int, device: torch.device, cores_per_device: int | None) -> bool:
    """Whether this machine has so many devices."""
    if device.type == "cuda":
        return torch.cuda.device_count() >= devices
    return len(cores.own_cores()) >= devices * (cores_per_device or 1)
