"""Work of which every device does a share, with the whole network on each: ranks are started, or found, and joined."""

from collections.abc import Callable, Sequence

import torch

from convoy import launch
from convoy.cli.options import is_verbose
from convoy.comm.groups import leave
from convoy.comm.ranks import Ranks
from convoy.errors import ConvoyError
from convoy.launch import place as cores
from convoy.plans.plan import Plan
from convoy.training import choose_device
from convoy.training.environment import join_ranks

_PATIENCE_S = 7 * 24 * 3600.0
"""Ranks wait for each other as long as somebody may take to type the name of a file; who dies ends the others."""


def on_devices(
    arguments: Sequence[str],
    asked: int | None,
    device: str | None,
    work: Callable[[Ranks, torch.device], int],
) -> int:
    """Do some work on one device, or as one of several ranks, or start these.

    Args:
        arguments: of the command line, which the ranks are started with.
        asked: how many devices the command line asks for.
        device: the one that it names.
        work: is given the ranks, of which each computes its own samples, and the device of this one; returns the exit
            status.

    Returns:
        The exit status.

    Raises:
        ConvoyError: something in it cannot be.
    """
    place = launch.find_place()
    if place is not None:
        place.check(asked)
        with launch.as_rank(place):
            ranks, own = join_ranks(_PATIENCE_S)
            if ranks.num > 1:
                cores.take_share(ranks.gather, ranks.rank, None)
                ranks = Ranks.here()
                ranks.follow(Plan.by_samples(ranks.num).mesh, (0,))
            status = work(ranks, device_of(device, own, ranks.num))
            ranks.barrier()
            leave()
            return launch.ended(place, status)
    number = 1 if asked is None else asked
    if number < 1:
        raise ConvoyError(f"--devices {number} is no number of devices: give at least 1")
    if number > 1:
        return launch.start(arguments, number, is_verbose(arguments))
    return work(Ranks(), choose_device(device))


def device_of(name: str | None, own: torch.device, num_devices: int) -> torch.device:
    """The device of a rank: its own of the kind that was asked for, or exactly the one that was.

    Raises:
        ConvoyError: it is another rank's GPU.
    """
    if name is None or (name == "cuda" and own.type == "cuda"):
        return own
    device = choose_device(name)
    if device.type == "cuda" and device != own and num_devices > 1:
        raise ConvoyError(
            f"--device {name} is one GPU for all ranks, but this rank has {own}: use --device cuda, and choose among "
            "the machine's GPUs by CUDA_VISIBLE_DEVICES"
        )
    return device
