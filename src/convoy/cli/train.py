"""`convoy train`: train a network and leave a run directory with its report."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convoy.cli import options
from convoy.cli.options import command_of
from convoy.errors import ConvoyError
from convoy.late import waiting_for
from convoy.launch import find_place
from convoy.training.config import FORMS, Duration
from convoy.training.parallel_config import LostGroupError, check_shares, fitted, num_devices, plan_of
from convoy.training.recipe import Recipe, check_names, load_recipe
from convoy.training.run_directory import RunDirectory

if TYPE_CHECKING:
    from convoy.comm.ranks import Ranks

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
    "devices": "parallel.devices",
    "plan": "parallel.plan",
    "shares": "parallel.shares",
    "cores_per_device": "parallel.cores_per_device",
    "gradient_compression": "parallel.gradient_compression",
    "local_sgd": "parallel.local_sgd",
    "lost_group": "parallel.lost_group",
}


@dataclass
class TrainRequest:
    """The command line: the keys of the recipe that it sets are in `overrides`, other options under their names.

    Attributes:
        notes: sentences on options that were put out of force.
        begins_with: the run that is made longer, if any.
        again: the ranks were started again, and go on with a run that they have told of already.
    """

    arguments: Sequence[str]
    overrides: list[str]
    model: str | None = None
    recipe: str | None = None
    out: Path | None = None
    resume: bool = False
    extend: str | None = None
    device: str | None = None
    devices: int | None = None
    max_restarts: int | None = None
    timeout: str | None = None
    interface: str | None = None

    def __post_init__(self) -> None:
        self.notes: list[str] = []
        self.again = False
        self.begins_with: Path | None = None
        if self.extend is not None:
            self._extend(self.extend)
        elif self.out is None and self.model is not None and RunDirectory(Path(self.model)).is_run():
            if not self.resume:
                raise ConvoyError(
                    f"{self.model} is a run: go on with it by convoy train {self.model} --resume, or make it longer by "
                    f"convoy train {self.model} --extend 8ep"
                )
            self.out, self.model = Path(self.model), None
        if self.resume and self.out is None:
            raise ConvoyError(f"{self._no_run()}--resume needs the run to go on with: convoy train RUN --resume")

    @classmethod
    def of(cls, arguments: Sequence[str], values: Mapping[str, Any]) -> "TrainRequest":
        """The request of a command line whose options have these values, by their names."""
        overrides = [f"{key}={values[name]}" for name, key in KEYS.items() if values[name] is not None]
        own = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        return cls(arguments, [*overrides, *values["settings"]], **own)

    def check(self) -> None:
        """Refuse what needs neither torch nor data to be found wrong.

        Raises:
            ConvoyError: there is no such recipe, key, network, file or plan, or the folder is taken.
        """
        recipe = self.recipe_of()
        check_names(recipe)
        number, explicit = self._number(recipe), self.explicit_keys
        section = fitted(recipe.parallel, number, "parallel.plan" in explicit, "parallel.shares" in explicit)
        plan, _ = plan_of(section, number)
        check_shares(section.shares if isinstance(section.shares, tuple) else None, number, plan)
        if self.out is not None and not (self.resume and RunDirectory(self.out).is_run()):
            RunDirectory(self.out).check_free()
            RunDirectory(self.out).check_writable()

    def _no_run(self) -> str:
        return f"{self.model} is no run directory: " if self.model is not None else ""

    def _number(self, recipe: Recipe) -> int:
        """How many devices are asked for: by a plan of the command line sooner than by the recipe."""
        section, explicit = recipe.parallel, self.explicit_keys
        if "parallel.plan" in explicit and "parallel.devices" not in explicit:
            section = section.model_copy(update={"devices": None})
        return num_devices(section)

    def _extend(self, more: str) -> None:
        """Take over the recipe of the run that is to be made longer.

        Raises:
            ConvoyError: there is none, or other options say otherwise.
        """
        old = RunDirectory(Path(self.model or ""))
        if self.model is None or not old.is_run():
            raise ConvoyError(f"{self._no_run()}--extend needs the run to make longer: convoy train RUN --extend 8ep")
        if self.recipe is not None:
            raise ConvoyError(f"--recipe contradicts --extend: the recipe is that of {old.path}; change it by --set")
        if "epochs" in self.explicit_keys:
            raise ConvoyError(
                "--epochs contradicts --extend, which says for how long to train on: leave one of them out"
            )
        if self.resume and self.out is None:
            raise ConvoyError("--extend begins a new run: go on with that one by convoy train NEW --resume")
        self.begins_with, self.model, self.recipe = old.path, None, str(old.config)
        self.overrides += [f"epochs={new_length(old, more)}", f"extends={old.path}"]

    @property
    def explicit_keys(self) -> set[str]:
        """Keys of the recipe that the command line sets."""
        return {override.partition("=")[0].strip() for override in self.overrides}

    def resolve(self, ranks: "Ranks", jobs: Sequence[str] = (), elastic: bool = False) -> tuple[Recipe, Path]:
        """The recipe of this command line, and the folder of its run; the same on every rank.

        A run that the same ranks began, before they were started again, is gone on with.

        Args:
            ranks: the ranks.
            jobs: names of what started them (`convoy.launch.place.job`).
            elastic: their number may be another one than the plan is for, which is fitted to it.
        """
        if jobs:
            self.out, self.again = ranks.first(lambda: self._folder(self.recipe_of(), jobs))
        self.resume = self.resume or self.again
        recipe, explicit = self.recipe_of(), self.explicit_keys
        elastic = elastic or self.again
        number = ranks.num if elastic or ranks.num > 1 else self._number(recipe)
        keep_plan, keep_shares = (not elastic and f"parallel.{name}" in explicit for name in ("plan", "shares"))
        try:
            parallel = fitted(recipe.parallel, number, keep_plan, keep_shares, self.notes)
        except LostGroupError as error:
            if not elastic:
                raise
            if ranks.rank == 0:
                click.echo(f"{error}; waiting for others")
            while True:  # torch's launcher starts all ranks anew when others come
                time.sleep(60)
        recipe = recipe.model_copy(update={"parallel": parallel})
        return recipe, self.out or ranks.first(lambda: self._folder(recipe)[0])

    def _folder(self, recipe: Recipe, jobs: Sequence[str] = ()) -> tuple[Path, bool]:
        """The folder of the run, the first free one where none is named, and whether these jobs began a run there."""
        if self.begins_with is None:
            name = f"{recipe.model.name}-{Path(recipe.data.path).resolve().name}".replace(":", "-").replace("/", "-")
            first = Path("runs") / name
        else:
            old = self.begins_with if self.begins_with.name else self.begins_with.resolve()
            first = old.with_name(f"{old.name}-extended")
        others = (first.with_name(f"{first.name}-{n}") for n in count(2))
        for path in chain([first], others) if self.out is None else [self.out]:
            by = RunDirectory(path).begun_by()
            if set(jobs) & set(by.get("jobs") or ()) and by.get("command") == command_of(self.arguments):
                return path, True
            if self.out is not None or not path.exists():
                return path, False
        raise AssertionError("candidates without end")

    def recipe_of(self) -> Recipe:
        """The recipe, with the keys that the command line sets; where a run is gone on with, that of the run.

        Raises:
            ConvoyError: there is no such recipe or run, or something in it is wrong.
        """
        recipe, out = self.recipe, self.out
        overrides = [f"model.name={self.model}", *self.overrides] if self.model is not None else self.overrides
        if self.resume and out is not None and RunDirectory(out).is_run() and recipe is None:
            recipe = str(RunDirectory(out).config)
        elif self.resume and out is not None and self.model is None and recipe is None:
            raise ConvoyError(f"{out} holds no run to go on with: give the folder of a run, or leave --resume away")
        elif self.model is None and recipe is None:
            raise ConvoyError("nothing to train: give a MODEL (convoy models) or a --recipe (convoy recipes)")
        self.notes = []
        return load_recipe(recipe or "default", overrides, self.notes)


def new_length(old: RunDirectory, more: str) -> Duration:
    """The length of a run that goes on for some epochs (`8ep`, `8`) or updates (`500ba`) after the end of another.

    Raises:
        ConvoyError: that is no length, or the run does not say how many updates its epochs have.
    """
    try:
        by = Duration.parse(f"{more}ep" if more.strip().replace(".", "", 1).isdecimal() else more)
    except ValueError as error:
        raise ConvoyError(f"--extend: {error}") from error
    if by.unit == "%" or not by:
        raise ConvoyError(f"--extend {more} is no length to train on for: write {FORMS}")
    recipe = load_recipe(str(old.config))
    if by.unit == recipe.epochs.unit:
        return Duration(round(recipe.epochs.value + by.value, 9), by.unit)
    num_train = old.summary().get("num_train")
    if not isinstance(num_train, int):
        raise ConvoyError(f"{old.summary_file} does not say how many samples there are: give --extend in epochs")
    per_epoch = num_train // recipe.batch
    return Duration(recipe.epochs.updates(per_epoch) + by.updates(per_epoch), "ba")


@click.command(
    "train",
    epilog="""\b
