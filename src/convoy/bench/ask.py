"""The command line of a study, and the checks of it that need neither torch nor the network."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from convoy.bench.configuration import check_peer, configurations, fixed_size
from convoy.bench.emulated import Cluster
from convoy.errors import ConvoyError
from convoy.files import expanded, unwritable
from convoy.training.recipe import Recipe, check_names, load_recipe

DEFAULT_BATCH = 256


@dataclass(frozen=True)
class Ask:
    """The options of the command line; None where one is not given."""

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
    epochs: float | None = None
    dataset_size: int | None = None
    cores_per_device: int | None = None
    emulate: str | None = None
    predict: bool = True
    timeout: float = 600.0
    out: Path | None = None
    device: str | None = None

    @property
    def folder(self) -> Path:
        name = self.model.replace(":", "-").replace("/", "-")
        return self.out or Path("runs") / f"bench-{name}"

    def check(self) -> None:
        """Refuse (ConvoyError) what cannot be, whatever the network and the machine."""
        for sentence in (*self._contradictions(), *self._too_small()):
            raise ConvoyError(sentence)
        for peer in self.peers_of():
            check_peer(peer)
        cluster, _ = self.cluster()
        self._check_rows(len(cluster.devices) if cluster is not None else None)
        reason = unwritable(self.folder)
        if reason is not None:
            raise ConvoyError(f"--out {self.folder} cannot be written ({reason}): choose another place")
        recipe = self.recipe_of()
        check_names(recipe)
        if recipe.precision == "auto":
            raise ConvoyError("precision=auto may differ from row to row: name one for all, e.g. --set precision=bf16")

    def recipe_of(self) -> Recipe:
        """The recipe of the study; its batch is that of one device where it grows with the devices."""
        overrides = [f"model.name={self.model}"] if self.model else []
        overrides.append(f"data.path={self.data or 'mnist-mini'}")
        batch = self.batch or self.batch_per_device or (DEFAULT_BATCH if self.recipe is None else None)
        overrides += [f"batch={batch}"] if batch is not None else []
        return load_recipe(self.recipe or "default", [*overrides, *self.settings])

    def says(self, key: str) -> bool:
        """Whether the settings have a key of the recipe that begins with `key`."""
        return any(setting.startswith(key) for setting in self.settings)

    def _contradictions(self) -> Iterator[str]:
        if self.batch is not None and self.batch_per_device is not None:
            yield "--batch is one batch for any number of devices, --batch-per-device lets it grow with them: give one"
        if self.data is not None and (self.image_size is not None or self.classes is not None):
            option = "--image-size" if self.image_size is not None else "--classes"
            yield f"{option} is for made-up pictures, but --data names real ones: leave one out"
        if self.train_epochs is not None and self.data is None:
            yield "--train-epochs trains on real pictures: name them with --data, e.g. --data mnist-mini"
        if self.train_epochs is not None and self.batch_per_device is not None:
            yield (
                "--train-epochs compares one experiment on any number of devices, but --batch-per-device makes it "
                "another on each: give --batch"
            )
        if self.dataset_size is not None and self.epochs is None:
            yield "--dataset-size is for the days that --epochs would take: give --epochs, too"
        if self.cores_per_device is not None and self.emulate is not None:
            yield "--cores-per-device contradicts --emulate, whose devices have a share of a core: drop one"

    def _too_small(self) -> Iterator[str]:
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
                yield f"{option} is {number}: give a whole number of at least {least}"
        for option, amount in (
            ("--epochs", self.epochs),
            ("--timeout", self.timeout),
            ("--train-epochs", self.train_epochs),
        ):
            if amount is not None and not 0 < amount < math.inf:
                yield f"{option} is {amount:g}: give a number above 0"

    def _check_rows(self, emulated: int | None) -> None:
        """Refuse plans, shares and numbers of devices that are none, or that do not go together."""
        plans, shares = self.plans_of(), self.shares_of()
        if self.devices is None and emulated is None:
            for text in plans:
                fixed_size(text)
            return
        numbers = self.numbers(emulated or 1)
        if emulated is not None and max(numbers) > emulated:
            raise ConvoyError(
                f"--devices {max(numbers)}, but the cluster of --emulate has {emulated}: add devices to the file"
            )
        if not configurations(numbers, plans, self.peers_of(), shares):
            raise ConvoyError("--plans names none: write e.g. sample;auto")

    def plans_of(self) -> list[str]:
        return [text.strip() for text in self.plans.split(";") if text.strip()]

    def peers_of(self) -> list[str]:
        return [text.strip() for text in self.peers.split(",") if text.strip()]

    def numbers(self, available: int) -> list[int]:
        """The numbers of devices; by default one and all that are available."""
        if self.devices is None:
            return list(dict.fromkeys((1, available)))
        parts = [part.strip() for part in self.devices.split(",")]
        if not all(part.isdecimal() and int(part) for part in parts):
            raise ConvoyError(f"--devices {self.devices} is no list of numbers: write e.g. 1,2,4")
        return [int(part) for part in parts]

    def shares_of(self) -> list[str]:
        """Shares that plans have, in the form of `Configuration.shares`."""
        texts = [text.strip() for text in self.shares.split(";")]
        for text in texts:
            if text not in ("", "even", "auto") and not _positive(text.split(",")):
                raise ConvoyError(f"--shares {text} are no shares: write even, auto or numbers such as 3,3,2")
        return ["" if text == "even" else text for text in texts]

    def cluster(self) -> tuple[Cluster | None, str]:
        """The cluster to emulate, and the text of its file."""
        if self.emulate is None:
            return None, ""
        return Cluster.read(self.emulate), expanded(self.emulate).read_text(encoding="utf-8")


def _positive(parts: Sequence[str]) -> bool:
    try:
        return all(0 < float(part) < math.inf for part in parts)
    except ValueError:
        return False
