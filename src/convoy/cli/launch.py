"""`convoy launch`: the commands, the job script or the manifest that train on more than one host."""

import click

from convoy.cli.options import LazyGroup

LAUNCHERS = {
    "hosts": ("convoy.cli.launch_hosts", "Print the command to start on each of several hosts."),
    "slurm": ("convoy.cli.launch_slurm", "Write a job script for Slurm, and submit it."),
    "kubernetes": ("convoy.cli.launch_kubernetes", "Write a manifest for Kubernetes."),
}


@click.command(
    "launch",
    cls=LazyGroup,
    verbs=LAUNCHERS,
    epilog="""\b
Examples:
  convoy launch hosts node1:4,node2:4 -- resnet50 --data /data/imagenet --recipe imagenet-90
  convoy launch slurm --nodes 2 --devices-per-node 4 --time 8h --submit -- resnet50 --data /data/imagenet
""",
)
def command() -> None:
    """Train on several hosts, by the engine that they have.

    What comes after -- is what convoy train would be given.
    """
