"""`convoy predict`: classify pictures by a trained network."""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from convoy.cli import options
from convoy.errors import ConvoyError
from convoy.files import expanded
from convoy.late import waiting_for
from convoy.terminal import LOST, Console, printable
from convoy.training.run_directory import RunDirectory

if TYPE_CHECKING:
    import torch
    from rich.status import Status

    from convoy.comm.ranks import Ranks
    from convoy.training.use import FileClasses

HEADER = ("file", "rank", "class", "probability")
STANDARD_INPUT = "-"


@click.command(
    "predict",
    epilog="""\b
Examples:
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
@click.option("--devices", metavar="N", type=int, help="Classify on so many devices. [default: 1]")
@options.device
@options.trust_code
@options.verbose
@click.pass_obj
def command(
    arguments: Sequence[str],
    /,
    run: Path,
    pictures: tuple[str, ...],
    top: int,
    checkpoint: str | None,
    as_json: bool,
    batch: int,
    skip_bad: bool,
    devices: int | None,
    device: str | None,
    trust_code: bool,
) -> int:
    """Classify pictures by the network that the run RUN has trained.

    A FOLDER is searched for picture files, those in its folders too, in the order of their names; - reads names of
    files from standard input, one a line. Pictures are prepared as in the run's evaluation.

    The output is CSV with the columns file, rank (1 is the likeliest class), class and probability, or JSON. It is the
    same on any number of devices, and written batch by batch: with --batch 1 every name is answered at once. In CSV a
    name that a spreadsheet would take for a formula has a ' before it; JSON has names as they are.

    Pictures that cannot be read are named on standard error; the exit status is then 2, unless --skip-bad is given.
    """
    pictures = tuple(map(str, map(expanded, pictures)))
    for text in pictures:
        if text != STANDARD_INPUT and not Path(text).exists():
            raise ConvoyError(f"there is no picture or folder {printable(text)}: check the path")
    RunDirectory(run).check_trained(checkpoint)
    with waiting_for("loading PyTorch"):
        from convoy.cli.on_devices import load_chosen, on_devices  # with torch, for which no mistake is to wait
        from convoy.training.use import Classifier, classify

    def work(ranks: "Ranks", local_device: "torch.device") -> int:
        first = ranks.rank == 0
        trained = load_chosen(run, checkpoint, ranks, trust_code)
        classifier = Classifier(trained, local_device, top)
        console = Console(stderr=True, highlight=False)
        shown = first and console.is_terminal and not sys.stdout.isatty()
        with console.status("reading") if shown else nullcontext() as status:
            writer = _Writer(trained.classes, as_json, not first, status)
            names = _names(pictures) if first else None
            for answers in classify(classifier, names, batch, ranks, lambda: writer.closed):
                writer.write(answers)
        writer.finish()
        return 1 if writer.closed else 2 if writer.num_bad and not skip_bad else 0

    return on_devices(arguments, devices, device, work)


def _names(texts: Sequence[str]) -> Iterator[str]:
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

    def __init__(self, classes: Sequence[str], as_json: bool, quiet: bool, status: "Status | None") -> None:
        self.closed = False  # whether nobody reads any more
        self.num_bad = 0  # pictures that could not be read
        self._done = 0
        self._classes, self._as_json, self._quiet, self._status = classes, as_json, quiet, status

    def write(self, answers: Sequence["FileClasses"]) -> None:
        lines = [] if self._done or self._as_json else [options.as_csv(HEADER)]
        for answer in answers:
            best = [(self._classes[number], probability) for number, probability in answer.best]
            if answer.bad is not None:
                self.num_bad += 1
                if not self._quiet:
                    click.echo(f"{printable(answer.name)} {answer.bad}", err=True)
            elif self._as_json:
                predictions = [{"class": name, "probability": round(probability, 6)} for name, probability in best]
                lines.append(json.dumps({"file": answer.name, "predictions": predictions}) + "\n")
            else:
                rows = [(answer.name, place, name, f"{number:.6f}") for place, (name, number) in enumerate(best, 1)]
                lines += map(options.as_csv, rows)
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
