"""What a finished run is used for: `convoy predict`, `convoy eval`, `convoy export` and `convoy report`."""

import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convoy.cli import options
from convoy.errors import ConvoyError
from convoy.files import csv_line, csv_of, existing, expanded, finite, write_json
from convoy.run.directory import RunDirectory
from convoy.tasks.metric import metric_figure
from convoy.terminal import LOST, Console, printable, waiting_for

if TYPE_CHECKING:
    import torch
    from rich.status import Status

    from convoy.comm.ranks import Ranks
    from convoy.data.dataset import DataSet
    from convoy.tasks.task import Evaluation
    from convoy.training.use import FileClasses

STANDARD_INPUT = "-"


@options.verb(
    "predict",
    """
  convoy predict runs/first digit.png
  convoy predict runs/first photos/ --top 1 > classes.csv
  find photos -name '*.jpg' | convoy predict runs/first - --json
  convoy predict runs/first digit.png --checkpoint best
  convoy predict runs/first photos/ --devices 4 --skip-bad
""",
)
@options.run_argument
@click.argument("pictures", metavar="PICTURE|FOLDER|-…", nargs=-1, required=True)
@click.option("--top", metavar="N", type=click.IntRange(min=1), default=5, help="Likeliest classes. [default: 5]")
@options.checkpoint
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each picture instead of CSV.")
@click.option(
    "--batch", metavar="N", type=click.IntRange(min=1), default=32, help="Pictures computed at once. [default: 32]"
)
@click.option("--skip-bad", is_flag=True, help="Exit with status 0 although pictures cannot be read.")
@click.option("--devices", metavar="N", type=click.IntRange(min=1), help="Classify on so many devices. [default: 1]")
@options.device
@options.trust_code
@click.pass_obj
def predict(arguments: Sequence[str], /, run: Path, pictures: tuple[str, ...], **values: Any) -> int:
    """Classify pictures by the network that the run RUN has trained.

    A FOLDER is searched for picture files, those in its folders too, in the order of their names; - reads names of
    files from standard input, one a line. Pictures are prepared as in the run's evaluation.

    The output is CSV with the columns file, rank (1 is the likeliest class), class and probability, or JSON; in the
    place of the probability regression has the value, segmentation the share of the pixels. It is the
    same on any number of devices, and written batch by batch: with --batch 1 every name is answered at once. In CSV a
    name that a spreadsheet would take for a formula has a ' before it; JSON has names as they are.

    Pictures that cannot be read are named on standard error; the exit status is then 2, unless --skip-bad is given.
    """
    pictures = tuple(map(str, map(expanded, pictures)))
    for text in pictures:
        if text != STANDARD_INPUT and not Path(text).exists():
            raise ConvoyError(f"there is no picture or folder {printable(text)}: check the path")
    RunDirectory(run).check_trained(values["checkpoint"])
    with waiting_for("loading PyTorch"):
        from convoy.cli.on_devices import by_samples, load_chosen  # with torch, for which no mistake is to wait
        from convoy.training.use import Classifier, classify

    def work(ranks: "Ranks", local_device: "torch.device") -> int:
        first = ranks.rank == 0
        trained = load_chosen(run, values["checkpoint"], ranks, values["trust_code"])
        classifier = Classifier(trained, local_device, values["top"])
        console = Console(stderr=True, highlight=False)
        shown = first and console.is_terminal and not sys.stdout.isatty()
        with console.status("reading") if shown else nullcontext() as status:
            writer = _Writer(trained.classes, trained.task.answer_name, values["as_json"], not first, status)
            names = _picture_files(pictures) if first else None
            for answers in classify(classifier, names, values["batch"], ranks, lambda: writer.closed):
                writer.write(answers)
        writer.finish()
        return 1 if writer.closed else 2 if writer.num_bad and not values["skip_bad"] else 0

    return by_samples(arguments, values["devices"], values["device"], work)


def _picture_files(texts: Sequence[str]) -> Iterator[str]:
    """The files, in order; a ConvoyError where a folder holds no picture."""
    from convoy.data.decode import left_out
    from convoy.data.folder import pictures

    for text in texts:
        if text == STANDARD_INPUT:
            for line in sys.stdin.buffer:
                if name := os.fsdecode(line.rstrip(b"\r\n")):
                    yield name
        elif Path(text).is_dir():
            files = pictures(Path(text), ignored := Counter[str]())
            for note in left_out(ignored):
                click.echo(f"{printable(text)}: {note}", err=True)
            if not files:
                raise ConvoyError(f"the folder {printable(text)} holds no pictures: name another, or picture files")
            yield from files
        else:
            yield text


