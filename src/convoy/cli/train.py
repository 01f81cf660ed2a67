"""`convoy train`: train a network and leave a run directory with its report."""

import shlex
import sys
from pathlib import Path

import click
from rich.console import Console

from convoy.cli import options
from convoy.errors import ConvoyError
from convoy.experiments import write_report
from convoy.training import ConsoleReporter, Recipe, RunDirectory, Session, choose_device, load_recipe, train

KEYS = {
    "data": "data.path",
    "epochs": "epochs",
    "batch": "batch",
    "lr": "optimizer.lr",
    "seed": "seed",
    "microbatches": "microbatches",
    "batch_norm": "batch_norm",
    "reproducible": "reproducible",
    "precision": "precision",
    "channels_last": "channels_last",
    "compile": "compile",
    "workers": "data.workers",
    "bad_images": "data.bad_images",
    "weights": "model.weights",
}


@click.command(
    "train",
    epilog="""\b
Examples:
  convoy train lenet --data mnist-mini
  convoy train --recipe cifar-quick --data /data/cifar10 --out runs/cifar
  convoy train resnet50 --recipe imagenet-90 --data /data/imagenet --batch 1024
  convoy train timm:efficientnet_b0 --data photos/ --epochs 30 --weights b0.safetensors
  convoy train runs/cifar --resume
""",
)
@click.argument("model", required=False)
@click.option("--data", metavar="PATH", help="A folder or file of pictures, or mnist-mini.")
@click.option("--recipe", metavar="NAME|FILE", help="How to train: a built-in recipe (convoy recipes) or a YAML file.")
@click.option("--out", type=click.Path(path_type=Path), help="The run directory. [default: runs/MODEL-DATA]")
@click.option("--resume", is_flag=True, help="Go on with the run in --out (or in MODEL, if that is a run directory).")
@click.option("--epochs", metavar="N", help="How long: 90, 90ep or 5000ba (updates).")
@click.option("--batch", type=int, help="Global batch: samples of one weight update.")
@click.option("--lr", type=float, help="Peak learning rate, as it is (no scaling).")
@click.option("--seed", type=int, help="Seed of everything random.")
@click.option("--microbatches", metavar="V", type=int, help="Pieces of the global batch. [default: of 32 samples]")
@click.option("--batch-norm", metavar="MODE", help="Statistics over: microbatch, sync (global batch) or local.")
@click.option("--reproducible", is_flag=True, default=None, help="Bit-identical weights on any number of devices.")
@click.option("--precision", metavar="TYPE", help="fp32, bf16 or fp16.")
@click.option("--channels-last/--channels-first", "channels_last", default=None, help="Memory format of the network.")
@click.option("--compile/--no-compile", "compile", default=None, help="Compile the network with torch.compile.")
@click.option("--workers", type=int, help="Processes that load data. [default: chosen for the data]")
@click.option("--bad-images", metavar="WHAT", help="A picture that cannot be read: error or skip.")
@click.option("--weights", metavar="FILE", help="Begin with these weights: .safetensors or .pth.")
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="Any other key of the recipe; repeatable.")
@options.device
@options.verbose
def command(
    model: str | None,
    recipe: str | None,
    out: Path | None,
    resume: bool,
    settings: tuple[str, ...],
    device: str | None,
    **values: str | float | bool | None,
) -> int:
    """Train MODEL (convoy models lists them) and write a report.

    MODEL may be left out where the recipe names it.
    """
    overrides = [f"{KEYS[name]}={value}" for name, value in values.items() if value is not None]
    if out is None and model is not None and RunDirectory(Path(model)).is_run():
        if not resume:
            raise ConvoyError(f"{model} is a run: go on with it by convoy train {model} --resume")
        out, model = Path(model), None
    if resume and out is None:
        named = f"{model} is no run directory: " if model is not None else ""
        raise ConvoyError(f"{named}--resume needs the run to go on with: convoy train RUN --resume")
    console = Console(highlight=False)
    resolved, out = _resolve(model, recipe, [*overrides, *settings], out, resume, console)
    with ConsoleReporter(console) as reporter:
        outcome = train(
            resolved,
            out,
            resume=resume,
            device=choose_device(device),
            command=shlex.join(["convoy", *sys.argv[1:]]),
            reporter=reporter,
            on_start=lambda session: show_start(session, console),
        )
    report = write_report(out)
    if outcome.signal is not None:
        console.print(
            f"{outcome.signal}: stopped and saved after {outcome.steps:,} of {outcome.total_steps:,} updates; "
            f"go on with: convoy train {out} --resume",
            markup=False,
            soft_wrap=True,
        )
        return 1
    console.print(f"test accuracy {outcome.top1:.2%}", style="bold")
    console.print(f"report: {report}", markup=False, soft_wrap=True)
    return 0


def _resolve(
    model: str | None, recipe: str | None, overrides: list[str], out: Path | None, resume: bool, console: Console
) -> tuple[Recipe, Path]:
    """The recipe of this command line, and the folder of its run."""
    if model is not None:
        overrides = [f"model.name={model}", *overrides]
    if resume and out is not None and RunDirectory(out).is_run() and recipe is None:
        recipe = str(RunDirectory(out).config)
    elif resume and out is not None and model is None and recipe is None:
        raise ConvoyError(f"{out} holds no run to go on with: give the folder of a run, or leave --resume away")
    elif model is None and recipe is None:
        raise ConvoyError("nothing to train: give a MODEL (convoy models) or a --recipe (convoy recipes)")
    notes: list[str] = []
    resolved = load_recipe(recipe or "default", overrides, notes)
    for note in notes:
        if note not in resolved.notes():  # those are printed, and kept, with the session's
            console.print(note, markup=False, soft_wrap=True)
    return resolved, out or _free_folder(resolved)


def _free_folder(recipe: Recipe) -> Path:
    name = f"{recipe.model.name}-{Path(recipe.data.path).resolve().name}".replace(":", "-").replace("/", "-")
    candidates = (Path("runs") / (name if n == 1 else f"{name}-{n}") for n in range(1, 10_000))
    return next(path for path in candidates if not path.exists())


def show_start(session: Session, console: Console) -> None:
    """Print what will be trained on what, and every derived quantity with its formula and source."""
    data, recipe = session.data, session.recipe
    console.print(
        f"{recipe.model.name} on {data.name}: {len(data.train):,} training and {len(data.test):,} test images "
        f"of {data.channels}×{data.image_size}×{data.image_size}, {len(data.classes)} classes",
        markup=False,
        soft_wrap=True,
    )
    width = max(len(row.name) for row in session.derived)
    for row in session.derived:
        value = (
            row.value
            if isinstance(row.value, str)
            else f"{row.value:,}"
            if row.value == int(row.value)
            else f"{row.value:.6g}"
        )
        console.print(f"  {row.name:{width}}  {value} = {row.formula}  ({row.source})", markup=False, soft_wrap=True)
    for note in session.notes:
        console.print(note, markup=False, soft_wrap=True)
