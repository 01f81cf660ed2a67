"""bench.json: configurations with their measurements, predictions and trainings; whole after each of them.

Ranks return these records, and tables, sentences and pages are computed from them; pydantic says what a file lacks.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from convoy.errors import ConvoyError
from convoy.files import write_text, writing
from convoy.run.directory import RunDirectory

CONVOY, TORCH, AUTO = "convoy", "torch", "auto"
# Tools that PyTorch users would take instead, by their names on the command line.
PEERS = {"ddp": "DistributedDataParallel", "fabric": "Lightning Fabric", "accelerate": "accelerate"}
COMPUTE, COMMUNICATION, INPUT, OPTIMIZER = "compute", "communication", "input", "optimizer"  # parts of an update's time


class Record(BaseModel):
    """A part of the file; keys that this version does not know are passed over. Numbers may be infinite, or none."""

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="constants")


class StudyFile(Record):
    """The file of a study, in its folder."""

    NAME: ClassVar[str]
    VERB: ClassVar[str]
    HEAD: ClassVar[dict[str, Any]] = {}  # what the file begins with, by which it is known
    folder: Path = Field(Path(), exclude=True)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The study in a file, or in the file that a folder has."""
        if RunDirectory(path).is_run():
            raise ConvoyError(f"{path} is a run, and no study: {cls.VERB} makes one")
        path = path / cls.NAME if path.is_dir() else path
        try:
            # not by pydantic's own reader, which refuses names of files that are no UTF-8
            document = json.loads(path.read_bytes())
            other = {key: document[key] for key, value in cls.HEAD.items() if document[key] != value}
            study = None if other else cls.model_validate(document)
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            mistakes = error.errors() if isinstance(error, ValidationError) else []
            why = "".join(f" ({'.'.join(map(str, one['loc']))}: {one['msg']})" for one in mistakes[:1])
            raise ConvoyError(f"{path} is no study of {cls.VERB}, or damaged{why}: name another") from error
        if study is None:
            raise ConvoyError(f"{path} is of another kind or version ({other}): use the Convoy that wrote it")
        study.folder = path.parent
        return study

    @classmethod
    def open(cls, folder: Path, **facts: Any) -> Self:
        """The study that is in a folder, or a new one; a ConvoyError where there is one of other facts, or a run."""
        if RunDirectory(folder).is_run():
            raise ConvoyError(f"--out {folder} holds a training run, which a study would overwrite: give another --out")
        if not (folder / cls.NAME).exists():
            return cls(folder=folder, **facts).model_copy(deep=True)
        study = cls.read(folder)
        for what, stored, wanted in study.compared(**facts):
            if unlike := difference(stored, wanted):
                raise ConvoyError(f"{folder / cls.NAME} {what} with {unlike}: give another --out, or remove the folder")
        return study

    def compared(self, **facts: Any) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        """In words what is compared of a study that goes on: as it is stored, and as it is asked for now."""
        raise NotImplementedError

    @classmethod
    @contextmanager
    def alone(cls, folder: Path, tell: Callable[[str], None], lock: Path | None = None, **facts: Any) -> Iterator[Self]:
        """The study of a folder, as it is when no other process writes there, or none that has the same `lock`."""
        cls.open(folder, **facts)
        with RunDirectory(lock or folder).lock(tell=tell):
            yield cls.open(folder, **facts)

    def save(self) -> None:
        """Write the file, as a whole or not at all."""
        path = self.folder / self.NAME
        with writing(path, "choose another --out"):
            write_text(path, json.dumps(self.HEAD | self.model_dump(mode="json")) + "\n")


class TrainingStudy(StudyFile):
    """A study whose rows are computed anew from the run directories beside its file."""

    facts: dict[str, Any]  # what all trainings share; they tell whether two studies can be in one folder
    machine: dict[str, Any] = Field({})
    commands: list[str] = Field([])

    def compared(self, **facts: Any) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        yield "is of a study", self.facts, facts["facts"]

    def begin(self, machine: dict[str, Any], command: str) -> None:
        """Note that a command goes on with it on a machine."""
        self.machine, self.commands = machine, list(dict.fromkeys([*self.commands, command]))


def _with(*keys: str) -> AfterValidator:
    """Checks that a part of the file has what pages and tables take from it."""

    def check(part: dict[str, Any]) -> dict[str, Any]:
        for key in keys:
            if key not in part:
                raise ValueError(f"there is no {key}")
        return part

    return AfterValidator(check)


Seconds = Annotated[float, AfterValidator(lambda value: round(value, 9))]


class RankTimes(Record):
    """Measurements of one rank: seconds of every timed update, and of its parts."""

    seconds: list[Seconds]
    communication: list[Seconds]
    input: list[Seconds]
    optimizer: list[Seconds]
    memory: int  # bytes at the peak, beyond those before the network was built
    overhead: Seconds  # seconds that timing adds to an update
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
        """The name with its devices, where it does not say them."""
        says_devices = self.devices == 1 or "=" in self.label
        return short(self.label) if says_devices else f"{short(self.label)} on {self.devices}"


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
    recipe: Annotated[dict[str, Any], _with("batch", "microbatch", "microbatches", "data", "parallel")]
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


_OF_THE_MACHINE = ("machine", "cores", "device", "gpus", "cuda", "torch", "convoy")


class Store(StudyFile):
    """The file of a study of devices."""

    NAME, VERB = "bench.json", "convoy bench"
    HEAD = {"format": "convoy-bench", "schema": 1}
    study: StudyFacts
    machine: Annotated[dict[str, Any], _with("machine", "cores", "torch")]
    table: TableOptions = TableOptions(epochs=None, dataset_size=0)
    sessions: list[Session] = Field([])
    forecasts: dict[int, Forecast] = Field({})  # by number of devices
    # the `epochs` of all trainings; None where nothing is trained
    training: Annotated[dict[str, float], _with("epochs")] | None = None
    configurations: list[Configuration] = Field([])

    def compared(self, **facts: Any) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        stored, wanted = (study.model_dump(mode="json") for study in (self.study, facts["study"]))
        if None in (stored["updates"], wanted["updates"]):
            del wanted["updates"]
        yield "is of a study", stored, wanted
        machine = facts["machine"]
        yield "was measured", self.machine, {key: machine[key] for key in _OF_THE_MACHINE if key in machine}

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
        if (before := self.training["epochs"]) != epochs:
            raise ConvoyError(
                f"{self.folder / self.NAME} has trainings of {before:g} epochs, which --train-epochs {epochs:g} would "
                "not go on with: give another --out, or remove it"
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
