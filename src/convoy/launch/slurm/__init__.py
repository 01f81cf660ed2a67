"""Jobs for Slurm: a script for `sbatch`, which saves and queues itself again before its time is over."""

from convoy.launch.slurm.script import Job
from convoy.launch.slurm.submit import submit

__all__ = ["Job", "submit"]
