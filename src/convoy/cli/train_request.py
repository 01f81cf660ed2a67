"""What a command line of `convoy train` asks for: the recipe, the folder of its run, whether it goes on with one."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from convoy.cli.again import run_of
from convoy.cli.line import command_of
from convoy.errors import ConvoyError
from convoy.training import Devices, Recipe, RunDirectory, load_recipe
from convoy.training.parallel_config import LostGroupError, ParallelConfig, fitted, num_devices


@dataclass
class Request:
    """What the command line says, and what follows from it.

    Attributes:
        notes: sentences on options that were put out of force.
        again: the ranks were started again, and go on with a run that they have told of already.
    """

    arguments: Sequence[str]
    model: str | None
    recipe: str | None
    overrides: list[str]
    out: Path | None
    resume: bool
    device: str | None

    def __post_init__(self) -> None:
        self.notes: list[str] = []
        self.again = False
        if self.out is None and self.model is not None and RunDirectory(Path(self.model)).is_run():
            if not self.resume:
                raise ConvoyError(f"{self.model} is a run: go on with it by convoy train {self.model} --resume")
            self.out, self.model = Path(self.model), None
        if self.resume and self.out is None:
            named = f"{self.model} is no run directory: " if self.model is not None else ""
            raise ConvoyError(f"{named}--resume needs the run to go on with: convoy train RUN --resume")

    @property
    def said(self) -> set[str]:
        """Keys of the recipe that the command line sets."""
        return {override.partition("=")[0].strip() for override in self.overrides}

    def resolve(self, devices: Devices, jobs: Sequence[str] = (), elastic: bool = False) -> tuple[Recipe, Path]:
        """The recipe of this command line, and the folder of its run; the same on every rank.

        A run that the same ranks began, before they were started again, is gone on with.

        Args:
            devices: the ranks.
            jobs: names of what started them.
            elastic: their number may be another one than the plan is for, which is fitted to it.
        """
        if jobs:
            self.out, self.again = devices.first(
                lambda: run_of(self.out, _folders(self.recipe_of()), jobs, command_of(self.arguments))
            )
        self.resume = self.resume or self.again
        resolved = self.recipe_of()
        number = devices.num if devices.num > 1 else num_devices(resolved.parallel)
        said = self.said
        if "parallel.plan" in said and "parallel.devices" not in said and devices.num == 1:
            number = num_devices(resolved.parallel.model_copy(update={"devices": None}))
        elastic = elastic or self.again
        number = devices.num if elastic else number
        parallel = _formed(
            resolved.parallel,
            number,
            (not elastic and "parallel.plan" in said, not elastic and "parallel.shares" in said),
            elastic,
            self.notes,
            quiet=devices.rank > 0,
        )
        resolved = resolved.model_copy(update={"parallel": parallel})
        return resolved, self.out or devices.first(lambda: next(p for p in _folders(resolved) if not p.exists()))

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


def _folders(recipe: Recipe) -> Iterator[Path]:
    name = f"{recipe.model.name}-{Path(recipe.data.path).resolve().name}".replace(":", "-").replace("/", "-")
    return (Path("runs") / (name if n == 1 else f"{name}-{n}") for n in range(1, 10_000))
