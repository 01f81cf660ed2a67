"""bench.json: configurations with their measurements, predictions and trainings; whole after each of them.

Ranks return these records, and tables, sentences and pages are computed from them; pydantic says what a file lacks.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from convoy.errors import ConvoyError
from convoy.files import write_text
from convoy.run.directory import RunDirectory
from convoy.units import plural

CONVOY, TORCH, AUTO = "convoy", "torch", "auto"
# Tools that PyTorch users would take instead, by their names on the command line.
PEERS = {"ddp": "DistributedDataParallel", "fabric": "Lightning Fabric", "accelerate": "accelerate"}
COMPUTE, COMMUNICATION, INPUT, OPTIMIZER = "compute", "communication", "input", "optimizer"  # parts of an update's time


class Record(BaseModel):
    """A part of the file; keys that this version does not know are passed over. Numbers may be infinite, or none."""

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="constants")


class StudyFile(Record):
    """The file of a study whose rows are computed anew from the run directories beside it."""

    NAME: ClassVar[str]
    VERB: ClassVar[str]
    facts: dict[str, Any]  # what all trainings share; they tell whether two studies can be in one folder
    machine: dict[str, Any] = Field({})
    commands: list[str] = Field([])

    @classmethod
    def read(cls, path: Path) -> Self:
        """The study in a file, or in the file that a folder has."""
        if RunDirectory(path).is_run():
            raise ConvoyError(f"{path} is a run, and no study: {cls.VERB} makes one")
        path = path / cls.NAME if path.is_dir() else path
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise ConvoyError(f"{path} is no study of {cls.VERB}, or damaged: name another") from error

    @classmethod
    def open(cls, folder: Path, facts: dict[str, Any]) -> Self:
        """The study that is in a folder, or a new one; a ConvoyError where there is another, or a run."""
        if RunDirectory(folder).is_run():
            raise ConvoyError(f"--out {folder} holds a training run, which a study would overwrite: give another --out")
        study = cls.read(folder) if (folder / cls.NAME).exists() else cls(facts=facts)
        if unlike := difference(study.facts, facts):
            raise ConvoyError(
                f"{folder / cls.NAME} is of a study with {unlike}: give another --out, or remove the folder"
            )
        return study

    def save(self, folder: Path) -> None:
        write_text(folder / self.NAME, self.model_dump_json() + "\n")


Seconds = Annotated[float, AfterValidator(lambda value: round(value, 9))]


class RankTimes(Record):
    """Measurements of one rank: seconds of every timed update, and of its parts."""

    seconds: list[Seconds]
    communication: list[Seconds]
    input: list[Seconds]
    optimizer: list[Seconds]
    memory: int  # bytes at the peak, beyond those before the network was built
    overhead: Seconds  # seconds that timing adds to an update
    microbatches: int = 0  # of an update, on this rank
    without: list[Seconds] = []  # seconds of updates without exchange of gradients; empty where that is timed directly
    # this rank's part of the first update's mean loss, which is the sum of all parts
    loss: float = Field(0.0, exclude=True)


class Measurement(Record):
    """One round of a configuration."""

    round: int
    loss: float
    ranks: list[RankTimes]


class Evaluation(Record):
    """A test within a training, after `step` updates and `train_s` seconds of training; the error is from 0 to 1."""

    step: int
    epoch: float | None
    error: float | None
    loss: float | None
    train_s: float


class Training(Record):
    """A configuration's training, as far as it has come; `images` are those of the test split."""

    run: str = ""
    finished: bool = False
    images: int = 0
    sha256: str = ""
    evaluations: list[Evaluation] = []
    failed: str | None = None


class Configuration(Record):
    """A row of the table: Convoy under a plan, or another tool, on some devices."""

    key: str  # different for every row, also for one that is measured twice
    label: str  # for people
    kind: str  # `convoy`, `torch` (plain PyTorch on one device), or one of `PEERS`
    devices: int
    plan: str | None  # of Convoy, as a recipe has it; `auto` is the planner's
    series: str  # rows of one series differ by their devices only
    shares: str = ""  # `auto` or `3,3,2`; empty for even ones, or for those that come with the planner's plan
    place: int = 0  # which device it is, from 0, where one is measured alone
    failed: str | None = None  # why it could not be measured
    visits: list[Measurement] = []
    training: Training | None = None

    @property
    def where(self) -> str:
        """The label with its devices."""
        return f"{self.label} on {plural(self.devices, 'device')}"


