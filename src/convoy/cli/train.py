"""`convoy train`: train a network and leave a run directory with its report."""

import difflib
import time
from collections.abc import Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from convoy.cli import keys, options
from convoy.errors import ConvoyError
from convoy.late import waiting_for
from convoy.launch import find_place
from convoy.training.config import FORMS, Duration
from convoy.training.parallel_config import LostGroupError, check_shares, fitted, num_devices, plan_of
from convoy.training.recipe import Recipe, check_names, load_recipe
from convoy.training.run_directory import RunDirectory

if TYPE_CHECKING:
    from convoy.comm.ranks import Ranks


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
@keys.sets(
    "data.path",
    "--data",
    metavar="PATH",
    text="A folder or file of pictures, or mnist-mini.",
    default="the recipe's, else mnist-mini",
)
@click.option("--recipe", metavar="NAME|FILE", help="How to train: a built-in recipe (convoy recipes) or a YAML file.")
@click.option("--out", type=options.OutputPath(), help="A new run directory. [default: runs/MODEL-DATA, or …-2]")
@click.option("--resume", is_flag=True, help="Go on with the run in --out (or in MODEL, if that is a run directory).")
@click.option("--accept-code-change", is_flag=True, help="Go on with a run although the network's code has changed.")
@options.trust_code
@click.option("--extend", metavar="N", help="Train the run in MODEL for so much longer, e.g. 8ep, in a new run.")
@keys.sets("epochs", metavar="N", default="the recipe's, else 90")
@keys.sets("batch")
@keys.sets("data.image_size", metavar="N", text="Height and width of the images.", default="the network's")
@keys.sets("optimizer.lr", text="Peak learning rate, as it is (no scaling).")
@keys.sets("seed")
@keys.microbatches
@keys.batch_norm
@keys.sets("reproducible", is_flag=True)
@keys.precision
@keys.channels_last
@keys.sets("compile", "--compile/--no-compile")
@keys.sets("cuda_graphs", metavar="WHAT", default="auto")
@keys.recompute
@keys.sets("data.workers", text="Processes that load data.", default="chosen for the data")
@keys.sets("data.bad_images", metavar="WHAT", text="A picture that cannot be read: error or skip.")
@keys.sets("model.weights", metavar="FILE|RUN")
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="Any other key of the recipe; repeatable.")
@options.device
@keys.sets("parallel.devices", metavar="N")
@keys.sets("parallel.plan", metavar="TEXT|FILE")
@keys.sets("parallel.shares", metavar="A,B,…", as_yaml=keys.shares_as_yaml)
@keys.cores_per_device
@keys.sets("parallel.gradient_compression", metavar="TYPE")
@keys.sets("parallel.local_sgd", metavar="H")
@click.option(
    "--max-restarts", metavar="N", type=click.IntRange(min=0), help="Start failed ranks again so often. [default: 0]"
)
@click.option("--timeout", metavar="TIME", help="End when no rank moves for so long, e.g. 30s, 10min. [default: 5min]")
@click.option("--interface", metavar="NAME", help="Talk to other ranks through it. [default: loopback, within a host]")
@keys.schedule
@keys.sets("parallel.memory_limit", metavar="SIZE")
@keys.sets("parallel.lost_group", metavar="WHAT")
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
    request = TrainRequest(arguments, values)
    if find_place() is None:  # ranks find mistakes together
        request.check()
    with waiting_for("loading PyTorch"):
        from convoy.cli.train_run import run  # with torch, for which no mistake is to wait
    return run(request)


