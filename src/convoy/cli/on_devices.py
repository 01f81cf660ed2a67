"""Work of which every device does a share: ranks are started, or found, and joined."""

from collections.abc import Callable, Sequence
from pathlib import Path

import click
import torch

from convoy import launch, resources
from convoy.cli.options import is_verbose
from convoy.comm.joining import gpus, leave
from convoy.comm.position import memory_explained
from convoy.comm.ranks import Ranks
from convoy.errors import ConvoyError
from convoy.launch import RankPlace
from convoy.plans.plan import Plan
from convoy.run.directory import RunDirectory
from convoy.training import choose_device
from convoy.training.environment import join_ranks
from convoy.training.restore import TrainedRun, checkpoint_step, restored

# Ranks wait as long as somebody may take to type the name of a file; a rank that dies ends the others.
_PATIENCE_S = 7 * 24 * 3600.0

Work = Callable[[Ranks, torch.device], int]  # is given the ranks and the device of this one; returns the exit status


def on_devices(arguments: Sequence[str], devices: int | None, device: str | None, work: Work) -> int:
    """Do some work on one device, or as one of several ranks, with the whole network on each, or start these with the
    `arguments` of the command line, which asks for so many `devices`; the exit status."""

    def work_by_samples(ranks: Ranks, local_device: torch.device) -> int:
        if ranks.num > 1:
            ranks.follow(Plan.by_samples(ranks.num).mesh, (0,))
        return work(ranks, local_device)

    place = launch.find_place()
    if place is not None:
        return run_as_rank(place, devices, device, work_by_samples, patience_s=_PATIENCE_S)
    number = 1 if devices is None else devices
    if number < 1:
        raise ConvoyError(f"--devices {number} is no number of devices: give at least 1")
    return launch.start(arguments, number, is_verbose(arguments)) if number > 1 else run_alone(device, work)


def run_alone(device: str | None, work: Work, cores_per_device: int | None = None) -> int:
    """Do the work in this process, on its share of the cores where that is limited; the exit status."""
    if cores_per_device is not None:
        resources.pin(resources.share(resources.own_cores(), 1, 0, cores_per_device))
    with memory_explained(0, 1):
        return work(Ranks(), choose_device(device))


def load_chosen(run: Path, checkpoint: str | None, ranks: Ranks, trust_code: bool) -> TrainedRun:
    """A run's network, by its final weights or those of a checkpoint, the same one on all ranks; it is said which."""
    step = None
    if checkpoint is not None:
        step = ranks.first(lambda: checkpoint_step(RunDirectory(run), checkpoint))
        if ranks.rank == 0:
            click.echo(f"the network is that of the checkpoint after {step:,} updates", err=True)
    trained = restored(run, step, trust_code)
    if trained.changed and ranks.rank == 0:
        click.echo(trained.changed, err=True)
    return trained


def run_as_rank(
    place: RankPlace,
    devices: int | None,
    device: str | None,
    work: Work,
    cores_per_device: int | None = None,  # None divides them evenly
    patience_s: float = 600.0,
) -> int:
    """Join the other ranks, for whom this one waits `patience_s` seconds, do the work on this one's share of the cores,
    and leave; the exit status."""
    place.check(devices)
    with launch.as_rank(place):
        ranks, local_device = join_ranks(patience_s, device)
        resources.take_share(ranks.gather, ranks.rank, cores_per_device)
        ranks = Ranks.here()
        with memory_explained(ranks.rank, ranks.num):
            status = work(ranks, device_of(device, local_device, ranks.num))
        ranks.barrier()
        leave()
        return launch.ended(place, status)


def device_of(name: str | None, local_device: torch.device, num_devices: int) -> torch.device:
    """The device of a rank: its own of the kind that was asked for, or exactly the one that was."""
    is_gpu = local_device.type == "cuda"
    if (name is None and (is_gpu or not gpus().why)) or (name == "cuda" and is_gpu):
        return local_device
    device = choose_device(name)
    if device.type == "cuda" and device != local_device and num_devices > 1:
        raise ConvoyError(
            f"--device {name} is one GPU for all ranks, but this rank has {local_device}: use --device cuda, and "
            "choose among the machine's GPUs by CUDA_VISIBLE_DEVICES"
        )
    return device
