"""`convoy branch`: train the next stretch of a run with several batches, and say up to which larger ones help."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from convoy.bench.ask import numbers_of
from convoy.cli import keys, options
from convoy.cli.options import command_of
from convoy.errors import ConvoyError
from convoy.late import waiting_for
from convoy.terminal import Console
from convoy.training.recipe import load_recipe
from convoy.training.run_directory import RunDirectory


@click.command(
    "branch",
    epilog="""\b
Examples:
  convoy branch runs/cifar --batches 64,128,256
  convoy branch runs/cifar --batches 128,512 --at 3900 --epochs 2 --tolerance 0.02
""",
)
@options.run_argument
@click.option("--batches", metavar="N,N,…", required=True, help="Batches in which the run is to go on.")
@click.option("--epochs", metavar="E", type=float, default=1.0, show_default=True, help="Length of the stretch.")
@click.option("--at", metavar="STEP", type=int, help="Update of the checkpoint. [default: the newest with a rate]")
@click.option("--tolerance", metavar="T", type=float, default=0.05, show_default=True, help="Share of loss not minded.")
@click.option("--out", type=options.OutputPath(), help="Folder of the branches. [default: RUN-branches]")
@options.device
@options.as_json
@options.trust_code
@options.verbose
@click.pass_obj
def command(
    arguments: Sequence[str],
    /,
    run: Path,
    batches: str,
    epochs: float,
    at: int | None,
    tolerance: float,
    out: Path | None,
    device: str | None,
    as_json: bool,
    trust_code: bool,
) -> int:
    """Train the next stretch of RUN with several batches, each with the rate scaled as the optimizer does.

    All see the same number of samples, one training a device, as many at a time as there are. RUN stays as it is, and
    need not be finished. Stopped, the same command goes on.
    """
    numbers = sorted(set(numbers_of("--batches", batches)))
    for name, number in (("epochs", epochs), ("tolerance", tolerance)):
        if not 0 < number < math.inf:
            raise ConvoyError(f"--{name} is {number:g}: give a number above 0")
    RunDirectory(run).check_run()
    config = str(RunDirectory(run).config)
    if not trust_code:
        keys.check_own(load_recipe(config), config, ())
    with waiting_for("loading PyTorch"):
        from convoy.bench.branch import branches_of, largest_useful, train_branches
        from convoy.bench.jobs import Jobs
        from convoy.progress import ConsoleReporter
        from convoy.training import choose_device

    step, recipes = branches_of(run, numbers, epochs, at)
    folder = out or run.with_name(f"{run.resolve().name}-branches")
    with options.sigterm_as_interrupt(), ConsoleReporter(Console(stderr=True, highlight=False)) as reporter:
        jobs = Jobs(folder, choose_device(device).type, command=command_of(arguments))
        jobs.progress = lambda text: reporter.advance(0, text)
        rows = train_branches(folder, recipes, epochs, jobs)
    words: dict[str, Callable[[Any], str]] = {
        **dict.fromkeys(("loss", "test_loss"), "{:.4f}".format),
        "top1": "{:.2%}".format,
        "over_the_lowest": "{:+.1%}".format,
    }
    words["losses"] = lambda losses: ", ".join(f"{loss:.3f}" for loss in losses)
    options.show(rows, as_json, [*rows[0]], words)
    if not as_json:
        useful = largest_useful(rows, tolerance)
        click.echo(f"training loss by quarters of {epochs:g}ep after update {step:,} of {run}, and of the last two")
        click.echo(f"largest useful batch: {useful} (within {tolerance:.0%} of the lowest loss)")
    return 0
