"""`convoy branch`: train the next stretch of a run with several batches, and say up to which larger ones help."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from convoy.bench.ask import numbers_of
from convoy.cli import keys, options
from convoy.cli.options import command_of
from convoy.errors import ConvoyError
from convoy.recipe.recipe import load_recipe
from convoy.run.directory import RunDirectory
from convoy.terminal import Console, waiting_for


@options.verb(
    "branch",
    """
  convoy branch runs/cifar --batches 64,128,256
  convoy branch runs/cifar --batches 128,512 --at 3900 --epochs 2
""",
)
@options.run_argument
@click.option("--batches", metavar="N,N,…", required=True, help="Batches in which the run is to go on.")
@click.option("--epochs", metavar="E", type=float, default=1.0, show_default=True, help="Length of the stretch.")
@click.option("--at", metavar="STEP", type=int, help="Update of the checkpoint. [default: the newest with a rate]")
@click.option("--out", type=options.OutputPath(), help="Folder of the branches. [default: RUN-branches]")
@options.device
@options.as_json
@options.trust_code
@click.pass_obj
def command(arguments: Sequence[str], /, run: Path, batches: str, epochs: float, **values: Any) -> int:
    """Train the next stretch of RUN with several batches, each with the rate scaled as the optimizer does.

    All see the same number of samples, one training a device, as many at a time as there are. RUN stays as it is, and
    need not be finished. Stopped, the same command goes on.
    """
    numbers = sorted(set(numbers_of("--batches", batches)))
    if not 0 < epochs < math.inf:
        raise ConvoyError(f"--epochs is {epochs:g}: give a number above 0")
    RunDirectory(run).check_run()
    config = str(RunDirectory(run).config)
    if not values["trust_code"]:
        keys.check_own(load_recipe(config), config, ())
    with waiting_for("loading PyTorch"):
        from convoy.bench.branch import branches_of, check_kept, train_branches
        from convoy.bench.jobs import Jobs
        from convoy.progress import ConsoleReporter
        from convoy.training import choose_device

    folder = values["out"] or run.with_name(f"{run.resolve().name}-branches")
    step, jobs = branches_of(run, numbers, epochs, values["at"], folder)
    check_kept(run, step, jobs)
    runner = Jobs.here(choose_device(values["device"]).type, command=command_of(arguments))
    with options.sigterm_as_interrupt(), ConsoleReporter(Console(stderr=True, highlight=False)) as reporter:
        runner.say = lambda job, text, done, total: reporter.prepare(f"{job.out.name}: {text}", done, total)
        document = train_branches(run, jobs, epochs, runner)
    if values["as_json"]:
        click.echo(json.dumps(document, indent=2, allow_nan=False))
        return 0
    words = dict.fromkeys(("loss", "test_loss"), "{:.4f}".format) | {"test_top1": "{:.2%}".format}
    options.show(document["rows"], False, [*document["rows"][0]], words | {"over_the_lowest": "{:+.1%}".format})
    click.echo(f"loss: of training over the last half of {epochs:g}ep after update {step:,} of {run}")
    click.echo(document["sentence"])
    return 0
