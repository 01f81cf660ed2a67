"""`convoy bench`: how training scales over the devices at hand, as a table and a report."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from convoy.bench.ask import Ask
from convoy.cli import keys, options
from convoy.cli.options import command_of
from convoy.errors import ConvoyError
from convoy.terminal import Console, waiting_for

_SOME, _ANY = click.IntRange(min=1), click.IntRange(min=0)


@options.verb(
    "bench",
    """
  convoy bench resnet18 --devices 1,2 --batch 64 --image-size 64
  convoy bench alexnet --devices 1,2,4 --plans "sample;filter;sample=2,filter=2;auto" --batch 256
  convoy bench mine.nets:make_net --devices 1,2 --batch-per-device 32 --peers ddp,fabric,accelerate
  convoy bench lenet --data mnist-mini --devices 1,2 --batch 256 --rounds 9 --out studies/lenet
  convoy bench lenet --data mnist-mini --recipe lenet-mnist --devices 1,2 --train-epochs 3
  convoy bench lenet --data mnist-mini --batches 32,64,128,256 --target 0.97 --tune --set epochs=20
""",
)
@click.argument("model")
@click.option("--devices", metavar="N,N,…", help="Numbers of devices. [default: 1 and all that there are]")
@click.option(
    "--plans", metavar="P;P;…", default="sample;auto", show_default=True, help="Without size: on all; auto=4: on 4."
)
@click.option("--batch", type=_SOME, metavar="N", help="Global batch, the same on any devices. [--recipe's, or 256]")
@click.option("--batch-per-device", type=_SOME, metavar="N", help="Weak scaling: the batch grows with the devices.")
@click.option("--peers", metavar="P,P,…", default="", help="Other tools on the same work: ddp, fabric, accelerate.")
@click.option("--shares", metavar="S;S;…", default="", help="Rows for unequal devices: even, auto or 3,3,2. [even]")
@click.option("--data", metavar="PATH", help="Train on these pictures. [default: made-up ones in memory]")
@click.option("--image-size", metavar="N", type=_SOME, help="Height and width of made-up pictures. [the network's]")
@click.option("--classes", metavar="N", type=_SOME, help="Classes of made-up pictures. [default: the network's]")
@click.option("--recipe", metavar="NAME|FILE", help="How to train. [default: default]")
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="Any key of the recipe; repeatable.")
@click.option(
    "--train-epochs", type=float, metavar="E", help="Train each as well, and compare the curves; with --data."
)
@click.option("--rounds", metavar="N", type=_ANY, default=5, show_default=True, help="Turns of every configuration.")
@click.option("--updates", metavar="N", type=_SOME, help="Timed updates of a turn. [default: two seconds on one]")
@click.option("--warm-up", metavar="N", type=_ANY, default=2, show_default=True, help="Updates before them in a turn.")
@click.option("--epochs", type=float, metavar="E", help="Also say how many days so many epochs would take.")
@click.option("--dataset-size", metavar="N", type=_SOME, help="Images of an epoch. [default: ImageNet's, or --data's]")
@click.option("--cores-per-device", type=_SOME, metavar="N", help="CPU cores of each. [all / most devices]")
@click.option("--emulate", metavar="FILE", help="Devices of an emulated cluster (Linux, root): see docs/emulation.md.")
@click.option("--predict/--no-predict", default=True, help="Let the planner predict every plan before.")
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds until a turn is given up.")
@click.option("--batches", metavar="N,N,…", help="Study the batch: updates to --target at each of these.")
@click.option("--target", type=float, metavar="TOP1", help="Test accuracy that --batches trains to, e.g. 0.97.")
@click.option("--tune", is_flag=True, help="Search the best learning rate at each of --batches.")
@click.option("--optimizers", metavar="O,O,…", help="For --batches: sgd, lars, lamb, adamw. [default: the recipe's]")
@click.option("--seeds", type=_SOME, metavar="N", help="Trainings with the best rate at each batch. [default: 1]")
@click.option("--out", type=options.OutputPath(), help="Folder of the study. [default: runs/bench-MODEL]")
@keys.recompute
@options.device
@options.as_json
@click.pass_obj
def command(arguments: Sequence[str], /, as_json: bool, **values: Any) -> int:
    """Measure how training MODEL scales over devices, by plan, and write a table and a report.

    All configurations do the same work in turns, each in fresh processes. What is measured is kept after every turn:
    stopped, the same command goes on. No data is needed.

    --batches asks another question: how many updates, epochs and seconds a target takes by batch. Its trainings run one
    a device, as many at a time as there are; with --tune the learning rate is searched at each batch.
    """
    values["settings"] = (*values["settings"], *values.pop("overrides", ()))
    del values["recompute"]  # which is among them
    source, default = click.get_current_context().get_parameter_source, click.core.ParameterSource.DEFAULT
    given = {name for name in values if source(name) is not default}
    ask = Ask(command=command_of(arguments), given=given, **values)
    ask.check()
    with waiting_for("loading PyTorch"):  # and matplotlib, for which no mistake is to wait
        from convoy.bench.batch_course import study_batches
        from convoy.bench.batch_page import write_batches
        from convoy.bench.course import measure
        from convoy.bench.page import write_files

    work, write = (measure, write_files) if ask.batches is None else (study_batches, write_batches)
    return study(partial(work, ask), write, ask.folder, as_json)


def study(work: Callable[..., Any], write: Callable[..., Any], folder: Path, as_json: bool, most: Any = None) -> int:
    """Do the work of a study, write what came of it, and say it, with so many lines of a table at most."""
    from convoy.progress import ConsoleReporter

    def files() -> list[int]:
        return sorted(path.stat().st_mtime_ns for path in folder.glob("*.json"))

    console, before = Console(stderr=True, highlight=False), files()
    try:
        with options.sigterm_as_interrupt(), ConsoleReporter(console) as reporter:
            work(reporter.prepare, lambda text: console.print(text, markup=False, soft_wrap=True))
    except KeyboardInterrupt:
        click.echo(f"convoy: stopped; {folder} keeps what was measured, the same command goes on", err=True)
        return 1
    except ConvoyError:
        if files() != before:  # something was measured, or trained
            click.echo(f"report: {write(folder).report}", err=True)
        raise
    written = write(folder)
    if as_json:
        tables = {name: table.records for name, table in written.tables.items()}
        click.echo(json.dumps({**tables, "remarks": written.remarks}, indent=2, allow_nan=False))
        return 0
    lines = (line for table in written.tables.values() for line in table.lines()[:most])
    click.echo("\n".join([*lines, *written.remarks, f"report: {written.report}"]))
    return 0