Examples:
  convoy train lenet --data mnist-mini
  convoy train --recipe cifar-quick --data /data/cifar10 --out runs/cifar
  convoy train resnet50 --recipe imagenet-90 --data /data/imagenet --devices 8 --batch 1024
  convoy train timm:efficientnet_b0 --data photos/ --epochs 30 --weights b0.safetensors
  convoy train runs/cifar --resume
  convoy train runs/cifar --extend 8ep                 # a new run, runs/cifar-extended
  convoy train resnet18 --data flowers/ --weights runs/photos
""",
)
@click.argument("model", required=False)
@click.option(
    "--data",
    metavar="PATH",
    help="A folder or file of pictures, or mnist-mini. [default: the recipe's, else mnist-mini]",
)
@click.option("--recipe", metavar="NAME|FILE", help="How to train: a built-in recipe (convoy recipes) or a YAML file.")
@click.option("--out", type=options.OutputPath(), help="A new run directory. [default: runs/MODEL-DATA, or …-2]")
@click.option("--resume", is_flag=True, help="Go on with the run in --out (or in MODEL, if that is a run directory).")
@click.option("--extend", metavar="N", help="Train the run in MODEL for so much longer, e.g. 8ep, in a new run.")
@click.option("--epochs", metavar="N", help="How long: 90, 90ep or 5000ba (updates). [default: the recipe's, else 90]")
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
@click.option("--weights", metavar="FILE|RUN", help="Begin with these weights: .safetensors, .pth, or a run.")
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="Any other key of the recipe; repeatable.")
@options.device
@click.option("--devices", metavar="N", type=int, help="Train on so many devices. [default: those of --plan, or 1]")
@click.option("--plan", metavar="TEXT|FILE", help="How they divide the work, e.g. sample=4. [default: sample=N]")
@click.option(
    "--shares",
    metavar="A,B,…",
    callback=options.shares,
    help="Parts of the batch for unequal devices, e.g. 3,3,2, or auto to measure. [default: even]",
)
@click.option("--cores-per-device", metavar="N", type=int, help="CPU cores of each. [default: its share of all]")
@click.option("--gradient-compression", metavar="TYPE", help="Approximate: send gradients as bf16. [default: exact]")
@click.option("--local-sgd", metavar="H", type=int, help="Approximate: average the weights every H updates.")
@click.option(
    "--max-restarts", metavar="N", type=click.IntRange(min=0), help="Start failed ranks again so often. [default: 0]"
)
@click.option("--timeout", metavar="TIME", help="End when no rank moves for so long, e.g. 30s, 10min. [default: 5min]")
@click.option("--interface", metavar="NAME", help="Talk to other ranks through it. [default: loopback, within a host]")
@click.option("--lost-group", metavar="WHAT", help="Where ranks left cannot form a model group: form or wait.")
@click.option(
    "-v", "--verbose", is_flag=True, expose_value=False, help="Say how all numbers follow; the traceback of an error."
)
@click.pass_obj
def command(arguments: Sequence[str], /, **values: Any) -> int:
    """Train MODEL (convoy models lists them) and write a report.

    MODEL may be left out where the recipe names it.

    --extend makes a finished run longer in a new one, which begins with the old one's weights, optimizer, averages and
    place in the data; the old one stays as it is. The learning rate is that of a run of the whole length: where it is
    constant or falls at certain epochs it goes on, and a cosine, which has ended, rises to where it would stand.
    Schedule, loss and augmentation may change. To begin anew with the weights alone, use --weights.
    """
    request = TrainRequest.of(arguments, values)
    if find_place() is None:  # ranks find mistakes together
        request.check()
    with waiting_for("loading PyTorch"):
        from convoy.cli.train_run import run  # with torch, for which no mistake is to wait
    return run(request)
