"""What a command line of `convoy train` asks for: the recipe, the folder of its run, whether it goes on with one."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from convoy.cli.options import command_of
from convoy.errors import ConvoyError
from convoy.training.config import FORMS, Duration
from convoy.training.parallel_config import (
    LostGroupError,
    ParallelConfig,
    check_shares,
    fitted,
    num_devices,
    plan_of,
)
from convoy.training.recipe import Recipe, check_names, load_recipe
from convoy.training.run_directory import RunDirectory

if TYPE_CHECKING:
    from convoy.comm.ranks import Ranks


@dataclass
class TrainRequest:
    """What the command line says, and what follows from it.

    Attributes:
        notes: sentences on options that were put out of force.
        begins_with: the run that is made longer, if any.
        again: the ranks were started again, and go on with a run that they have told of already.
    """

    arguments: Sequence[str]
    model: str | None
    recipe: str | None
    overrides: list[str]
    out: Path | None
    resume: bool
    device: str | None
    extend: str | None = None

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
            named = f"{self.model} is no run directory: " if self.model is not None else ""
            raise ConvoyError(f"{named}--resume needs the run to go on with: convoy train RUN --resume")

    def check(self) -> None:
        """Refuse what needs neither torch nor data to be found wrong.

        Raises:
            ConvoyError: there is no such recipe, key, network, file or plan, or the folder is taken.
        """
        recipe = self.recipe_of()
        check_names(recipe)
        number = self._number(recipe)
        section = fitted(
            recipe.parallel, number, "parallel.plan" in self.explicit_keys, "parallel.shares" in self.explicit_keys
        )
        plan, _ = plan_of(section, number)
        check_shares(section.shares if isinstance(section.shares, tuple) else None, number, plan)
        if self.out is not None and not (self.resume and RunDirectory(self.out).is_run()):
            RunDirectory(self.out).check_free()
            RunDirectory(self.out).check_writable()

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
        path = Path(self.model or "")
        if self.model is None or not RunDirectory(path).is_run():
            named = f"{self.model} is no run directory: " if self.model is not None else ""
            raise ConvoyError(f"{named}--extend needs the run to make longer: convoy train RUN --extend 8ep")
        if self.recipe is not None:
            raise ConvoyError(f"--recipe contradicts --extend: the recipe is that of {path}; change it by --set")
        if "epochs" in self.explicit_keys:
            raise ConvoyError(
                "--epochs contradicts --extend, which says for how long to train on: leave one of them out"
            )
        if self.resume and self.out is None:
            raise ConvoyError("--extend begins a new run: go on with that one by convoy train NEW --resume")
        self.begins_with, self.model = path, None
        self.recipe = str(RunDirectory(path).config)
        self.overrides += [f"epochs={new_length(RunDirectory(path), more)}", f"extends={path}"]

    def _candidates(self, recipe: Recipe) -> Iterator[Path]:
        """Folders for the run, where none is named."""
        if self.begins_with is None:
            name = f"{recipe.model.name}-{Path(recipe.data.path).resolve().name}".replace(":", "-").replace("/", "-")
            first = Path("runs") / name
        else:
            old = self.begins_with if self.begins_with.name else self.begins_with.resolve()
            first = old.with_name(f"{old.name}-extended")
        return (first if n == 1 else first.with_name(f"{first.name}-{n}") for n in range(1, 10_000))

    @property
    def explicit_keys(self) -> set[str]:
        """Keys of the recipe that the command line sets."""
        return {override.partition("=")[0].strip() for override in self.overrides}

    def resolve(self, ranks: "Ranks", jobs: Sequence[str] = (), elastic: bool = False) -> tuple[Recipe, Path]:
        """The recipe of this command line, and the folder of its run; the same on every rank.

        A run that the same ranks began, before they were started again, is gone on with.

        Args:
            ranks: the ranks.
            jobs: names of what started them.
            elastic: their number may be another one than the plan is for, which is fitted to it.
        """
        if jobs:
            self.out, self.again = ranks.first(
                lambda: run_of(self.out, self._candidates(self.recipe_of()), jobs, command_of(self.arguments))
            )
        self.resume = self.resume or self.again
        resolved = self.recipe_of()
        number = ranks.num if ranks.num > 1 else self._number(resolved)
        explicit = self.explicit_keys
        elastic = elastic or self.again
        number = ranks.num if elastic else number
        parallel = _formed(
            resolved.parallel,
            number,
            (not elastic and "parallel.plan" in explicit, not elastic and "parallel.shares" in explicit),
            elastic,
            self.notes,
            quiet=ranks.rank > 0,
        )
        resolved = resolved.model_copy(update={"parallel": parallel})
        return resolved, self.out or ranks.first(lambda: next(p for p in self._candidates(resolved) if not p.exists()))

    def recipe_of(self) -> Recipe:
        """The recipe, as it is said here and, where a run is gone on with, there.

        Raises:
            ConvoyError: there is no such recipe or run, or something in it is wrong.
        """
        recipe, out = self.recipe, self.out
        overrides = [f"model.name={self.model}", *self.overrides] if self.model is not None else list(self.overrides)
        if self.resume and out is not None and RunDirectory(out).is_run() and recipe is None:
            recipe = str(RunDirectory(out).config)
        elif self.resume and out is not None and self.model is None and recipe is None:
            raise ConvoyError(f"{out} holds no run to go on with: give the folder of a run, or leave --resume away")
        elif self.model is None and recipe is None:
            raise ConvoyError("nothing to train: give a MODEL (convoy models) or a --recipe (convoy recipes)")
        self.notes = []
        return load_recipe(recipe or "default", overrides, self.notes)


def _formed(
    section: ParallelConfig, number: int, keep: tuple[bool, bool], elastic: bool, notes: list[str], quiet: bool
) -> ParallelConfig:
    """The section for so many devices. Where they are too few for the plan's groups, and others may come, it waits for
    those: torch's launcher then starts all ranks anew."""
    try:
        return fitted(section, number, *keep, notes)
    except LostGroupError as error:
        if not elastic:
            raise
        if not quiet:
            click.echo(f"{error}; waiting for others")
        while True:
            time.sleep(60)


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


def begun(run: RunDirectory, jobs: Iterable[str], command: str) -> bool:
    """Whether a run was begun by these ranks, before they were started again.

    Args:
        run: perhaps one of others.
        jobs: names of what started the ranks (`convoy.launch.place.job`).
        command: the command line.
    """
    by = run.begun_by()
    return bool(set(jobs) & set(by.get("jobs") or ())) and by.get("command") == command


def run_of(out: Path | None, candidates: Iterable[Path], jobs: Sequence[str], command: str) -> tuple[Path, bool]:
    """The folder of the run, and whether it was begun by these ranks.

    Args:
        out: the folder that the user names, if any.
        candidates: folders to choose the first free one from, without end.
    """
    for path in candidates if out is None else [out]:
        if jobs and begun(RunDirectory(path), jobs, command):
            return path, True
        if out is not None or not path.exists():
            return path, False
    raise AssertionError("candidates without end")
