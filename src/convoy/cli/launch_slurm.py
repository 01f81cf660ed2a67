"""`convoy launch slurm`: a job script for Slurm."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import click

from convoy.cli import options
from convoy.cli.launch_arguments import training_arguments, without, without_model
from convoy.cli.options import written
from convoy.launch.slurm import Job, submit


@click.command(
    "slurm",
    epilog="""\b
Examples:
  convoy launch slurm --nodes 2 --devices-per-node 4 --time 8h --option partition=gpu --submit \\
      -- resnet50 --data /data/imagenet --recipe imagenet-90 --out runs/resnet50
  convoy launch slurm --nodes 4 --cores-per-device 16 --script job.sh -- lenet --data mnist-mini --device cpu
""",
)
@click.argument("arguments", metavar="-- TRAIN...", nargs=-1, type=click.UNPROCESSED)
@click.option("--nodes", metavar="N", type=int, default=1, show_default=True)
@click.option(
    "--devices-per-node", metavar="N", type=int, default=1, show_default=True, help="GPUs, so ranks, of each."
)
@click.option("--cores-per-device", metavar="N", type=int, help="CPU cores of each. [default: Slurm's]")
@click.option(
    "--time", default="1h", show_default=True, help="At once: 8h, 90m, 1d12h. A run may take many times that."
)
@click.option(
    "--save-before", metavar="SECONDS", type=int, default=120, show_default=True, help="Save so long before its end."
)
@click.option("--max-restarts", metavar="N", type=int, default=3, show_default=True, help="After failures of ranks.")
@click.option("--interface", metavar="NAME", help="Talk through it, e.g. ib0. [default: on the way to the first node]")
@click.option("--name", help="Of the job. [default: of the network]")
@click.option("--option", "others", metavar="NAME=VALUE", multiple=True, help="Any other of sbatch's; repeatable.")
@click.option("--python", default=sys.executable, help="The Python that has Convoy, on the nodes. [default: this one]")
@click.option("--script", type=options.Place(dir_okay=False), help="Write it there. [default: NAME.sbatch]")
@click.option("--submit", "to_submit", is_flag=True, help="Submit it, too.")
@options.as_json
@options.verbose
def command(
    arguments: tuple[str, ...],
    name: str | None,
    others: tuple[str, ...],
    script: Path | None,
    to_submit: bool,
    as_json: bool,
    **values: Any,
) -> int:
    """Write a job for Slurm that trains on its nodes, and submit it.

    What comes after -- is what convoy train would be given. Before the time of the job is over the run is saved and
    the job queued again, until the run is done.
    """
    given = training_arguments(arguments, values["nodes"] * values["devices_per_node"])
    if values["interface"] is None:
        values["interface"] = given["interface"]
    name = name or re.sub(r"[^\w.-]+", "-", given["model"] or Path(given["recipe"] or given["out"]).stem)
    if given["model"] is None:
        arguments = tuple(without_model(arguments))
    job = Job(
        arguments=without(arguments, "--out", "--interface", flags=("--resume",)),
        out=None if given["out"] is None else str(given["out"]),
        name=name,
        gpus=given["device"] != "cpu",
        options=dict(_option(text) for text in others),
        **values,
    )
    script = script or Path(f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}.sbatch")
    written("--script", script, job.script())
    number = submit(script) if to_submit else None
    if as_json:
        click.echo(json.dumps({"script": str(script), "job": number}))
    elif number is None:
        click.echo(f"script: {script}; submit it by: sbatch {script}")
    else:
        click.echo(f"script: {script}; submitted as job {number}")
    return 0


def _option(text: str) -> tuple[str, str | None]:
    name, equals, value = text.lstrip("-").partition("=")
    return name, value if equals else None
