"""`convoy eval`: what a trained network does on its test split, or on other data."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convoy.cli import options
from convoy.errors import ConvoyError
from convoy.files import existing, write_json
from convoy.late import waiting_for
from convoy.training.run_directory import RunDirectory

if TYPE_CHECKING:
    import torch

    from convoy.comm.ranks import Ranks
    from convoy.data import DataSet
    from convoy.training.classification import Evaluation

FORMATS = {**dict.fromkeys(("top1", "top5", "precision", "recall"), "{:.2%}".format), "loss": "{:.4f}".format}


@click.command(
    "eval",
    epilog="""\b
Examples:
  convoy eval runs/first
  convoy eval runs/first --per-class
  convoy eval runs/first --checkpoint best             # or last, also of a run that was stopped
  convoy eval runs/first --data /data/mnist --json
  convoy eval runs/photos --data new-photos/cat        # pictures of one class, by the folder's name
""",
)
@options.run_argument
@click.option(
    "--data",
    metavar="PATH",
    help="Other data, with the run's classes or some of them, by their names. [default: the run's own]",
)
@options.checkpoint
@click.option("--per-class", is_flag=True, help="Show samples, precision and recall of every class.")
@click.option("--devices", metavar="N", type=int, help="Evaluate on so many devices. [default: 1]")
@options.device
@options.as_json
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV instead of a table.")
@options.trust_code
@options.verbose
@click.pass_obj
def command(
    arguments: Sequence[str],
    /,
    run: Path,
    data: str | None,
    checkpoint: str | None,
    per_class: bool,
    devices: int | None,
    device: str | None,
    as_json: bool,
    as_csv: bool,
    trust_code: bool,
) -> int:
    """Evaluate the run RUN: every test image counts exactly once.

    Without --data and --checkpoint the confusion matrix and worst mistakes in RUN are written anew. Of other data the
    test split counts; data that have none are evaluated as a whole.

    A class's precision is the share of the images taken for it that are of it, its recall the share of its images that
    are taken for it.
    """
    if as_json and as_csv:
        raise ConvoyError("--json and --csv are two forms of the same table: give one of them")
    RunDirectory(run).check_trained(checkpoint)
    if data is not None:
        existing(data)
    with waiting_for("loading PyTorch"):
        from convoy.cli.on_devices import load_chosen, on_devices  # with torch, for which no mistake is to wait
        from convoy.training.restore import evaluate_run, evaluation_data
        from convoy.training.resume import check_ranks

    def work(ranks: "Ranks", local_device: "torch.device") -> int:
        trained = load_chosen(run, checkpoint, ranks, trust_code)
        opened, notes = evaluation_data(trained, data)
        check_ranks(opened, ranks)
        result = evaluate_run(trained, opened, local_device, ranks)
        if ranks.rank > 0:
            return 0
        for note in notes:
            click.echo(note, err=True)
        if data is None and checkpoint is None and not trained.changed:
            _keep(run, opened, result)
        _show(opened.name, result, trained.classes if per_class else [], "json" if as_json else "csv" if as_csv else "")
        return 0

    return on_devices(arguments, devices, device, work)


def _show(name: str, result: "Evaluation", classes: list[str], form: str) -> None:
    """Print the evaluation, and that of every class where they are given."""
    row: dict[str, Any] = {
        "data": name,
        "images": result.num_images,
        "top1": result.top1,
        "top5": result.top5,
        "loss": result.loss,
        "not readable": len(result.bad),
    }
    rows: list[dict[str, Any]] = result.per_class(classes) if classes else []
    if form == "json":
        options.show([row | {"classes": rows} if classes else row], as_json=True)
    elif form == "csv":
        table = rows or [row]
        click.echo("".join(map(options.as_csv, [table[0], *(line.values() for line in table)])), nl=False)
    else:
        options.show([row], right=list(row)[1:], formats=FORMATS)
        if rows:
            click.echo()
            options.show(rows, right=("samples", "precision", "recall"), formats=FORMATS)


def _keep(run: Path, data: "DataSet", result: "Evaluation") -> None:
    """Write the evaluation into the run; where that is closed to this user, it is still printed."""
    try:
        write_json(run / "evaluation.json", result.save(run, data.classes, data.test.name))
    except OSError as error:
        click.echo(f"{run} cannot be written to ({error.strerror}): its confusion matrix stays as it was", err=True)
