"""The requests of `convoy train` and `convoy plan`: their options, and what can be refused without torch."""

import difflib
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from convoy.cli import keys, options
from convoy.errors import ConvoyError
from convoy.hardware.catalog import Machine, link_named, machine, read_devices
from convoy.planner.cost.link import links_named
from convoy.plans.fit import parse_fix
from convoy.plans.plan import Plan
from convoy.recipe.parallel_config import LostGroupError, check_shares, fitted, num_devices, plan_of
from convoy.recipe.recipe import Recipe, check_names, load_recipe
from convoy.recipe.schema import FORMS, Duration
from convoy.run.directory import RunDirectory
from convoy.units import plural

if TYPE_CHECKING:
    from convoy.comm.ranks import Ranks


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
        if section.averaging.staleness and number == 1 and not self.resume:
            raise ConvoyError(
                "parallel.averaging.staleness lets devices go on while others are late, and there is one device: give "
                "several (--devices 4), or leave it out"
            )
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
        return ConvoyError(f"{folder} holds no run, which {option} needs: name a run's folder, or begin one without it")

    def _extend(self, more: str) -> None:
        """Take over the recipe of the run that is to be made longer."""
        if self.resume and self.out is None:
            raise ConvoyError("--extend begins a new run, and --resume goes on with one: give one of them")
        old = RunDirectory(Path(self.model or ""))
        if self.model is None or not old.is_run():
            raise self._no_run(f"--extend {more}")
        if self.recipe is not None:
            raise ConvoyError(f"--recipe contradicts --extend: the recipe is that of {old.path}; change it by --set")
        if "epochs" in self.explicit_keys:
            raise ConvoyError(
                "--epochs contradicts --extend, which says for how long to train on: leave one of them out"
            )
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
        if not self.trust_code:
            keys.check_own(recipe, self._file, explicit if self.model is None else {*explicit, "model"})
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
        if self.resume and out is not None and RunDirectory(out).is_run() and (recipe is None or self.again):
            RunDirectory(out).check_run()
            recipe = str(RunDirectory(out).config)
        elif self.resume and out is not None and self.model is None and recipe is None:
            raise ConvoyError(f"{out} holds no run to go on with: give the folder of a run, or leave --resume away")
        elif self.model is None and recipe is None:
            raise ConvoyError("nothing to train: give a MODEL (convoy models) or a --recipe (convoy recipes)")
        self.notes, self._file = [], recipe
        return load_recipe(recipe or "default", overrides, self.notes)


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


_ONLY_WITH_ON = ("between", "compare", "price", "images", "catalog")
_NOT_WITH_TARGET = ("devices", "score", "fix", "out", "html", "trace", "link")
_NOT_WITH_ON = ("devices", "link", "device", "trace")
# What is not predicted for devices of a catalog, by the key of the recipe: its option, and why.
_NOT_PREDICTED = {
    "parallel.cores_per_device": ("--cores-per-device", "it is for devices at hand, but --on names others"),
    "parallel.shares": ("--shares", "devices of a catalog share the batch by the speed that is predicted"),
    "recompute": ("--recompute", "what is computed twice is not predicted"),
}


