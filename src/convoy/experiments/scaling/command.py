"""From what is asked for to a study that has been measured, and to its files."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from convoy.data import open_data
from convoy.errors import ConvoyError
from convoy.experiments.scaling.ranks.processes import Place, Say
from convoy.experiments.scaling.ranks.seats import Seats
from convoy.experiments.scaling.schedule import Schedule
from convoy.experiments.scaling.storage.store import Store
from convoy.experiments.scaling.study.coarseness import too_coarse
from convoy.experiments.scaling.study.configuration import Configuration, configurations, parts_of
from convoy.experiments.scaling.study.machine import machine_of
from convoy.experiments.scaling.study.peers import check_installed, check_peers, check_recipe
from convoy.experiments.scaling.study.study import IMAGENET, Study, assumed, check_gpus, cores_per_device, made_for
from convoy.experiments.scaling.training_runs import TrainingRuns, recipe_for_training
from convoy.files import unwritable
from convoy.launch.cores import own_cores
from convoy.training import Recipe, RunDirectory, choose_device, load_recipe
from convoy.training.derived import num_microbatches

if TYPE_CHECKING:
    from convoy.launch.emulated import Cluster

DEFAULT_BATCH = 256


@dataclass(frozen=True)
class Ask:
    """What the command line says; None where it says nothing."""

    command: str
    model: str
    devices: str | None = None
    plans: str = "sample;auto"
    batch: int | None = None
    batch_per_device: int | None = None
    peers: str = ""
    shares: str = ""
    data: str | None = None
    image_size: int | None = None
    classes: int | None = None
    recipe: str | None = None
    settings: tuple[str, ...] = ()
    train_epochs: float | None = None
    rounds: int = 5
    updates: int | None = None
    warm_up: int = 2
    epochs: float = 90.0
    dataset_size: int | None = None
    cores_per_device: int | None = None
    emulate: str | None = None
    predict: bool = True
    timeout: float = 600.0
    out: Path | None = None
    device: str | None = None

    @property
    def folder(self) -> Path:
        """Of the study."""
        name = self.model.replace(":", "-").replace("/", "-")
        return self.out or Path("runs") / f"bench-{name}"

    def check(self) -> None:
        """Refuse numbers that cannot be.

        Raises:
            ConvoyError: some cannot.
        """
        if self.batch is not None and self.batch_per_device is not None:
            raise ConvoyError(
                "--batch is one batch for any number of devices, --batch-per-device lets it grow with them: give one"
            )
        if self.data is not None and (self.image_size is not None or self.classes is not None):
            option = "--image-size" if self.image_size is not None else "--classes"
            raise ConvoyError(f"{option} is for made-up pictures, but --data names real ones: leave one out")
        for option, number, least in (
            ("--batch", self.batch, 1),
            ("--batch-per-device", self.batch_per_device, 1),
            ("--image-size", self.image_size, 1),
            ("--classes", self.classes, 1),
            ("--rounds", self.rounds, 1 if self.train_epochs is None else 0),
            ("--updates", self.updates, 1),
            ("--warm-up", self.warm_up, 0),
            ("--dataset-size", self.dataset_size, 1),
            ("--cores-per-device", self.cores_per_device, 1),
        ):
            if number is not None and number < least:
                raise ConvoyError(f"{option} is {number}: give a whole number of at least {least}")
        if self.train_epochs is not None and self.data is None:
            raise ConvoyError("--train-epochs trains on real pictures: name them with --data, e.g. --data mnist-mini")
        if self.train_epochs is not None and self.batch_per_device is not None:
            raise ConvoyError(
                "--train-epochs compares one experiment on any number of devices, but --batch-per-device makes it "
                "another on each: give --batch"
            )
        for option, amount in (
            ("--epochs", self.epochs),
            ("--timeout", self.timeout),
            ("--train-epochs", self.train_epochs),
        ):
            if amount is not None and not 0 < amount < math.inf:
                raise ConvoyError(f"{option} is {amount:g}: give a number above 0")
        reason = unwritable(self.folder)
        if reason is not None:
            raise ConvoyError(f"--out {self.folder} cannot be written ({reason}): choose another place")

    def numbers(self, available: int) -> list[int]:
        """The numbers of devices.

        Args:
            available: that there are, for the default.

        Raises:
            ConvoyError: they are no numbers.
        """
        if self.devices is None:
            return list(dict.fromkeys((1, available)))
        found = []
        for part in self.devices.split(","):
            if not part.strip().isdecimal() or int(part) < 1:
                raise ConvoyError(f"--devices {self.devices} is no list of numbers: write e.g. 1,2,4")
            found.append(int(part))
        return found

    def shares_of(self) -> list[str]:
        """Shares that plans have, as `Configuration` has them.

        Raises:
            ConvoyError: they are no numbers.
        """
        found = []
        for text in (part.strip() for part in self.shares.split(";")):
            try:
                wrong = text not in ("", "even", "auto") and min(float(part) for part in text.split(",")) <= 0
            except ValueError:
                wrong = True
            if wrong:
                raise ConvoyError(f"--shares {text} are no shares: write even, auto or numbers such as 3,3,2")
            found.append("" if text == "even" else text)
        return found

    def recipe_of(self) -> Recipe:
        """How the network is trained; its batch is that of a device where it grows with the devices."""
        given = [f"model.name={self.model}"] if self.model else []
        given.append(f"data.path={self.data or 'mnist-mini'}")
        batch = self.batch or self.batch_per_device or (DEFAULT_BATCH if self.recipe is None else None)
        given += [f"batch={batch}"] if batch is not None else []
        return load_recipe(self.recipe or "default", [*given, *self.settings])


@dataclass(frozen=True)
class Measured:
    """A study that has been measured, and where."""

    ask: Ask
    store: Store


def measure(ask: Ask, progress: Say, tell: Callable[[str], None]) -> Measured:
    """Measure what is not known yet.

    Args:
        ask: what is asked for.
        progress: is told of the work as a whole: what, done, of how many.
        tell: is told sentences that stay.

    Raises:
        ConvoyError: something in it cannot be, or another process measures there.
    """
    ask.check()
    plans = [text.strip() for text in ask.plans.split(";") if text.strip()]
    peers = [text.strip() for text in ask.peers.split(",") if text.strip()]
    check_peers(peers)
    recipe = ask.recipe_of()
    for peer in peers:
        check_installed(peer)
        check_recipe(recipe)
    device = choose_device(ask.device)
    shares = ask.shares_of()
    cluster, text = _cluster(ask.emulate)
    speeds = tuple(one.speed for one in cluster.devices) if cluster is not None else ()
    on_cpu = device.type == "cpu"
    numbers = ask.numbers(len(speeds) or (len(own_cores()) if on_cpu else torch.cuda.device_count()))
    each = _share(ask, numbers, len(speeds), on_cpu)
    alone = len(speeds) or torch.cuda.device_count()
    unequal = bool(ask.shares) and (not on_cpu or len(set(speeds)) > 1)
    rows = configurations(numbers, plans, peers, shares, min(alone, max(numbers)) if unequal else 1)
    if not rows:
        raise ConvoyError("--plans names none: write e.g. sample;auto")
    recipe = _divisible(ask, recipe, max(numbers))
    made = made_for(recipe, ask.image_size, ask.classes) if ask.data is None else None
    study = Study(
        recipe=recipe,
        made=made,
        weak=ask.batch_per_device is not None,
        device_type=device.type,
        cores_per_device=each,
        cluster=text,
        updates=ask.updates,
        warm_up=ask.warm_up,
        speeds=speeds,
    )
    _check_batches(study, rows)
    about = machine_of(device)
    Store.open(ask.folder, study, about)
    if made is not None and (sentence := assumed(recipe, made, ask.image_size)):
        tell(sentence)
    size = ask.dataset_size or (IMAGENET if made is not None else len(open_data(recipe.data, progress).train))
    with _places(cluster) as places:
        _make_folder(ask.folder)
        with RunDirectory(ask.folder).lock():
            store = Store.open(ask.folder, study, about)  # as it is when nobody else writes there
            store.document["table"] = {"epochs": ask.epochs, "dataset_size": size, "rounds": ask.rounds}
            if ask.train_epochs is not None:
                store.begin_training(ask.train_epochs)
            store.begin(ask.command, datetime.now(UTC).isoformat(timespec="seconds"))
            seats = Seats(each, places)
            for sentence in _coarse(study, rows):
                tell(sentence)
            predict = ask.predict and ask.rounds > 0
            Schedule(study, rows, store, seats, ask.rounds, ask.timeout, predict, progress, tell)()
            if ask.train_epochs is not None:
                said = any(setting.startswith("evaluate_every") for setting in ask.settings)
                trained = replace(study, recipe=recipe_for_training(recipe, ask.train_epochs, said))
                TrainingRuns(trained, rows, store, ask.folder, seats, ask.timeout, ask.command, progress, tell)()
    return Measured(ask, store)


def _coarse(study: Study, rows: list[Configuration]) -> list[str]:
    """Sentences on batches that cannot be divided by the speeds of an emulated cluster's devices."""
    microbatches = num_microbatches(study.recipe)
    wanted = dict.fromkeys(
        row.devices for row in rows if row.shares and parts_of(row.plan or "serial", row.devices) == row.devices
    )
    found = [too_coarse(study.batch(number), microbatches, study.speeds[:number]) for number in wanted if study.speeds]
    return list(dict.fromkeys(filter(None, found)))