def short(plan: str) -> str:
    """A plan for one line of a table: files lose their folders."""
    return Path(plan).name if plan.endswith((".yaml", ".yml")) else plan


class PlanPrediction(Record):
    """Seconds of an update under a plan, and bytes on the rank that needs most."""

    seconds: float
    memory: int


class Forecast(Record):
    """Predictions for a number of devices."""

    auto: str | None = None  # the plan that the planner chose, where it was asked
    auto_shares: list[int] | None = None  # microbatches of each rank that it chose with it; None where they are even
    bound: dict[str, str] = {}  # the plan that it chose for each shares that are numbers
    predictions: dict[str, PlanPrediction] = {}  # by the text of the plan; with `auto_shares` by `auto`
    notes: list[str] = []  # sentences on how they came to be

    def __or__(self, new: "Forecast") -> "Forecast":
        notes = list(dict.fromkeys([*self.notes, *new.notes]))
        both = {"bound": self.bound | new.bound, "predictions": self.predictions | new.predictions, "notes": notes}
        return (new if new.auto else self).model_copy(update=both)


class Session(Record):
    """One call of the command; its planning and trainings are parts of the whole time."""

    command: str
    started: str
    wall_s: float = 0.0
    planning_s: float = 0.0
    training_s: float = 0.0


class Made(Record):
    """Made-up pictures: channels, height and width, and the number of classes."""

    shape: tuple[int, int, int]
    classes: int


class StudyFacts(Record):
    """Facts that all configurations share; they tell whether two studies can be in one file."""

    model: str
    recipe: dict[str, Any]
    images: Made | None  # None where the recipe's data are read
    weak: bool  # weak scaling: `batch` is that of one device
    batch: int
    device_type: str
    cores_per_device: int  # 0 on GPUs and in an emulated cluster
    cluster: str  # text of an emulated cluster's file
    speeds: list[float] = []  # of its devices, as shares of a core
    updates: int | None  # timed in a round; None until chosen
    warm_up: int  # updates before them

    def batch_on(self, devices: int) -> int:
        return self.batch * (devices if self.weak else 1)


class TableOptions(Record):
    """Epochs for whose days the table has a column, images of an epoch, and rounds that were asked for."""

    epochs: float | None
    dataset_size: int
    rounds: int = 1


FORMAT, SCHEMA = "convoy-bench", 1
NAME = "bench.json"
# What pages and tables take from parts of the file that have no type of their own.
_KEYS = {
    "machine": ("machine", "cores", "torch"),
    "study.recipe": ("batch", "microbatch", "microbatches", "reproducible", "data", "parallel"),
    "training": ("epochs",),
}
_OF_THE_MACHINE = ("machine", "cores", "device", "gpus", "cuda", "torch", "convoy")