class _Writer:
    """Writes answers as they come, and how many there are to a status line."""

    def __init__(
        self, classes: Sequence[str], number: str, as_json: bool, quiet: bool, status: "Status | None"
    ) -> None:
        self.closed = False  # whether nobody reads any more
        self.num_bad = 0  # pictures that could not be read
        self._done, self._number = 0, number  # what is said of a class: its probability
        self._classes, self._as_json, self._quiet, self._status = classes, as_json, quiet, status

    def write(self, answers: Sequence["FileClasses"]) -> None:
        lines = [] if self._done or self._as_json else [csv_line(("file", "rank", "class", self._number))]
        for answer in answers:
            best = [(self._classes[place], number) for place, number in answer.best]
            if answer.bad is not None:
                self.num_bad += 1
                if not self._quiet:
                    click.echo(f"{printable(answer.name)} {answer.bad}", err=True)
            elif self._as_json:
                predictions = [{"class": name, self._number: round(number, 6)} for name, number in best]
                answered = finite({"file": answer.name, "predictions": predictions})
                lines.append(json.dumps(answered, allow_nan=False) + "\n")
            else:
                rows = [(answer.name, place, name, f"{number:.6f}") for place, (name, number) in enumerate(best, 1)]
                lines += map(csv_line, rows)
        self._done += len(answers)
        self._put("".join(lines))
        if self._status is not None:
            self._status.update(f"{self._done:,} pictures" + (f", {self.num_bad:,} bad" if self.num_bad else ""))

    def finish(self) -> None:
        """Write the header where there were no answers, and how many pictures were bad."""
        if not self._done:
            self.write([])
        if self.num_bad and not self._quiet:
            click.echo(f"{self.num_bad:,} of {self._done:,} pictures cannot be read", err=True)

    def _put(self, text: str) -> None:
        if self._quiet or self.closed:
            return
        if sys.stdout.isatty():
            text = printable(text, keep="\n")
        sys.stdout.buffer.write(os.fsencode(text))
        sys.stdout.buffer.flush()
        self.closed = "stdout" in LOST


