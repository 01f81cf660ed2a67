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
from convoy.plans.plan import Plan
from convoy.run.directory import RunDirectory
from convoy.training import choose_device
from convoy.training.environment import join_ranks
from convoy.training.restore import TrainedRun, checkpoint_step, restored

# Ranks wait as long as somebody may take to type the name of a file; a rank that dies ends the others.
_PATIENCE_S = 7 * 24 * 3600.0

Work = Callable[[Ranks, torch.device], int]  # is given the ranks and the device of this one; returns the exit status


def on_devices(
    arguments: Sequence[str],
    asked: int | None,
    device: str | None,
    work: Work,
    number: Callable[[], int],
    cores_per_device: int | None = None,  # None divides them evenly
    patience_s: float = 600.0,
) -> int:
    """Do some work as one of the ranks that somebody has started, `asked` of them, each with its share of the cores;
    else start as many as `number` says with the `arguments` of the command line, or do it here where one is enough; the
    exit status. A rank waits `patience_s` seconds for the others."""
    place = launch.find_place()
    if place is not None:
        place.check(asked)
        with launch.as_rank(place):
            ranks, local_device = join_ranks(patience_s, device)
            resources.take_share(ranks.gather, ranks.rank, cores_per_device)
            ranks = Ranks.here()
            with memory_explained(ranks.rank, ranks.num):
                status = work(ranks, device_of(device, local_device, ranks.num))
            ranks.barrier()
            leave()
            return launch.ended(place, status)
    if (several := number()) > 1:
        return launch.start(arguments, several, is_verbose(arguments))
    if cores_per_device is not None:
        resources.pin(resources.share(resources.own_cores(), 1, 0, cores_per_device))
    with memory_explained(0, 1):
        return work(Ranks(), choose_device(device))


def by_samples(arguments: Sequence[str], devices: int | None, device: str | None, work: Work) -> int:
    """The same, with the whole network on each of so many devices."""

    def work_by_samples(ranks: Ranks, local_device: torch.device) -> int:
        if ranks.num > 1:
            ranks.follow(Plan.by_samples(ranks.num).mesh, (0,))
        return work(ranks, local_device)

    return on_devices(arguments, devices, device, work_by_samples, lambda: devices or 1, patience_s=_PATIENCE_S)


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
