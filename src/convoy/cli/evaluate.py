"""`convoy eval`: what a trained network does on its test split, or on other data."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from convoy.cli import options, tables
from convoy.files import write_json

if TYPE_CHECKING:
    from convoy.training.evaluate import Evaluation
    from convoy.training.restore import Trained


@click.command(
    "eval",
    epilog="""\b
Examples:
  convoy eval runs/first
  convoy eval runs/first --data /data/mnist --json
""",
)
@options.run_argument
@click.option("--data", metavar="PATH", help="Other data with the same classes. [default: the run's own]")
@options.device
@options.as_json
@options.verbose
def command(run: Path, data: str | None, device: str | None, as_json: bool) -> None:
    """Evaluate the finished run RUN: every test image counts exactly once.

    Without --data the confusion matrix and worst mistakes in RUN are written anew.
    """
    from convoy.training import choose_device  # with torch, for which no help is to wait
    from convoy.training.restore import restore

    trained = restore(run, data)
    result = trained.evaluate(choose_device(device))
    if data is None:
        _keep(run, trained, result)
    row = {
        "data": trained.data.name,
        "images": result.num_images,
        "top1": result.top1,
        "top5": result.top5,
        "loss": result.loss,
        "not readable": len(result.bad),
    }
    if not as_json:
        row["top1"] = f"{result.top1:.2%}"
        row["top5"] = "-" if result.top5 is None else f"{result.top5:.2%}"
        row["loss"] = f"{result.loss:.4f}"
    tables.show([row], as_json, right=("images", "top1", "top5", "loss", "not readable"))


def _keep(run: Path, trained: "Trained", result: "Evaluation") -> None:
    """Write it into the run, which may be another's: what was found is shown all the same."""
    try:
        write_json(run / "evaluation.json", result.save(run, trained.data.classes, trained.data.test.name))
    except OSError as error:
        click.echo(f"{run} cannot be written to ({error.strerror}): its confusion matrix stays as it was", err=True)
