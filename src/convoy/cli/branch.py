"""`convoy branch`: train the next stretch of a run with several batches, and say up to which larger ones help."""

from collections.abc import Sequence
from pathlib import Path

import click

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
    parts = [part.strip() for part in batches.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConvoyError(f"--batches {batches} is no list of numbers: write e.g. 64,128,256")
    for name, number in (("epochs", epochs), ("tolerance", tolerance)):
        if not 0 < number < 1e9:
            raise ConvoyError(f"--{name} is {number:g}: give a number above 0")
    config = RunDirectory(run).config
    RunDirectory(run).check_run()
    if not trust_code:
        keys.check_own(load_recipe(str(config)), str(config), ())
    with waiting_for("loading PyTorch"):
        from convoy.bench.branch import branches_of, largest_useful, train_branches
        from convoy.progress import ConsoleReporter

    step, recipes = branches_of(run, sorted(set(map(int, parts))), epochs, at)
    folder = out or run.with_name(f"{run.resolve().name}-branches")
    with options.sigterm_as_interrupt(), ConsoleReporter(Console(stderr=True, highlight=False)) as reporter:
        done = train_branches(folder, recipes, device, command_of(arguments), lambda text: reporter.advance(0, text))
    lowest = min(branch.losses[-1] for branch in done)
    rows = [
        {
            "batch": branch.batch,
            "rate": branch.lr,
            "test_loss_on_the_way": ", ".join(f"{loss:.4f}" for loss in branch.losses[:-1]),
            "test_loss": round(branch.losses[-1], 6),
            "over_the_lowest": round(branch.losses[-1] / lowest - 1, 6),
            "top1": branch.top1,
        }
        for branch in done
    ]
    words = {"over_the_lowest": "{:+.1%}".format, "top1": "{:.2%}".format, "test_loss": "{:.4f}".format}
    options.show(rows, as_json, ["batch", "rate", *words], words)
    if not as_json:
        useful = largest_useful(done, tolerance)
        click.echo(f"after update {step:,} of {run}, {epochs:g} epochs more, the rate scaled and constant")
        click.echo(f"largest useful batch: {useful} (within {tolerance:.0%} of the lowest test loss)")
    return 0
