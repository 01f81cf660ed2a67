"""The records of bench.json: configurations with their measurements, predictions and trainings."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, computed_field

from convoy.units import plural

CONVOY, TORCH, AUTO = "convoy", "torch", "auto"
# Tools that PyTorch users would take instead, by their names on the command line.
PEERS = {"ddp": "DistributedDataParallel", "fabric": "Lightning Fabric", "accelerate": "accelerate"}
COMPUTE, COMMUNICATION, INPUT, OPTIMIZER = "compute", "communication", "input", "optimizer"  # parts of an update's time


class Record(BaseModel):
    """A part of the file; keys that this version does not know are passed over."""

    model_config = ConfigDict(extra="ignore")


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
    started: str = ""
    wall_s: float = 0.0
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
    wall_s: float = 0.0
    images: int = 0
    sha256: str = ""
    evaluations: list[Evaluation] = []
    failed: str | None = None


class Configuration(Record):
    """A row of the table: Convoy under a plan, or another tool, on some devices."""

    key: str  # different for every row, also for one that is measured twice
    kind: str  # `convoy`, `torch` (plain PyTorch on one device), or one of `PEERS`
    devices: int
    plan: str | None  # of Convoy, as a recipe has it; `auto` is the planner's
    series: str  # rows of one series differ by their devices only
    shares: str = ""  # `auto` or `3,3,2`; empty for even ones, or for those that come with the planner's plan
    place: int = 0  # which device it is, from 0, where one is measured alone
    failed: str | None = None  # why it could not be measured
    visits: list[Measurement] = []
    training: Training | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def label(self) -> str:
        number = self.key.partition("#")[2]
        return self._name() + (f" (row {number})" if number else "")

    @property
    def where(self) -> str:
        """The label with its devices."""
        return f"{self.label} on {plural(self.devices, 'device')}"

    def _name(self) -> str:
        if self.kind in PEERS:
            return PEERS[self.kind]
        if self.kind == TORCH:
            return "plain PyTorch"
        if self.place:
            return f"device {self.place + 1} alone"
        if self.devices == 1:
            return "one device"
        assert self.plan is not None
        plan = self.series.removesuffix(f", shares {self.shares}") if "\n" in self.plan else self.plan
        return f"{plan}, shares {self.shares}" if self.shares else plan


def short(plan: str) -> str:
    """A plan for one line of a table: files lose their folders."""
    return Path(plan).name if plan.endswith((".yaml", ".yml")) else plan


class PlanPrediction(Record):
    """Seconds of an update under a plan, by parts too, and bytes on the rank that needs most."""

    seconds: float
    parts: dict[str, float]
    memory: int


class Forecast(Record):
    """Predictions for a number of devices."""

    auto: str | None = None  # the plan that the planner chose, where it was asked
    auto_shares: list[int] | None = None  # microbatches of each rank that it chose with it; None where they are even
    bound: dict[str, str] = {}  # the plan that it chose for each shares that are numbers
    predictions: dict[str, PlanPrediction] = {}  # by the text of the plan; with `auto_shares` by `auto`
    notes: list[str] = []  # sentences on how they came to be

    def __or__(self, new: "Forecast") -> "Forecast":
        last = new if new.auto else self
        return Forecast(
            auto=last.auto,
            auto_shares=last.auto_shares,
            bound=self.bound | new.bound,
            predictions=self.predictions | new.predictions,
            notes=list(dict.fromkeys([*self.notes, *new.notes])),
        )


class Session(Record):
    """One call of the command; its planning and trainings are parts of the whole time."""

    command: str
    started: str
    wall_s: float
    planning_s: float
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


class TrainingLength(Record):
    """Epochs of all trainings."""

    epochs: float