def _share(ask: Ask, numbers: list[int], emulated: int, on_cpu: bool) -> int:
    """Cores of each device; 0 where that is settled otherwise, as by a cluster of emulated ones."""
    if emulated:
        if ask.cores_per_device is not None:
            raise ConvoyError(
                "--cores-per-device contradicts --emulate, whose devices have a share of a core: drop one"
            )
        if max(numbers) > emulated:
            raise ConvoyError(
                f"--devices {max(numbers)}, but the cluster of --emulate has {emulated}: add devices to the file"
            )
        return 0
    if on_cpu:
        return cores_per_device(numbers, ask.cores_per_device)
    if ask.cores_per_device is not None:
        raise ConvoyError("--cores-per-device has no effect on GPUs: leave it out")
    check_gpus(numbers)
    return 0


def _divisible(ask: Ask, recipe: Recipe, devices: int) -> Recipe:
    """The recipe with microbatches so small that every device can have one, unless the command says how large they are.

    All rows have the same ones: batch norm takes its statistics over them.
    """
    said = any(setting.startswith("microbatch") for setting in ask.settings)
    own = recipe.batch if ask.batch_per_device is not None else recipe.batch // devices
    if said or recipe.microbatch is None or not own:
        return recipe
    return recipe.model_copy(update={"microbatch": min(recipe.microbatch, own)})


def _check_batches(study: Study, rows: list[Configuration]) -> None:
    for row in rows:
        if study.batch(row.devices) < row.devices:
            raise ConvoyError(
                f"a batch of {study.batch(row.devices)} is too small for {row.devices} devices: raise --batch"
            )


def _cluster(path: str | None) -> "tuple[Cluster | None, str]":
    """The cluster to emulate, and the text of its file."""
    if path is None:
        return None, ""
    from convoy.launch.emulated import Cluster

    return Cluster.read(Path(path)), Path(path).read_text(encoding="utf-8")


@contextmanager
def _places(cluster: "Cluster | None") -> Iterator[list[Place]]:
    """The devices of an emulated cluster; none without one."""
    if cluster is None:
        yield []
        return
    from convoy.launch.emulated import emulate

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hosts of a cluster have no names, which torch would tell
    with emulate(cluster) as places:
        yield list(places)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConvoyError(f"--out {folder} cannot be made ({error.strerror}): choose another place") from error
