"""The optimizer of a recipe: its options, the learning rate for the size of the batch; and the rate of every update:
warm-up, then constant, in steps, half a cosine or a polynomial.

A schedule is a pure function of the update's number, so a run that resumes goes on with the same rates.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from convoy.errors import ConvoyError
from convoy.recipe.schema import Duration, PositiveDuration, Section

REFERENCE_BATCH = 256

_Rate = Annotated[float | None, Field(gt=0)]
_Fraction = Annotated[float, Field(ge=0, lt=1)]


class GroupConfig(Section):
    """Parameters with a rate and a decay of their own."""

    parameters: str = Field(min_length=1, description="names that `*` and `?` may stand in, e.g. '*.norm?.bias'")
    lr_factor: float = Field(1.0, ge=0, description="times the learning rate of the others; 0 = never trained")
    weight_decay: float | None = Field(None, ge=0, description="(that of others of their kind if not said)")
    until: PositiveDuration | None = Field(
        None, description="trained until then; from then on only a step of lookahead moves them"
    )


def _frozen_part(text: str) -> str:
    if "," in text or not (pattern_and_end := text.partition(":"))[0]:
        raise ValueError(f"{text!r} names no layer: write layer1 or, until then, layer1:3ep; several as a list")
    if pattern_and_end[1]:
        Duration.parse(pattern_and_end[2])
    return text


FrozenPart = Annotated[str, AfterValidator(_frozen_part)]


class _Common(Section):
    """The learning rate and the weight decay, which every optimizer has."""

    scaling: ClassVar[Literal["linear", "sqrt"]] = "linear"

    name: str
    lr: _Rate = Field(None, description="peak learning rate, whatever the batch")
    base_lr: _Rate = Field(None, description="peak learning rate for a global batch of 256")
    weight_decay: float = Field(0.0, ge=0)
    groups: tuple[GroupConfig, ...] = Field(
        (), description="parameters that are trained otherwise than the rest; the first whose pattern fits counts"
    )
    freeze: tuple[FrozenPart, ...] = Field(
        (),
        description="layers that are not trained, as conv1,layer? or trunk (all but the head); until then: trunk:3ep; "
        "their batch norm keeps its running statistics",
    )
    layer_decay: float | None = Field(
        None, gt=0, le=1, description="what the rate of a layer is multiplied by for each one between it and the head"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.lr is None) == (self.base_lr is None):
            number = "given" if self.lr is not None else "missing"
            rule = "batch/256" if self.scaling == "linear" else "the square root of batch/256"
            raise ValueError(
                f"optimizer.lr and optimizer.base_lr are both {number}: give one, lr as it is or base_lr to be "
                f"multiplied by {rule}"
            )
        for option, needs, words in _NEEDS:
            if getattr(self, option, False) and getattr(self, needs) == 0:
                raise ValueError(
                    f"optimizer.{option} would be ignored without {words}: set optimizer.{needs} or leave it out"
                )
        return self


# An option, and the number without which it does nothing.
_NEEDS = [("nesterov", "momentum", "momentum"), ("decay_norm_and_bias", "weight_decay", "weight decay")]


class _Decaying(_Common):
    decay_norm_and_bias: bool = Field(False, description="let biases and the scales of normalization layers decay too")


class _OfTorch(_Decaying):
    """Torch's own optimizers, which have fused kernels."""

    fused: bool | None = Field(
        None, description="one kernel for the update; null: on CPUs, if not reproducible, and on GPUs in bf16 and fp16"
    )


class SgdConfig(_OfTorch):
    """Stochastic gradient descent with momentum; the weight decay is added to the gradient (L2).

    The learning rate multiplies the momentum buffer, as in torch: when the rate changes, no momentum correction is
    needed (Goyal et al., 2017, remark 2).
    """

    name: Literal["sgd"]
    momentum: _Fraction = 0.9
    nesterov: bool = Field(False, description="Nesterov's momentum (Sutskever et al., 2013)")


class AdamWConfig(_OfTorch):
    """AdamW (Loshchilov and Hutter, 2019): the weights decay by themselves, by lr times weight_decay an update."""

    scaling: ClassVar[Literal["linear", "sqrt"]] = "sqrt"

    name: Literal["adamw"]
    betas: tuple[_Fraction, _Fraction] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0)


class LarsConfig(_Common):
    """LARS (You, Gitman and Ginsburg, 2017, algorithm 1): each weight tensor has a learning rate of its own.

    v ← momentum · v + λ · (g + weight_decay · w), w ← w − lr · v, with the trust ratio
    λ = trust_coefficient · ‖w‖ / (‖g‖ + weight_decay · ‖w‖). As with SGD, lr multiplies the momentum buffer. Biases and
    the scales of normalization layers (every parameter of one dimension) take plain SGD steps without decay, as in
    TensorFlow's LARSOptimizer, to which the first author contributed.
    """

    name: Literal["lars"]
    momentum: _Fraction = 0.9
    nesterov: bool = False
    trust_coefficient: float = Field(0.001, gt=0)
    decay_norm_and_bias: bool = Field(False, description="always false: see the optimizer")

    @model_validator(mode="after")
    def _refuse_ignored(self) -> Self:
        if self.decay_norm_and_bias:
            raise ValueError(
                "optimizer.decay_norm_and_bias cannot be true with lars, which never lets biases and the scales of "
                "normalization layers decay: leave it out"
            )
        return self


class LambConfig(_Decaying):
    """LAMB (You et al., 2020, algorithm 2, with φ(z) = z): Adam's direction, and a trust ratio for each weight tensor.

    r = m / (√v + eps) + weight_decay · w, w ← w − lr · (‖w‖ / (‖r‖ + eps)) · r. The moments are not corrected for their
    start at zero, as in version 3 of the paper: give it a warm-up. Biases and the scales of normalization layers take
    steps of r without decay and without the ratio, as in timm, unless `decay_norm_and_bias`.
    """

    scaling: ClassVar[Literal["linear", "sqrt"]] = "sqrt"

    name: Literal["lamb"]
    betas: tuple[_Fraction, _Fraction] = (0.9, 0.999)
    eps: float = Field(1e-6, gt=0)
    weight_decay: float = Field(0.01, ge=0)


OptimizerConfig = Annotated[SgdConfig | AdamWConfig | LarsConfig | LambConfig, Field(discriminator="name")]


def learning_rate(config: OptimizerConfig, batch: int) -> float:
    """The peak learning rate for a global batch.

    `lr` as it is; `base_lr` times batch/256 for SGD and LARS (Goyal et al., 2017, section 2.1), times the square root
    of that for AdamW and LAMB (timm's rule).
    """
    if config.lr is not None:
        return config.lr
    assert config.base_lr is not None
    return config.base_lr * rate_factor(config, batch / REFERENCE_BATCH)


def rate_factor(config: OptimizerConfig, ratio: float) -> float:
    """By how much the rate grows where the batch grows by a ratio."""
    return ratio if config.scaling == "linear" else math.sqrt(ratio)


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
