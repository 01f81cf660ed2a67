"""The command line of a study, the rows that it asks for, and its checks, which need neither torch nor the network."""

import importlib.util
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

from convoy.bench.emulated import Cluster
from convoy.bench.records import AUTO, CONVOY, PEERS, TORCH, Configuration
from convoy.errors import ConvoyError
from convoy.files import expanded, unwritable
from convoy.plans.plan import WORDS, Plan, plan_text
from convoy.recipe.recipe import Recipe, check_names, load_recipe
from convoy.terminal import pip_install

DEFAULT_BATCH = 256
# Optimizers of a study of the batch, and the rate for a batch of 256 from which one that is not the recipe's begins.
GUESSES = {"sgd": 0.1, "lars": 0.4, "lamb": 0.01, "adamw": 0.002}
_OF_BATCHES = ("target", "tune", "optimizers", "seeds")
_NOT_WITH_BATCHES = (
    *("batch", "batch_per_device", "peers", "shares", "train_epochs", "epochs"),
    *("emulate", "plans", "rounds", "updates", "warm_up"),
)


class Ask(SimpleNamespace):
    """A command line of `convoy bench`: its options under their names, of which some were `given`."""

    @property
    def folder(self) -> Path:
        name = self.model.replace(":", "-").replace("/", "-")
        return self.out or Path("runs") / f"{'bench' if self.batches is None else 'batches'}-{name}"

    def check(self) -> None:
        """Refuse (ConvoyError) what cannot be, whatever the network and the machine."""
        for sentence in self._mistakes():
            raise ConvoyError(sentence)
        for peer in self.peers_of():
            check_peer(peer)
        cluster, _ = self.cluster()
        _ = self.batch_numbers() if self.batches is not None else []
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

    def _mistakes_of_batches(self) -> Iterator[str]:
        """What is wrong with the options of a study of the batch, or with those without one."""
        names = _NOT_WITH_BATCHES if self.batches is not None else _OF_BATCHES
        named = (f"--{name.replace('_', '-')}" for name in names if name in self.given)
        if self.batches is None:
            yield from (f"{name} is for a study of the batch: name batches with --batches 64,128,256" for name in named)
            return
        yield from (f"{name} contradicts --batches, which trains on one device at each: drop one" for name in named)
        if self.data is None:
            yield "--batches trains on real pictures: name them with --data, e.g. --data mnist-mini"
        if self.target is None or not 0 < self.target <= 1:
            yield "--batches needs the top-1 that is to be reached: give --target, e.g. --target 0.97"
        for name in (self.optimizers or "sgd").split(","):
            if name not in GUESSES:
                yield f"--optimizers {name} is none: choose among {', '.join(GUESSES)}"

    def batch_numbers(self) -> list[int]:
        """The batches of a study, in rising order."""
        return sorted(set(numbers_of("--batches", self.batches or "")))

    def _mistakes(self) -> Iterator[str]:
        yield from self._mistakes_of_batches()
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
        if self.rounds == 0 and self.train_epochs is None:
            yield "--rounds is 0: give a whole number of at least 1, or train with --train-epochs"
        for name in ("epochs", "timeout", "train_epochs"):
            if (number := getattr(self, name)) is not None and not 0 < number < math.inf:
                yield f"--{name.replace('_', '-')} is {number:g}: give a number above 0"

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
        return numbers_of("--devices", self.devices)

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