class Store(Record):
    """The file of a study."""

    path: Path = Field(exclude=True)
    study: StudyFacts
    machine: dict[str, Any]
    table: TableOptions = TableOptions(epochs=None, dataset_size=0)
    sessions: list[Session] = Field([])
    forecasts: dict[int, Forecast] = Field({})  # by number of devices
    training: dict[str, float] | None = None  # the `epochs` of all trainings; None where nothing is trained
    configurations: list[Configuration] = Field([])

    @staticmethod
    def open(folder: Path, study: StudyFacts, machine: dict[str, Any]) -> "Store":
        """The store of a study in a folder: the one that is there, or a new one. A ConvoyError says where the folder
        has that of another study or another machine, or a run."""
        path = folder / NAME
        if RunDirectory(folder).is_run():
            raise ConvoyError(f"--out {folder} holds a training run, which a study would overwrite: give another --out")
        if not path.exists():
            return Store(path=path, study=study.model_copy(), machine=machine)
        store = Store.read(folder)
        stored_study, study_now = store.study.model_dump(mode="json"), study.model_dump(mode="json")
        if None in (stored_study["updates"], study_now["updates"]):
            del study_now["updates"]
        measured_with = {key: machine[key] for key in _OF_THE_MACHINE if key in machine}
        pairs = {"is of a study": (stored_study, study_now), "was measured": (store.machine, measured_with)}
        for what, facts in pairs.items():
            if unlike := difference(*facts):
                raise ConvoyError(f"{path} {what} with {unlike}: give another --out, or remove it")
        return store

    @staticmethod
    def read(folder: Path) -> "Store":
        """The store in a folder."""
        path = folder / NAME
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConvoyError(f"{path} cannot be read ({error.strerror}): give the folder of a study") from error
        except ValueError as error:
            raise ConvoyError(f"{path} is corrupt ({error}): remove it and measure again") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ConvoyError(f"{path} is no study of convoy bench: give another --out")
        if document.get("schema") != SCHEMA:
            raise ConvoyError(
                f"{path} has schema {document.get('schema')}, this Convoy reads {SCHEMA}: give another --out, or use "
                "the Convoy that wrote it"
            )
        try:
            store = Store.model_validate({**document, "path": path})
            parts_of = {"machine": store.machine, "study.recipe": store.study.recipe}
            parts_of |= {} if store.training is None else {"training": store.training}
            absent = [f"{name}.{key}" for name, part in parts_of.items() for key in _KEYS[name] if key not in part]
        except ValidationError as error:
            parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.errors()[0]["loc"])
            absent = ["".join(parts).lstrip(".")]
        if absent:
            raise ConvoyError(f"{path} is corrupt (it has no {absent[0]}): remove it and measure again")
        return store

    def save(self) -> None:
        """Write the file, as a whole or not at all."""
        document = {"format": FORMAT, "schema": SCHEMA, **self.model_dump(mode="json")}
        try:
            write_text(self.path, json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")
        except OSError as error:
            raise ConvoyError(f"{self.path} cannot be written ({error.strerror}): choose another --out") from error

    def add(self, rows: Sequence[Configuration]) -> list[Configuration]:
        """The rows as they are kept: those that are there already stay, and may be tried again."""
        rows_by_key = {row.key: row for row in self.configurations}
        kept = [rows_by_key.setdefault(row.key, row.model_copy(deep=True)) for row in rows]
        for row in kept:
            row.failed = None
        self.configurations = list(rows_by_key.values())
        return kept

    def begin_training(self, epochs: float) -> None:
        """Train all configurations for so long; a ConvoyError where they were trained for another time."""
        self.training = self.training or {"epochs": epochs}
        if self.training["epochs"] != epochs:
            raise ConvoyError(
                f"{self.path} has trainings of {self.training['epochs']:g} epochs, which --train-epochs {epochs:g} "
                "would not go on with: give another --out, or remove it"
            )

    def plan_of(self, row: Configuration) -> str | None:
        """The plan that a row runs, None for peers. For `auto` it is the planner's for the row's shares, or else plain
        sample parallelism."""
        if row.plan != AUTO:
            return row.plan
        forecast = self.forecasts.get(row.devices, Forecast())
        plan = forecast.auto if row.shares in ("", "auto") else forecast.bound.get(row.shares)
        return plan or f"sample={row.devices}"

    def prediction_of(self, row: Configuration) -> PlanPrediction | None:
        """What was predicted of a row: of even parts, but for those that the planner found with its plan."""
        shares = row.shares or self.study.recipe["parallel"].get("shares")
        if row.kind != CONVOY or row.place or (shares and row.devices > 1):
            return None
        plan = self.plan_of(row) if self.found_shares(row) is None else AUTO
        return self.forecasts.get(row.devices, Forecast()).predictions.get(plan or "")

    def found_shares(self, row: Configuration) -> list[int] | None:
        """Microbatches of each rank that the planner found for a row of `auto`; None for even or given ones."""
        if row.plan != AUTO or row.shares:
            return None
        return self.forecasts.get(row.devices, Forecast()).auto_shares

    def shares_of(self, row: Configuration) -> str:
        """The shares with which a row runs: its own, or of `auto` those that the planner found."""
        return row.shares or ",".join(map(str, self.found_shares(row) or ()))


def difference(there: Mapping[str, Any], wanted: Mapping[str, Any], section: str = "") -> str:
    """The first key with another value than is wanted, with both; empty where there is none."""
    for key, value in wanted.items():
        stored_value = there.get(key)
        if isinstance(stored_value, dict) and isinstance(value, dict):
            if unlike := difference(stored_value, value, f"{section}{key}."):
                return unlike
        elif stored_value != value:
            return f"{section}{key}={stored_value} and not {value}"
    return ""
