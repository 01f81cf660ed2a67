"""Gives a script to Slurm."""

import shutil
import subprocess
from pathlib import Path

from convoy.errors import ConvoyError


def submit(script: Path) -> str:
    """Submit a script from the current folder.

    Returns:
        The number of the job.

    Raises:
        ConvoyError: there is no Slurm here, or it does not take the job.
    """
    if shutil.which("sbatch") is None:
        raise ConvoyError(f"there is no sbatch here: submit {script} on a host of the cluster, by sbatch {script}")
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise ConvoyError(f"sbatch does not take {script}: {said}")
    return done.stdout.strip().partition(";")[0]