def numbers_of(option: str, text: str) -> list[int]:
    """The whole numbers above 0 of an option; a ConvoyError where it is no list of them."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConvoyError(f"{option} {text} is no list of numbers: write e.g. 1,2,4")
    return [int(part) for part in parts]


def _positive(parts: Sequence[str]) -> bool:
    try:
        return all(0 < float(part) < math.inf for part in parts)
    except ValueError:
        return False


# The package, and the extra of Convoy's, that a peer needs.
EXTRAS = {"fabric": "lightning", "accelerate": "accelerate"}
_AUTO_ON = re.compile(r"auto=[1-9][0-9]*")


def missing(kind: str) -> str | None:
    """The package that a peer needs and that is not installed."""
    package = EXTRAS.get(kind)
    return package if package is not None and importlib.util.find_spec(package) is None else None


def check_peer(kind: str) -> None:
    """Refuse (ConvoyError) what is no peer, or is not installed."""
    if kind not in PEERS:
        raise ConvoyError(f"--peers {kind} is no peer: choose among {', '.join(PEERS)}")
    if (package := missing(kind)) is not None:
        raise ConvoyError(f"--peers {kind} needs {package}, which is not installed: {pip_install(package)}")


def configurations(
    devices: Sequence[int], plans: Sequence[str], peers: Sequence[str], shares: Sequence[str] = ("",), alone: int = 1
) -> list[Configuration]:
    """All rows: for every number of devices the plans that are for so many, and the peers.

    A plan without a size, as `sample`, is on all devices of the configuration; `auto=4` is the planner's on 4 devices
    only. Plans that divide the samples have a row for each of the `shares`. With any peer, plain PyTorch on one device
    is measured too, and `alone` devices are measured each by itself where one device is asked for. A number of devices
    that comes twice is measured twice. A ConvoyError says where a plan fits none of them.
    """
    for text in plans:
        if (size := fixed_size(text)) not in (None, *devices):
            raise ConvoyError(
                f"--plans {text} is for {size} devices, but --devices has no {size}: add it, or leave the sizes out"
            )
    rows: list[Configuration] = []
    times: Counter[str] = Counter()

    def add(kind: str, number: int, plan: str | None, series: str, label: str, part: str = "") -> None:
        also = f", shares {part}" if part else ""
        key = f"{plan if kind == CONVOY else kind} on {number}{also}"
        times[key] += 1
        again = f" (row {times[key]})" if times[key] > 1 else ""
        key = f"{key} #{times[key]}" if again else key
        names = {"key": key, "label": f"{label}{also}{again}", "series": f"{series}{also}"}
        rows.append(Configuration(**names, kind=kind, devices=number, plan=plan, shares=part))

    for number in devices:
        if number == 1:
            add(CONVOY, 1, "serial", "", "one device")
            if peers:
                add(TORCH, 1, None, TORCH, "plain PyTorch")
            continue
        for text in plans:
            if fixed_size(text) in (None, number):
                plan = _plan(text, number)
                for part in [part for part in shares if _fits(part, plan, number)] or [""]:
                    add(CONVOY, number, plan, text, text if "\n" in plan else plan, part)
        for peer in peers:
            add(peer, number, None, peer, PEERS[peer])
    after = max((place for place, row in enumerate(rows, 1) if row.devices == 1), default=0)
    for place in range(alone if after else 0, 1, -1):
        names = {"key": f"serial on device {place}", "label": f"device {place} alone", "series": ""}
        rows.insert(after, Configuration(**names, kind=CONVOY, devices=1, plan="serial", place=place - 1))
    return rows


def parts_of(plan: str, devices: int) -> int:
    """The number of parts into which a plan divides the batch: as many as devices for one still to be chosen."""
    return devices if plan == AUTO else Plan.parse(plan).parts


def _fits(shares: str, plan: str, devices: int) -> bool:
    """Whether a plan can have such shares: it divides the samples, into so many parts where they are numbers."""
    if not shares:
        return True
    parts, number = parts_of(plan, devices), len(shares.split(","))
    if plan == AUTO and shares != "auto":
        return number > 1 and devices % number == 0
    return parts > 1 and (shares == "auto" or number == parts)


def fixed_size(text: str) -> int | None:
    """The number of devices that a plan is for; None where it does not say."""
    if text == AUTO or text in WORDS:
        return None
    if _AUTO_ON.fullmatch(text):
        return int(text.partition("=")[2])
    if text.startswith(f"{AUTO}="):
        raise ConvoyError(f"--plans {text} has no number of devices: write auto, or auto=4 for 4 devices only")
    return Plan.parse(text).mesh.num_devices


def _plan(text: str, devices: int) -> str:
    if text == AUTO or _AUTO_ON.fullmatch(text):
        return AUTO
    return f"{text}={devices}" if text in WORDS else plan_text(Plan.parse(text))
