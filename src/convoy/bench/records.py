"""The records of bench.json: configurations with their measurements, predictions and trainings."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, computed_field

from convoy.units import plural

CONVOY, TORCH, AUTO = "convoy", "torch", "auto"
PEERS = {"ddp": "DistributedDataParallel", "fabric": "Lightning Fabric", "accelerate": "accelerate"}
"""Tools that PyTorch users would take instead, by their names on the command line."""
COMPUTE, COMMUNICATION, INPUT, OPTIMIZER = "compute", "communication", "input", "optimizer"
"""Parts of an update's time."""


class Record(BaseModel):
    """A part of the file; keys that this version does not know are passed over."""

    model_config = ConfigDict(extra="ignore")


Seconds = Annotated[float, AfterValidator(lambda value: round(value, 9))]


class RankTimes(Record):
    """Measurements of one rank: seconds of every timed update, and of its parts.

    Attributes:
        memory: bytes at the peak, beyond those of the process before the network was built.
        overhead: seconds that timing has added to an update.
        microbatches: of an update, on this rank.
        without: seconds of updates without exchange of gradients, where that is how the exchange is measured.
        loss: this rank's part of the mean loss of the first update; the parts of all ranks add up to it.
    """

    seconds: list[Seconds]
    communication: list[Seconds]
    input: list[Seconds]
    optimizer: list[Seconds]
    memory: int
    overhead: Seconds
    microbatches: int = 0
    without: list[Seconds] = []
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
    """A row of the table: Convoy under a plan, or another tool, on some devices.

    Attributes:
        key: different for every row, also for one that is measured twice.
        kind: `convoy`, `torch` (plain PyTorch on one device), or one of `PEERS`.
        plan: of Convoy, as a recipe has it; `auto` is the planner's.
        series: rows of one series differ by their devices only.
        shares: of the batch, as a recipe has them: empty for even ones, or with the planner's plan for its own;
            `auto`, or `3,3,2`.
        place: of one device alone, which one it is, from 0.
        failed: why it could not be measured.
    """

    key: str
    kind: str
    devices: int
    plan: str | None
    series: str
    shares: str = ""
    place: int = 0
    failed: str | None = None
    visits: list[Measurement] = []
    training: Training | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def label(self) -> str:
        """For people."""
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
    """Predictions for a number of devices.

    Attributes:
        auto: the plan that the planner chose, where it was asked.
        auto_shares: microbatches of each rank that it chose with it; None where they are even.
        bound: the plans that it chose for shares that are numbers, by these.
        predictions: by the text of the plan; that of `auto_shares` is of `auto`.
        notes: sentences on how they came to be.
    """

    auto: str | None = None
    auto_shares: list[int] | None = None
    bound: dict[str, str] = {}
    predictions: dict[str, PlanPrediction] = {}
    notes: list[str] = []

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
    """Facts that all configurations share; they tell whether two studies can be in one file.

    Attributes:
        images: made-up ones; None where the recipe's data are read.
        weak: the batch is that of a device, and grows with the devices.
        cores_per_device: on a CPU; 0 on others and in an emulated cluster.
        cluster: text of the file of an emulated one.
        speeds: of its devices, as shares of a core.
        updates: timed in a round; None until chosen.
        warm_up: updates before them.
    """

    model: str
    recipe: dict[str, Any]
    images: Made | None
    weak: bool
    batch: int
    device_type: str
    cores_per_device: int
    cluster: str
    speeds: list[float] = []
    updates: int | None
    warm_up: int

    def batch_on(self, devices: int) -> int:
        """Samples of an update."""
        return self.batch * (devices if self.weak else 1)


class TableOptions(Record):
    """Epochs for whose days the table has a column, images of an epoch, and rounds that were asked for."""

    epochs: float | None
    dataset_size: int
    rounds: int = 1


class TrainingLength(Record):
    """Epochs of all trainings."""

    epochs: float
