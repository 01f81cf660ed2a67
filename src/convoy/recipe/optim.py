"""The optimizer of a recipe: its options, which parameters decay, the learning rate for the size of the batch; and the
rate of every update: warm-up, then constant, in steps, half a cosine or a polynomial.

A schedule is a pure function of the update's number, so a run that resumes goes on with the same rates.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from convoy.errors import ConvoyError
from convoy.recipe.schema import Duration, PositiveDuration, Section
from convoy.terminal import did_you_mean

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


REFERENCE_BATCH = 256
# Keys of torch's groups: what the schedule's rate is multiplied by, and the update from which on it is 0.
LR_FACTOR, END = "lr_factor", "end"

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

    @model_serializer(mode="wrap")
    def _as_before_where_nothing_is_said(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        options: dict[str, Any] = serialize(self)
        return {key: value for key, value in options.items() if key != "fused" or value is not None}


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


def create_optimizer(model: "nn.Module", config: OptimizerConfig, lr: float, ends: Sequence[int] = ()) -> "Optimizer":
    """The optimizer for a model's trainable parameters; LARS and LAMB overwrite the gradients during a step. `ends` are
    the weight updates from which on those of `config.groups` are left as they are."""
    import torch  # which a mistake in a recipe is not to wait for

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConvoyError(f"the model {type(model).__name__} has no parameter that can be trained: choose another")
    groups = [group for group in _groups(model, config, ends) if group["params"]]
    # torch's fused kernels go through memory as it lies, and so beyond a weight that lies there with holes
    fused = getattr(config, "fused", None) and all(torch.empty_like(p).stride() == p.stride() for p in parameters)
    match config:
        case SgdConfig():
            optimizer: Any = torch.optim.SGD(
                groups, lr=lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused or None
            )
        case AdamWConfig():
            optimizer = torch.optim.AdamW(groups, lr=lr, betas=config.betas, eps=config.eps, fused=fused or None)
        case LarsConfig():
            from pytorch_optimizer import LARS  # the import takes most of a second

            ratio = config.trust_coefficient
            optimizer = LARS(groups, lr=lr, momentum=config.momentum, nesterov=config.nesterov, trust_coefficient=ratio)
        case LambConfig():
            from pytorch_optimizer import Lamb

            for group in groups:  # adam: the trust ratio is 1
                group["adam"] = not config.decay_norm_and_bias and all(p.ndim <= 1 for p in group["params"])
            # The decay belongs into r; the library's default is that of AdamW. A step is lr; its default is
            # lr / (1 - beta1^t), ten times that at first.
            optimizer = Lamb(groups, lr=lr, betas=config.betas, eps=config.eps, weight_decouple=False, adam_debias=True)
            optimizer.clamp = math.inf  # the library cuts ‖w‖ at 10, less than a large convolution has from the start
    if fused:
        optimizer.register_step_pre_hook(_make_ready)
    return cast("Optimizer", optimizer)


def _groups(model: "nn.Module", config: OptimizerConfig, ends: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Torch's groups of parameters, some of them empty."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    scales: Mapping[str, float] = {}
    if config.layer_decay is not None:
        from convoy.recipe.fine_tuning import layer_scales

        scales = layer_scales(model, config.layer_decay)
    for number, (group, members) in enumerate(_members(named, config)):
        options: dict[str, Any] = {END: ends[number] if ends else sys.maxsize}
        if group.weight_decay is not None:
            options["weight_decay"] = group.weight_decay
        for alike in _alike(members, scales, config):
            yield alike | options | {LR_FACTOR: alike[LR_FACTOR] * group.lr_factor}
    yield from _alike(named, scales, config)


def _members(
    named: "dict[str, nn.Parameter]", config: OptimizerConfig
) -> "Iterator[tuple[GroupConfig, dict[str, nn.Parameter]]]":
    """The parameters of each group, taken out of those that have no group yet: the first pattern that fits counts."""
    for group in config.groups:
        yield group, {name: named.pop(name) for name in list(named) if fnmatchcase(name, group.parameters)}


def _alike(
    named: "dict[str, nn.Parameter]", scales: Mapping[str, float], config: OptimizerConfig
) -> Iterator[dict[str, Any]]:
    """Torch's groups of some parameters, by what the rate of their layers is multiplied by, and by what decays."""
    for scale in dict.fromkeys(scales.get(name, 1.0) for name in named) or (1.0,):
        parameters = [parameter for name, parameter in named.items() if scales.get(name, 1.0) == scale]
        # A bias or the scale or shift of a normalization layer is a parameter with at most one dimension.
        matrices, vectors = ([p for p in parameters if (p.ndim > 1) == wide] for wide in (True, False))
        by_decay = [(matrices, config.weight_decay), (vectors, 0.0)]
        if config.decay_norm_and_bias:
            by_decay = [(parameters, config.weight_decay)]
        for members, decay in by_decay:
            yield {"params": members, "weight_decay": decay, LR_FACTOR: scale}


def set_rates(optimizer: "Optimizer", rate: float, update: int) -> None:
    """Let all parameters have the schedule's rate in a weight update, but for those of groups of their own. The
    gradients of groups that have ended count nowhere."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(LR_FACTOR, 1.0)
        if update >= group.get(END, sys.maxsize):
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = None


def check_groups(model: "nn.Module", config: OptimizerConfig) -> None:
    """Let nothing train what a group says is never trained; a ConvoyError where a group has no parameter."""
    named = dict(model.named_parameters())
    for group, members in _members(named, config):
        if not members:
            names = [name for name, _ in model.named_parameters()]
            near = did_you_mean(group.parameters, names, otherwise=f"there are {', '.join(names[:4])}, …")
            raise ConvoyError(
                f"optimizer.groups: {group.parameters!r} is the name of no parameter that is left of the network{near}"
            )
        if group.lr_factor == 0:
            for parameter in members.values():
                parameter.requires_grad_(False)
        elif not any(parameter.requires_grad for parameter in members.values()):
            raise ConvoyError(
                f"optimizer.groups: the network does not train {group.parameters!r}: leave that group out, or set its "
                "lr_factor to 0"
            )


def _make_ready(optimizer: "Optimizer", *_: Any) -> None:
    """Give gradients and state the strides of their weights, and momentum to weights whose first gradient comes late.
    On a CPU, where torch's fused kernels go through memory as it lies, other strides, as of a state that was loaded,
    give wrong weights without a word; and they take no weights with and without momentum together (torch 2.13)."""
    import torch

    for group, parameter in ((g, p) for g in optimizer.param_groups for p in g["params"] if p.grad is not None):
        if parameter.grad.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
        state = optimizer.state[parameter]
        if group.get("momentum") and state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter).copy_(value)


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
