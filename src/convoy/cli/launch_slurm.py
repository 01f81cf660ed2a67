"""`convoy launch slurm`: a job script for Slurm."""

import click


@click.command("slurm")
def command() -> int:
    """Write a job script for Slurm, and submit it."""
    raise NotImplementedError