@options.verb(
    "eval",
    """
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
@click.option("--devices", metavar="N", type=click.IntRange(min=1), help="Evaluate on so many devices. [default: 1]")
@options.device
@options.as_json
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV instead of a table.")
@options.trust_code
@click.pass_obj
def evaluate(arguments: Sequence[str], /, run: Path, data: str | None, checkpoint: str | None, **values: Any) -> int:
    """Evaluate the run RUN: every test image counts exactly once.

    Without --data and --checkpoint the confusion matrix and worst mistakes in RUN are written anew. Of other data the
    test split counts; data that have none are evaluated as a whole.

    A class's precision is the share of the images taken for it that are of it, its recall the share of its images that
    are taken for it.
    """
    if values["as_json"] and values["as_csv"]:
        raise ConvoyError("--json and --csv are two forms of the same table: give one of them")
    RunDirectory(run).check_trained(checkpoint)
    if data is not None:
        existing(data)
    with waiting_for("loading PyTorch"):
        from convoy.cli.on_devices import by_samples, load_chosen  # with torch, for which no mistake is to wait
        from convoy.training.restore import evaluate_run, evaluation_data
        from convoy.training.resume import check_ranks

    def work(ranks: "Ranks", local_device: "torch.device") -> int:
        trained = load_chosen(run, checkpoint, ranks, values["trust_code"])
        opened, notes = evaluation_data(trained, data)
        check_ranks(opened, ranks)
        result = evaluate_run(trained, opened, local_device, ranks)
        if ranks.rank > 0:
            return 0
        for note in notes:
            click.echo(note, err=True)
        if data is None and checkpoint is None and not trained.changed:
            _keep(run, opened, result)
        form = "json" if values["as_json"] else "csv" if values["as_csv"] else ""
        names = [*(metric.name for metric in trained.task.metrics), *result.own]
        _show_evaluation(opened.name, result, names, trained.classes if values["per_class"] else [], form)
        return 0

    return by_samples(arguments, values["devices"], values["device"], work)


def _show_evaluation(name: str, result: "Evaluation", names: Sequence[str], classes: list[str], form: str) -> None:
    """Print the metrics of these names, and those of every class where they are given."""
    metrics = result.metrics()
    row: dict[str, Any] = {
        "data": name,
        "images": result.num_images,
        **{metric: metrics.get(metric) for metric in names},
        "not readable": len(result.bad),
    }
    rows: list[dict[str, Any]] = result.per_class(classes) if classes else []
    if form == "json":
        options.show([row | {"classes": rows} if classes else row], as_json=True)
    elif form == "csv":
        click.echo(csv_of(rows or [row]), nl=False)
    else:
        floats = {name for line in (row, *rows) for name, value in line.items() if isinstance(value, float)}
        formats = {name: partial(metric_figure, name) for name in floats}
        options.show([row], right=list(row)[1:], formats=formats)
        if rows:
            click.echo()
            options.show(rows, right=list(rows[0])[1:], formats=formats)


def _keep(run: Path, data: "DataSet", result: "Evaluation") -> None:
    """Write the evaluation into the run; where that is closed to this user, it is still printed."""
    try:
        write_json(run / "evaluation.json", result.save(run, data), indent=None)
    except OSError as error:
        click.echo(f"{run} cannot be written to ({error.strerror}): its confusion matrix stays as it was", err=True)


@options.verb(
    "export",
    """
  convoy export runs/first                             # runs/first/model.onnx
  convoy export runs/first --to lenet.onnx
  convoy export runs/first --checkpoint best           # runs/first/model-best.onnx
  convoy export runs/first --to lenet.pt2              # then: torch.export.load("lenet.pt2").module()(images)
""",
)
@options.run_argument
@click.option("--onnx", is_flag=True, help="Write ONNX: the default, unless --to ends in .pt2.")
@click.option("--torch-export", is_flag=True, help="Write a program of torch.export (.pt2).")
@click.option("--to", type=options.OutputPath(), help="The file to write. [default: RUN/model.onnx or …/model.pt2]")
@options.checkpoint
@options.trust_code
def export(
    run: Path, onnx: bool, torch_export: bool, to: Path | None, checkpoint: str | None, trust_code: bool
) -> None:
    """Write the network of the run RUN in another format.

    Its input is normalized pictures [batch, channels, height, width], its output logits [batch, classes]; mean,
    standard deviation and classes are in the file's metadata. (The weights for PyTorch: RUN/weights.safetensors.)
    """
    if onnx and torch_export:
        raise ConvoyError("--onnx and --torch-export are two formats: write one after the other")
    suffix = to.suffix.lower() if to is not None else ""
    if suffix == ".pt2" and onnx:
        raise ConvoyError(f"--onnx contradicts --to {to}: name a file that ends in .onnx")
    if suffix == ".onnx" and torch_export:
        raise ConvoyError(f"--torch-export contradicts --to {to}: name a file that ends in .pt2")
    if to is not None and suffix not in (".onnx", ".pt2") and not (onnx or torch_export or to.is_dir()):
        raise ConvoyError(f"--to {to} does not say a format by its ending: end it in .onnx or .pt2, or give --onnx")
    RunDirectory(run).check_trained(checkpoint)
    with waiting_for("loading PyTorch"):
        from convoy.cli.on_devices import load_chosen
        from convoy.comm.ranks import Ranks
        from convoy.training.use import export as write  # with torch, for which no mistake is to wait

    as_torch = torch_export or suffix == ".pt2"
    name = "model" if checkpoint is None else f"model-{checkpoint}"
    path = to or run / (f"{name}.pt2" if as_torch else f"{name}.onnx")
    difference = write(load_chosen(run, checkpoint, Ranks(), trust_code), "torch-export" if as_torch else "onnx", path)
    reader = "torch.export.load's" if as_torch else "onnxruntime's"
    click.echo(f"wrote {path}; {reader} outputs differ from PyTorch's by {difference:.1e} at most")


# By the file of a study, what writes its page.
STUDIES = {
    "bench.json": ("convoy.bench.page", "write_files"),
    "batches.json": ("convoy.bench.batch_page", "write_batches"),
    "trials.json": ("convoy.bench.trials_page", "write_trials"),
}


@options.verb(
    "report",
    """
  convoy report runs/first
  convoy report runs/bench-resnet18
""",
)
@options.run_argument
def report(run: Path) -> None:
    """Write report.html for the run directory RUN, or the folder of a study, as far as it has come."""
    module, function = next((at for name, at in STUDIES.items() if (run / name).is_file()), ("", ""))
    if module and not RunDirectory(run).is_run():
        click.echo(f"report: {getattr(importlib.import_module(module), function)(run).report}")
        return
    RunDirectory(run).check_run()
    from convoy.report.report import write_report  # with matplotlib, for which no mistake is to wait

    click.echo(f"report: {write_report(run)}")
