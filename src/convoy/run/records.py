"""What a run remembers over a stop, and what it leaves for its report: written by the trainer, without checks, as
nothing in a summary may end a run, and read, checked, by whoever shows it.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from convoy.files import finite

# A number of a run: null, NaN and infinity all mean that there was no finite value.
Number = Annotated[float | None, BeforeValidator(finite)]

Status = Literal["running", "stopped", "finished", "failed"]

# A number between 0 and 1, or null.
Share = Annotated[Annotated[float, Field(ge=0, le=1)] | None, BeforeValidator(finite)]


@dataclass
class RunProgress:
    """What the loop remembers over a stop; stored in every checkpoint."""

    time_s: float = 0.0  # of the run so far, over all resumptions
    train_s: float = 0.0  # of it without evaluations and checkpoints
    data_wait_s: float = 0.0  # of that, spent waiting for data, after the first update
    start_s: float = 0.0  # of the first update, with the start of the processes that load data
    num_images: int = 0  # training images seen
    best: float | None = None  # value of the metric that says which weights are best
    best_step: int | None = None
    reached: bool = False  # an evaluation has reached the recipe's target, which ends the run
    to_evaluate: bool = False  # an evaluation was stopped, and is to be done again
    is_over: bool = False  # the run has ended before its length, as nothing became better
    left_out: int = 0  # updates not made, because loss or gradient were not finite
    bad_images: list[dict[str, str]] = field(default_factory=list)  # that could not be read: name, reason, split
    noise: dict[str, float] = field(default_factory=dict)  # the averages of `GradientNoise`
    checkpoints: dict[str, Any] = field(default_factory=dict)  # their `CheckpointTally`

    def add_bad(self, name: str, reason: str, split: str) -> None:
        """Remember a bad picture, once."""
        entry = {"name": name, "reason": reason, "split": split}
        if entry not in self.bad_images:
            self.bad_images.append(entry)


class Record(BaseModel):
    """A part of a file of a run; keys that this version does not know are passed over."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class MetricsLine(Record):
    """One line of `metrics.jsonl`: the state after `step` updates, as one of the splits sees it; further metrics are
    those of a task."""

    model_config = ConfigDict(extra="allow", frozen=True)
    split: Literal["train", "validation", "test"]
    step: int = Field(ge=0)
    epoch: Number = None
    loss: Number = None
    top1: Share = None
    top5: Share = None
    lr: Number = None
    noise_scale: Number = None
    images: int | None = Field(default=None, ge=0)
    images_per_s: Number = None
    data_wait_s: Number = None
    time_s: Number = None


class SkippedImage(Record):
    """An image that could not be read and was skipped."""

    name: str
    reason: str = ""
    split: str = ""


@dataclass(frozen=True)
class Derived:
    """A number that follows from the recipe, which nobody typed in."""

    name: str
    value: Any = None
    formula: str | None = ""  # how it follows, with the numbers put in
    source: str | None = ""  # the paper or the rule behind the formula


class StageRecord(Record):
    """A stage of a network, with what a rank of it is sent in a pass and holds, in bytes."""

    layer: str  # at which it begins
    ranks: list[int]  # that run it
    takes: list[str]  # the layers of earlier stages whose output it is sent
    forward: int  # what a rank is sent in a pass
    backward: int  # what it sends back
    parameters: int  # of the rank that has most, as the two that follow
    gradients: int
    activations: int  # kept at once for backward passes, in the schedule that ran


class RunSummary(Record):
    """`summary.json`: what came out of the run so far."""

    status: Status | None = None
    error: str | None = None
    model: str | None = None
    data: str | None = None
    devices: int | None = None
    plan: str | None = None
    approximate: str | None = None
    parameters: int | None = None
    flops: int | None = None
    num_train: int | None = None
    num_test: int | None = None
    steps: int | None = None
    total_steps: int | None = None
    epochs: Number = None
    top1: Share = None
    top5: Share = None
    loss: Number = None
    metrics: dict[str, Number] = {}  # all that the evaluation has
    split: str | None = None  # that it is of
    best_metric: str | None = None  # that says which weights are best
    best: Number = None  # its value
    best_top1: Share = None
    best_step: int | None = None
    target: Share = None
    reached: bool | None = None  # the run ended at its target; null where it has none
    time_s: Number = None
    train_s: Number = None
    start_s: Number = None
    noise_scale: Number = None
    images_per_s: Number = None
    later_images_per_s: Number = None
    data_wait_share: Share = None
    checkpoints: dict[str, Any] = {}
    left_out: int = 0
    bad_images: list[SkippedImage] = []
    derived: list[Derived] = []
    stages: list[StageRecord] = []
    notes: list[str] = []


class Mistake(Record):
    """A test image that the net got wrong, and how sure it was (`probability` of the predicted class)."""

    sample: int
    name: str = ""
    label: int = Field(ge=0)
    predicted: int = Field(ge=0)
    probability: Share = None
    picture: str | None = None


class CalibrationBin(Record):
    """The images whose answers have probabilities in one of fifteen equal ranges."""

    images: int = Field(ge=1)
    accuracy: float = Field(ge=0, le=1)
    confidence: float = Field(ge=0, le=1)  # mean probability of the answers


class ShownPicture(Record):
    """A picture of the test split that a page shows, and how good the answer is."""

    name: str = ""
    score: Share = None
    picture: str | None = None


LARGEST_TABLE = 1000  # more classes have [true, predicted, count] of the counts that are not 0


class EvaluationFile(Record):
    """`evaluation.json`: the latest evaluation of the test split; `confusion` and `mistakes` of classification, and
    what other tasks show in their place."""

    task: str = "classification"
    metrics: dict[str, Number] = {}
    per_class: list[dict[str, str | int | float | None]] = []
    points: list[Annotated[list[Number], Field(min_length=2)]] = []  # of plots: true and predicted of each output
    pictures: list[ShownPicture] = []
    classes: list[str] = []
    confusion: list[list[Annotated[int, Field(ge=0, le=2**53)]]] = []
    images: int | None = None
    top1: Share = None
    top5: Share = None
    loss: Number = None
    mistakes: list[Mistake] = []
    calibration: list[CalibrationBin] = []

    @property
    def calibration_error(self) -> float | None:
        """The expected one (Guo et al., 2017, equation 5); None of fewer than 100 images."""
        images = sum(part.images for part in self.calibration)
        apart = sum(part.images * abs(part.accuracy - part.confidence) for part in self.calibration)
        return apart / images if images >= 100 else None

    @model_validator(mode="after")
    def _check_table(self) -> Self:
        size, table = len(self.classes), self.confusion
        if size > LARGEST_TABLE and all(len(row) == 3 and max(row[:2]) < size for row in table):
            return self
        if table and (len(table) != size or any(len(row) != size for row in table)):
            raise ValueError(f"`confusion` is not a table of {size} rows and {size} columns, one for each of `classes`")
        return self