class PlanRequest(SimpleNamespace):
    """A command line of `convoy plan`: keys of the recipe are in `overrides`, other options under their names."""

    def __init__(self, arguments: Sequence[str], values: Mapping[str, Any]) -> None:
        super().__init__(**{"overrides": (), "data": None, **values, "arguments": arguments})

    @cached_property
    def plans(self) -> list[Plan]:
        """The plans to predict instead of a search."""
        if any(text.strip() == "auto" for text in self.score):
            raise ConvoyError("--score auto names no plan: leave --score out, and the fastest is searched")
        return list(map(Plan.parse, self.score))

    @cached_property
    def machines(self) -> list[Machine]:
        """Those of --on and --compare."""
        added = read_devices(self.catalog) if self.catalog is not None else {}
        named = [self.on, *self.compare] if self.on is not None else []
        return [machine(text, self.between, added) for text in named]

    @cached_property
    def prices(self) -> list[float]:
        """Of an hour of one device of each machine."""
        try:
            prices = [float(text) for text in self.price.split(",")] if self.price is not None else []
        except ValueError:
            raise ConvoyError(f"--price {self.price!r} is no list of numbers, such as 0.35,0.20") from None
        if prices and (len(prices) != len(self.machines) or not all(0 <= price < math.inf for price in prices)):
            raise ConvoyError(
                f"--price has {plural(len(prices), 'price')} for {plural(len(self.machines), 'machine')}: give one of "
                "at least 0 for each, that of --on first"
            )
        return prices

    @property
    def num_devices(self) -> int:
        """The number that is asked for, or that the plans are for."""
        if self.machines:
            return len(self.machines[0].devices)
        return int(self.devices or (self.plans[0].mesh.num_devices if self.plans else 1))

    def check(self) -> Recipe:
        """The recipe; what needs neither the network nor the machine to be found wrong is refused."""
        if self.model is None and self.recipe is None:
            raise ConvoyError("nothing to plan: give a MODEL (convoy models) or a --recipe (convoy recipes)")
        named = [f"model.name={self.model}"] if self.model is not None else []
        recipe = load_recipe(self.recipe or "default", [*named, "data.path=mnist-mini", *self.overrides])
        number, typed = self.num_devices, {override.partition("=")[0] for override in self.overrides}
        for sentence in self._contradictions(typed, recipe.batch, number):
            raise ConvoyError(sentence)
        for fix in self.fix:
            parse_fix(fix)
        for cluster in self.machines:
            if cluster.between:
                link_named(cluster.between)
        if self.link is not None:
            links_named(self.link, on_cpu=True)
        for name in ("out", "html", "trace"):
            if getattr(self, name) is not None:
                options.check_writable(f"--{name}", getattr(self, name))
        _ = self.prices
        check_shares(recipe.parallel.shares, number)
        check_names(recipe)
        if not self.trust_code:
            keys.check_own(recipe, self.recipe, typed if self.model is None else {*typed, "model"})
        return recipe

    def _contradictions(self, keys: Collection[str], batch: int, number: int) -> Iterator[str]:
        """What is wrong with the options, each by itself and beside the others, in sentences."""
        if self.data is not None:
            yield "plan needs no data: give --image-size, and --classes where they are not the network's"
        why = "machines that are not at hand: name one with --on"
        if self.on is not None:
            why = "devices at hand, but --on names others: drop one of the two"
        for name in _NOT_WITH_TARGET if self.target is not None else ():
            if getattr(self, name) not in (None, ()):
                yield f"--{name} is for a plan, but --target asks for a batch: drop one of the two"
        for name in _ONLY_WITH_ON if self.on is None else _NOT_WITH_ON:
            if getattr(self, name) not in (None, ()):
                yield f"--{name} is for {why}"
        for key in _NOT_PREDICTED.keys() & set(keys) if self.on is not None else ():
            yield "{} is not for --on: {}; leave it out".format(*_NOT_PREDICTED[key])
        for name in ("classes", "images"):
            if (value := getattr(self, name)) is not None and value < 1:
                yield f"--{name} is {value}: give a whole number of at least 1"
        if self.images_per_second is not None and not 0 < self.images_per_second < math.inf:
            yield f"--images-per-second is {self.images_per_second:g}: say how many one device's input gives, e.g. 400"
        if self.score and self.fix:
            yield "--fix is for a search, but --score only predicts the plans that it is given: drop one"
        if self.compare and self.score:
            yield "--score is for one machine, but --compare names more: drop one of the two"
        if "parallel.schedule" in keys and self.plans and all(plan.num_stages == 1 for plan in self.plans):
            yield "--schedule is for plans with stages, and --score names none: leave it out"
        if self.between is not None and all(cluster.hosts == 1 for cluster in self.machines):
            mend = f"write several as 4x({self.on})"
            yield f"--between {self.between} is a network between hosts, but {self.on} is one host: {mend}"
        for plan in self.plans:
            if plan.mesh.num_devices != number:
                first = f"--score {self.plans[0]} for {number}" if self.on is None else f"{self.on} has {number}"
                first = f"--devices is {number}" if self.devices is not None else first
                devices = plural(plan.mesh.num_devices, "device")
                yield f"--score {plan} is for {devices}, but {first}: change one of them"
        if batch < number:
            yield f"a batch of {batch} is too small for {number} devices: raise --batch, or plan for fewer"
