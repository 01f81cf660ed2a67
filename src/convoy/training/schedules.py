"""The learning rate of every weight update: warm-up, then constant, in steps, half a cosine or a polynomial.

A schedule is a pure function of the update's number, so a run that resumes goes on with the same rates.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from convoy.errors import ConvoyError
from convoy.training.config import Duration, PositiveDuration, Section

_NO_TIME = Duration(0, "ep")


class _WarmUp(Section):
    """The linear warm-up, which every schedule can begin with."""

    name: str
    warmup: Duration = Field(_NO_TIME, description="how long the rate rises in a line to its peak, e.g. 5ep, 500ba, 5%")
    warmup_from: Annotated[float, Field(ge=0)] | Literal["base_lr"] = Field(
        0.0,
        description="the rate of the first update; base_lr: that of a batch of 256 (Goyal et al., 2017, section 2.2)",
    )

    @model_validator(mode="after")
    def _from_needs_warmup(self) -> Self:
        if self.warmup_from and not self.warmup:
            raise ValueError(
                f"schedule.warmup_from={self.warmup_from} would be ignored without a warm-up: set "
                "schedule.warmup, e.g. 5ep"
            )
        return self


class ConstantConfig(_WarmUp):
    """The peak rate all the time."""

    name: Literal["constant"]


class StepConfig(_WarmUp):
    """The peak rate, multiplied by `factor` at each milestone (counted from the start of training)."""

    name: Literal["step"]
    milestones: tuple[PositiveDuration, ...] = Field(
        min_length=1, description="when the rate drops, e.g. [30ep, 60ep, 80ep]"
    )
    factor: float = Field(0.1, gt=0, lt=1)


class CosineConfig(_WarmUp):
    """Half a cosine from the peak at the end of the warm-up to `final_lr` at the end of the run.

    Loshchilov and Hutter, 2017, equation 5, without restarts.
    """

    name: Literal["cosine"]
    final_lr: float = Field(0.0, ge=0)


class PolynomialConfig(_WarmUp):
    """final_lr + (peak - final_lr) · (1 - t)^power, t from 0 at the end of the warm-up to 1 at the end of the run.

    You, Gitman and Ginsburg, 2017 decay with power 2.
    """

    name: Literal["polynomial"]
    power: float = Field(2.0, gt=0)
    final_lr: float = Field(0.0, ge=0)


ScheduleConfig = Annotated[ConstantConfig | StepConfig | CosineConfig | PolynomialConfig, Field(discriminator="name")]


@dataclass(frozen=True)
class Schedule:
    """The learning rates of one run."""

    config: ScheduleConfig
    peak: float  # the rate at the end of the warm-up
    start: float  # the rate of update 0, if there is a warm-up
    warmup: int  # updates
    total: int  # updates of the run
    milestones: tuple[int, ...] = ()  # the first update after each drop of a step schedule

    def lr(self, update: int) -> float:
        """The learning rate of weight update number `update`, counted from 0."""
        if update < self.warmup:
            return self.start + (self.peak - self.start) * update / self.warmup
        progress = min(1.0, (update - self.warmup) / max(1, self.total - self.warmup))
        match self.config:
            case ConstantConfig():
                return self.peak
            case StepConfig(factor=factor):
                return self.peak * math.pow(factor, sum(update >= milestone for milestone in self.milestones))
            case CosineConfig(final_lr=final):
                return final + (self.peak - final) * (1 + math.cos(math.pi * progress)) / 2
            case PolynomialConfig(final_lr=final, power=power):
                return final + (self.peak - final) * math.pow(1 - progress, power)


def create_schedule(
    config: ScheduleConfig, *, lr: float, base_lr: float | None, total_updates: int, updates_per_epoch: int
) -> Schedule:
    """The schedule of a run with the peak rate `lr`; a ConvoyError where the warm-up fills the run, or a rate lies
    above the peak.

    `base_lr` is the rate of a batch of 256, where a warm-up starts from it. A batch smaller than that has a lower peak,
    and its warm-up is flat.
    """
    warmup = config.warmup.updates(updates_per_epoch, total_updates)
    if warmup and warmup >= total_updates:
        raise ConvoyError(
            f"schedule.warmup={config.warmup} is {warmup} weight updates, but the whole run has {total_updates}: train "
            f"longer with --epochs or shorten the warm-up, e.g. --set schedule.warmup=5%"
        )
    if config.warmup_from == "base_lr":
        assert base_lr is not None, "the recipe checks this"
        start = min(base_lr, lr)
    else:
        start = config.warmup_from
        _refuse_above("schedule.warmup_from", start, lr)
    if isinstance(config, CosineConfig | PolynomialConfig):
        _refuse_above("schedule.final_lr", config.final_lr, lr)
    milestones: tuple[int, ...] = ()
    if isinstance(config, StepConfig):
        milestones = tuple(milestone.updates(updates_per_epoch, total_updates) for milestone in config.milestones)
        if list(milestones) != sorted(set(milestones)):
            raise ConvoyError(
                f"schedule.milestones={', '.join(map(str, config.milestones))} fall on the weight updates "
                f"{', '.join(map(str, milestones))}, which do not rise: put them in order and further apart"
            )
        if milestones[0] < warmup:
            raise ConvoyError(
                f"schedule.milestones begin at {config.milestones[0]}, inside schedule.warmup={config.warmup}: shorten "
                "the warm-up or move the milestone"
            )
    return Schedule(config, lr, start, warmup, total_updates, milestones)


def _refuse_above(key: str, value: float, peak: float) -> None:
    if value > peak:
        raise ConvoyError(f"{key}={value:g} lies above the peak learning rate {peak:g}: choose a lower one")