class TrainRequest(SimpleNamespace):
    """A command line of `convoy train`: keys of the recipe are in `overrides`, other options under their names."""

    overrides: list[str]
    resume: bool
    model: str | None
    recipe: str | None
    out: Path | None

    def __init__(self, arguments: Sequence[str], values: Mapping[str, Any]) -> None:
        overrides = [*values.get("overrides", ()), *values["settings"]]
        super().__init__(**{**values, "arguments": arguments, "overrides": overrides})
        self.notes: list[str] = []  # on options that were put out of force
        self._file = self.recipe
        self.again = False  # the ranks were started again, and go on with a run that they have told of already
        self.begins_with: Path | None = None  # the run that is made longer, if any
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
            raise self._no_run("--resume")

    def check(self) -> None:
        """Refuse what needs neither torch nor data to be found wrong."""
        recipe, _ = self.resolve()
        check_names(recipe)
        section, number = recipe.parallel, num_devices(recipe.parallel)
        if plan_of(section, number)[0] is None:
            check_shares(section.shares, number)
        if self.out is not None and not (self.resume and RunDirectory(self.out).is_run()):
            RunDirectory(self.out).check_free()

    def _no_run(self, option: str) -> ConvoyError:
        """What to say where an option needs a run, and MODEL is none."""
        if self.model is None:
            return ConvoyError(f"{option} needs a run: convoy train RUN {option}")
        folder = Path(self.model)
        entries = folder.parent.iterdir() if len(folder.parts) > 1 and folder.parent.is_dir() else ()
        near = difflib.get_close_matches(
            folder.name, [entry.name for entry in entries if RunDirectory(entry).is_run()], 1
        )
        if near:
            return ConvoyError(f"{folder} holds no run: did you mean {folder.with_name(near[0])}?")
        # a run that was stopped before its first update left nothing
        return ConvoyError(f"{folder} holds no run, which {option} needs: begin one by its first command, without it")

    def _extend(self, more: str) -> None:
        """Take over the recipe of the run that is to be made longer."""
        old = RunDirectory(Path(self.model or ""))
        if self.model is None or not old.is_run():
            raise self._no_run(f"--extend {more}")
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
        return {override.partition("=")[0].strip() for override in self.overrides}

    def resolve(
        self, ranks: "Ranks | None" = None, jobs: Sequence[str] = (), elastic: bool = False
    ) -> tuple[Recipe, Path]:
        """The recipe of this command line, and the folder of its run; the same on every rank. None are the ranks of a
        process that is alone, or may start others.

        A run that the same ranks began, before they were started again, is gone on with: `jobs` are the names of what
        started them (`convoy.launch.rank.job`). The number of `elastic` ranks may be another one than the plan is for,
        which is fitted to it.
        """
        first, num, rank = (lambda call: call(), 1, 0) if ranks is None else (ranks.first, ranks.num, ranks.rank)
        if jobs:
            self.out, self.again = first(lambda: self._folder(self.recipe_of(), jobs))
        self.resume = self.resume or self.again
        recipe, explicit = self.recipe_of(), self.explicit_keys
        if not self.trust_code and self.model is None:
            keys.check_own(recipe, self._file, explicit)
        elastic = elastic or self.again
        section = recipe.parallel
        if "parallel.plan" in explicit and "parallel.devices" not in explicit:  # it says more than the recipe
            section = section.model_copy(update={"devices": None})
        number = num if elastic or num > 1 else num_devices(section)
        keep = {key.removeprefix("parallel.") for key in explicit} if not elastic else ()
        try:
            parallel = fitted(recipe.parallel, number, keep, self.notes)
        except LostGroupError as error:
            if not elastic:
                raise
            if rank == 0:
                click.echo(f"{error}; waiting for others")
            while True:  # torch's launcher starts all ranks anew when others come
                time.sleep(60)
        recipe = recipe.model_copy(update={"parallel": parallel})
        return recipe, self.out or first(lambda: self._folder(recipe)[0])

    def _folder(self, recipe: Recipe, jobs: Sequence[str] = ()) -> tuple[Path, bool]:
        """The folder of the run, the first free one where none is named, and whether these jobs began a run there."""
        if self.begins_with is None:
            name = f"{recipe.model.name}-{Path(recipe.data.path).resolve().name}".replace(":", "-").replace("/", "-")
            first = Path("runs") / name
        else:
            old = self.begins_with if self.begins_with.name else self.begins_with.resolve()
            first = old.with_name(f"{old.name}-extended")
        numbered = (first.with_name(f"{first.name}-{n}") for n in count(2))
        for path in chain([first], numbered) if self.out is None else [self.out]:
            by = RunDirectory(path).begun_by()
            if set(jobs) & set(by.get("jobs") or ()) and by.get("command") == options.command_of(self.arguments):
                return path, True
            if self.out is not None or not path.exists():
                return path, False
        raise AssertionError("candidates without end")

    def recipe_of(self) -> Recipe:
        """The recipe, with the keys that the command line sets; where a run is gone on with, that of the run."""
        recipe, out = self.recipe, self.out
        overrides = [f"model.name={self.model}", *self.overrides] if self.model is not None else self.overrides
        if self.resume and out is not None and RunDirectory(out).is_run() and recipe is None:
            RunDirectory(out).check_run()
            recipe = str(RunDirectory(out).config)
        elif self.resume and out is not None and self.model is None and recipe is None:
            raise ConvoyError(f"{out} holds no run to go on with: give the folder of a run, or leave --resume away")
        elif self.model is None and recipe is None:
            raise ConvoyError("nothing to train: give a MODEL (convoy models) or a --recipe (convoy recipes)")
        self.notes, self._file = [], recipe
        return keys.loaded(recipe, overrides, self.arguments, self.notes)


def new_length(old: RunDirectory, more: str) -> Duration:
    """The length of a run that goes on for some epochs (`8ep`, `8`) or updates (`500ba`) after the end of another."""
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
