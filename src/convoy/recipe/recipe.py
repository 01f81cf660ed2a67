"""A recipe: everything that defines a run, whatever it runs on. Which options mean nothing together."""

import json
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from convoy import own
from convoy.data.config import DataConfig
from convoy.documents import DEEPEST, dump, parse, read_mapping, show
from convoy.errors import ConvoyError
from convoy.files import existing, expanded
from convoy.models.registry import check_name
from convoy.recipe.optim import CosineConfig, OptimizerConfig, ScheduleConfig, SgdConfig, StepConfig
from convoy.recipe.parallel_config import ParallelConfig
from convoy.recipe.schema import (
    AbsoluteDuration,
    Duration,
    PositiveDuration,
    Section,
    TimeSpan,
    fields_of,
    is_text,
    seconds_of,
    sentence,
)
from convoy.run.trackers import check_trackers
from convoy.terminal import brief, did_you_mean

DEFAULT_MICROBATCH = 32
_BUILT_IN = resources.files("convoy.recipe") / "recipes"
_FROM_THE_DATA = ("num_classes", "in_channels")


class ModelConfig(Section):
    """The network."""

    name: str = Field(
        min_length=1, description="a name of `convoy models`, timm:NAME, torchvision:NAME, mine.py:net or package:net"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="options of that network")
    weights: str | None = Field(
        None,
        min_length=1,
        description="begin with these weights: .safetensors, .pth, a run, torchvision:NAME or timm:NAME",
    )
    whiten: int | None = Field(
        None,
        ge=1,
        description="let the first convolution whiten its patches of so many training pictures, and keep its weights",
    )
    zero_init_residual: bool = Field(
        False, description="let every residual block begin as the identity (Goyal et al., 2017, section 5.1)"
    )

    @model_validator(mode="after")
    def _options_of_others(self) -> Self:
        for key in _FROM_THE_DATA:
            if key in self.options:
                raise ValueError(f"model.options.{key} follows from the data: leave it out")
        if "zero_init_residual" in self.options:
            raise ValueError("model.options.zero_init_residual is spelt model.zero_init_residual: set that")
        return self


class LossConfig(Section):
    """The loss; that of an evaluation is the task's usual one: cross-entropy, bce or mse."""

    name: Literal["cross-entropy", "bce", "mse", "mae", "dice", "cross-entropy+dice"] = Field(
        "cross-entropy", description="cross-entropy, or in its place bce of multi-label data, mse of regression"
    )
    threshold: float = Field(
        0.5, gt=0, lt=1, description="probability from which a label of multi-label data counts as there"
    )
    target_threshold: float | None = Field(
        None, ge=0, lt=1, description="with bce: targets above become 1, others 0, after mixup and CutMix"
    )
    function: str | None = Field(
        None, min_length=1, description="your own: mine.py:focal, of outputs and targets, a number for each sample"
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Szegedy et al., 2016, section 7")
    class_weights: Literal["balanced", "effective"] | dict[str, Annotated[float, Field(ge=0)]] | None = Field(
        None,
        description="weights of classes: balanced (1/samples), effective (Cui et al., 2019), or numbers, others 1; "
        "their mean over the training samples becomes 1",
    )
    aux_weight: float = Field(0.3, ge=0, description="weight of auxiliary heads (Szegedy et al., 2015, section 5)")

    @model_validator(mode="after")
    def _refuse_ignored(self) -> Self:
        if self.target_threshold is not None and self.name != "bce":
            raise ValueError("loss.target_threshold would be ignored with cross-entropy: set loss.name=bce")
        others = {"name": "cross-entropy", "label_smoothing": 0, "class_weights": None}
        for key, default in others.items() if self.function is not None else ():
            if getattr(self, key) != default:
                raise ValueError(f"loss.{key} would be ignored with loss.function={self.function}: leave one out")
        return self


class CheckpointConfig(Section):
    """When the state is saved, and what to do where that fails."""

    every: PositiveDuration | Literal["auto"] = Field(
        "auto", description="e.g. 1ep or 500ba; auto follows from the measured cost of a checkpoint and mtbf"
    )
    # Pessimistic for eight devices in a rack, about right for rented ones; Young's formula forgives: four times as long
    # doubles the interval. What a user knows is how often something fails, so `every` is no number of epochs.
    mtbf: TimeSpan = Field(
        "6h", description="mean time between failures of the run that auto reckons with, e.g. 30min or 2d"
    )
    keep: int = Field(3, ge=1, description="how many of the last are kept, beside the best")
    # A run that trains for days on a full disk loses days, one that stops the minutes since the newest checkpoint.
    on_error: Literal["stop", "continue"] = Field(
        "stop", description="what the run does when a checkpoint cannot be written, e.g. on a full disk"
    )

    @property
    def mtbf_s(self) -> float:
        return seconds_of(self.mtbf)


class EmaConfig(Section):
    """The `ema` section of a recipe; left out, no average is kept."""

    decay: float = Field(gt=0, lt=1, description="what remains of the average at each weight update, e.g. 0.999")


class LookaheadConfig(Section):
    """The `lookahead` section of a recipe (Zhang et al., 2019); left out, there are no slow weights."""

    every: int = Field(5, ge=1, description="weight updates from one step of the slow weights to the next")
    step: float = Field(0.5, gt=0, le=1, description="part of the way to the trained weights that a step goes")
    power: float = Field(0.0, ge=0, description="power of t/T by which that part falls from 1; 0: it is `step` always")


class Recipe(Section):
    """A whole run.

    `microbatch` (samples) and `microbatches` (how many) say the same thing in two ways: one of them is None.
    """

    model: ModelConfig
    data: DataConfig = Field(default_factory=DataConfig)
    epochs: AbsoluteDuration = Field(Duration(90, "ep"), description="how long: 90, 90ep or 5000ba (updates)")
    target: float | None = Field(
        None, gt=0, le=1, description="end at the first evaluation with this share of right test answers, e.g. 0.97"
    )
    extends: str | None = Field(
        None, min_length=1, description="finished run with whose state this one begins: convoy train RUN --extend"
    )
    extends_at: int | None = Field(
        None, ge=1, description="begin after so many updates of that run, also with another batch: convoy branch"
    )
    # On small data too: one that followed the data would hold too few microbatches for several devices.
    batch: int = Field(128, ge=1, description="global batch: samples of one weight update; on all devices together")
    microbatches: int | None = Field(
        None, ge=1, description=f"pieces of the global batch; not said: of {DEFAULT_MICROBATCH} samples"
    )
    microbatch: int | None = Field(
        default_factory=lambda values: None if values.get("microbatches") else DEFAULT_MICROBATCH,
        ge=1,
        description=f"samples of a microbatch, at most ({DEFAULT_MICROBATCH} if neither is said)",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="seed of everything random")
    task: Literal["auto", "classification", "multi-label", "regression", "segmentation"] = Field(
        "auto", description="classification, multi-label, regression or segmentation; not said: by the labels"
    )
    optimizer: OptimizerConfig = SgdConfig(name="sgd", base_lr=0.1, nesterov=True, weight_decay=1e-4)
    schedule: ScheduleConfig = CosineConfig(name="cosine", warmup=Duration(5, "%"))
    loss: LossConfig = LossConfig()
    metrics: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="further metrics, your own: mine.py:kappa, of all outputs and targets of an evaluation"
    )
    ema: EmaConfig | None = Field(None, description="evaluate and deliver an average of the weights")
    lookahead: LookaheadConfig | None = Field(None, description="train on from slow weights, and deliver them")
    clip_norm: float | None = Field(None, gt=0, description="largest norm of the whole gradient")
    on_nan: Literal["stop", "skip"] = Field(
        "stop", description="an update whose loss or gradient is not finite: end the run, or leave the update out"
    )
    batch_norm: Literal["microbatch", "sync", "local"] = Field(
        "microbatch", description="statistics over: microbatch, sync (global batch) or local; local: a device's samples"
    )
    precision: Literal["fp32", "bf16", "fp16", "auto"] | None = Field(
        None,
        description="fp32, bf16, fp16, or auto: bf16 where the device has it; of the layers: weights stay in fp32; "
        "not said: the same on GPUs, else fp32",
    )
    channels_last: bool | None = Field(
        None, description="memory format of the network; null: channels last on GPUs in bf16 and fp16"
    )
    compile: bool = Field(False, description="compile the network with torch.compile")
    cuda_graphs: Annotated[
        Literal["auto", "off"], BeforeValidator(lambda value: "off" if value is False else value)
    ] = Field(
        "auto", description="updates recorded once and replayed on GPUs: auto or off; where that gives the same results"
    )
    recompute: bool | tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        False,
        description="less memory: compute activations again in the backward pass, all or those of layers, as "
        "'layer1.*'; the same results",
    )
    reproducible: bool = Field(False, description="bit-identical weights on any number of devices")
    threads: Annotated[int, Field(ge=1)] | None = Field(None, description="of each device's process on CPU")
    parallel: ParallelConfig = ParallelConfig()
    noise_scale: bool = Field(
        True, description="measure the gradient noise scale, in at most 1 % of the time (McCandlish et al., 2018)"
    )
    evaluate_every: PositiveDuration = Duration(1, "ep")
    evaluation_views: Literal[1, 2, 6] = Field(
        1,
        description="views of a picture whose logits are averaged: 2 with its mirror image, 6 with both moved by a "
        "pixel to the upper left and to the lower right, which count half",
    )
    best: str | None = Field(
        None,
        min_length=1,
        description="deliver the weights that are best in this metric of the evaluations; not said: the last",
    )
    stop_after: PositiveDuration | None = Field(
        None, description="end, with the best weights, after so long without a better evaluation, e.g. 10ep"
    )
    checkpoint: CheckpointConfig = CheckpointConfig()
    log_every: PositiveDuration | Literal["auto"] = Field(
        "auto", description="a line of metrics; auto: every 20 updates, or more often, so that short runs have 50"
    )
    log: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = Field(
        ("tensorboard",), description="trackers that are told of the metrics, beside TensorBoard's files in the run"
    )

    @model_validator(mode="after")
    def _refuse_nonsense(self) -> Self:
        for problem in self._contradictions():
            raise ValueError(problem)
        return self

    def _contradictions(self) -> Iterator[str]:
        """A sentence for each two keys that mean nothing together."""
        parallel, schedule = self.parallel, self.schedule
        if (self.microbatch is None) == (self.microbatches is None):
            values = "null" if self.microbatch is None else "given, but one follows from the other"
            yield f"microbatch and microbatches are both {values}: give one"
        if self.microbatches is not None and self.microbatches > self.batch:
            yield (
                f"microbatches={self.microbatches} cannot be made of batch={self.batch} samples: lower microbatches "
                "or raise batch"
            )
        if self.data.repeats > self.batch:
            yield f"data.repeats={self.data.repeats} views make no batch={self.batch}: lower that or raise batch"
        if self.reproducible and self.batch_norm != "microbatch" and self.microbatches != 1:
            yield (
                f"reproducible runs each microbatch by itself, but batch_norm={self.batch_norm} needs the whole batch "
                "at once: set batch_norm=microbatch, or microbatches=1"
            )
        if self.reproducible and self.precision == "auto":
            yield (
                "reproducible gives the same weights wherever it runs, but precision=auto asks the device: set "
                "precision=fp32 or precision=bf16"
            )
        if self.reproducible and parallel.schedule == "zero-bubble":
            yield (
                "the schedule zero-bubble adds up weight gradients of several passes at once, which reproducible "
                "cannot: choose the schedule 1f1b, or leave reproducible away"
            )
        if self.reproducible and parallel.approximate is not None:
            promise = "reproducible gives the same weights on any number of devices"
            yield f"{promise}, but {parallel.approximate}: leave one of them out"
        if self.data.sampling is not None and isinstance(self.loss.class_weights, str):
            yield f"data.sampling and loss.class_weights={self.loss.class_weights} correct the same twice: give one"
        if self.model.whiten is not None and self.model.weights is not None:
            yield "model.whiten would replace the first layer of model.weights: give one, or model.whiten=null"
        if self.ema is not None and self.lookahead is not None:
            yield "ema and lookahead would both say which weights are delivered: give one"
        for key in ("ema", "lookahead"):
            if getattr(self, key) is not None and parallel.local_sgd is not None:
                yield f"{key} needs the weights of all updates, but local_sgd lets each device have others: give one"
        if parallel.approximate is not None and any(":" in part for part in self.optimizer.freeze):
            yield f"layers cannot thaw (optimizer.freeze) while {parallel.approximate}: leave one of them out"
        if self.precision == "fp16" and parallel.gradient_compression is not None and parallel.local_sgd is None:
            yield (
                "precision=fp16 scales gradients now more and now less, which what gradient_compression keeps for "
                "later cannot follow: set precision=bf16"
            )
        for key, value in (("on_nan", "skip"), ("batch_norm", "sync"), ("precision", "fp16")):
            if parallel.averaging.staleness and getattr(self, key) == value:
                yield (
                    f"{key}={value} asks all devices in every update, and parallel.averaging.staleness lets them go on "
                    f"without: leave one of them out"
                )
        if schedule.warmup_from == "base_lr" and self.optimizer.base_lr is None:
            yield (
                "schedule.warmup_from=base_lr needs optimizer.base_lr: give that instead of optimizer.lr, or a number "
                "to start from"
            )
        if schedule.warmup.longer_than(self.epochs):
            yield (
                f"schedule.warmup={schedule.warmup} is longer than the training, epochs={self.epochs}: train longer or "
                "shorten the warm-up, e.g. --set schedule.warmup=5%"
            )

    def own_code(self) -> dict[str, str]:
        """The names of the user's functions beside the network, by what they are."""
        loss, augment = self.loss.function, self.data.augment.function
        functions = {"loss.function": loss, "data.augment.function": augment}
        functions |= {"metrics" + f".{n}" * (n > 0): name for n, name in enumerate(self.metrics)}
        return {key: name for key, name in functions.items() if name is not None}

    @property
    def trackers(self) -> list[str]:
        """Those beside TensorBoard."""
        return [name for name in dict.fromkeys(self.log) if name != "tensorboard"]

    @property
    def selects(self) -> bool:
        """Whether something is chosen by evaluations."""
        return self.best is not None or self.stop_after is not None

    def notes(self) -> Iterator[str]:
        """A sentence for each option that has no effect here and does no harm."""
        length = f"the training, epochs={self.epochs}"
        if self.model.zero_init_residual and self.model.weights is not None:
            yield "model.zero_init_residual has no effect: model.weights replaces the fresh weights"
        milestones = self.schedule.milestones if isinstance(self.schedule, StepConfig) else ()
        if late := [str(milestone) for milestone in milestones if milestone.longer_than(self.epochs)]:
            yield f"schedule.milestones {', '.join(late)} lie beyond the end of {length}"
        growth = self.data.progressive
        if growth is not None and Duration(growth.end, "ep").longer_than(self.epochs):
            yield f"data.progressive.end={growth.end:g} lies beyond {length}: pictures do not grow to their whole size"
        if self.microbatch is not None and self.microbatch > max(self.batch, DEFAULT_MICROBATCH):
            yield f"microbatch={self.microbatch} is more than batch={self.batch}: there is one microbatch"
        for key, every in (("evaluate_every", self.evaluate_every), ("checkpoint.every", self.checkpoint.every)):
            if isinstance(every, Duration) and every.longer_than(self.epochs):
                yield f"{key}={every} is longer than {length}: once, at the end"
        if self.stop_after is not None and self.stop_after.longer_than(self.epochs):
            yield f"stop_after={self.stop_after} has no effect: it is longer than {length}"
        for part, _, end in (part.partition(":") for part in self.optimizer.freeze):
            if end and Duration.parse(end).longer_than(self.epochs):
                yield f"optimizer.freeze={part}:{end} is longer than {length}: {part} is never trained"
        if (sentence := self.mixing_without_partners()) is not None:
            yield sentence
        if self.checkpoint.every != "auto" and self.checkpoint.mtbf != CheckpointConfig().mtbf:
            yield f"checkpoint.mtbf has no effect: checkpoint.every={self.checkpoint.every} says when"

    def mixing_without_partners(self) -> str | None:
        """What to say where samples are to be mixed with others of their microbatch, of which there are none."""
        number = self.microbatches or -(-self.batch // (self.microbatch or 1))
        if not self.data.mix.on or number < self.batch:
            return None
        on = [f"data.mix.{key}" for key in ("mixup", "cutmix") if getattr(self.data.mix, key)]
        return (
            f"{' and '.join(on)} {'have' if len(on) > 1 else 'has'} no effect: a microbatch of one sample has no other "
            "to mix it with; make microbatches larger, e.g. microbatch=32, or leave that out"
        )


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe as YAML, every default written out; `load_recipe` reads it back as an equal recipe."""
    return dump(recipe.model_dump(mode="json"))


def recipe_names() -> list[str]:
    """The built-in recipes."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _BUILT_IN.iterdir() if entry.name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """A built-in recipe as its file says it, with the sources in comments; a ConvoyError where there is no such
    recipe.
    """
    names = recipe_names()
    if name not in names:
        hint = did_you_mean(name, names, otherwise=f"there are {', '.join(names)}, or name a YAML file")
        raise ConvoyError(f"there is no recipe {brief(name)}{hint}")
    return (_BUILT_IN / f"{name}.yaml").read_text(encoding="utf-8")


def recipe_summary(name: str) -> str:
    """What a built-in recipe is for, in one line."""
    return recipe_text(name).partition("\n")[0].removeprefix("# ")


def load_recipe(name_or_path: str, overrides: Sequence[str] = (), notes: list[str] | None = None) -> Recipe:
    """Read a recipe, a built-in one or a YAML file such as a run's config.yaml, change it, check it; what it leaves out
    has `Recipe`'s defaults. A ConvoyError where there is no such recipe, or something in it is wrong.

    The overrides are `key.sub=value` texts; the values are YAML. A new `optimizer.lr` takes the place of `base_lr`, and
    a new `optimizer.name` that of the whole section; of a schedule the warm-up stays. `notes` takes up a sentence for
    each group of the recipe's options that an override puts out of force.
    """
    document = _read(name_or_path)
    changes = _changes(overrides)
    for section in ("optimizer", "schedule"):
        document.setdefault(section, Recipe.model_fields[section].default.model_dump(mode="json"))
    if isinstance(document.get("model"), str):  # the short form
        document["model"] = {"name": document["model"]}
    sentences = _change(document, changes)
    if not isinstance(document.get("data", {}), dict) or "path" not in document.get("data", {}):
        raise ConvoyError("data.path is missing: name the data with --data, a file or folder or mnist-mini")
    try:
        recipe = Recipe.model_validate_json(json.dumps(document, default=str), strict=True)  # strict: "1" is no number
    except ValidationError as error:
        raise ConvoyError(sentence(error, Recipe)) from error
    if any(key.startswith("data.mix") for key in changes) and (problem := recipe.mixing_without_partners()):
        raise ConvoyError(problem)
    if notes is not None:
        notes += sentences
    return recipe


# An override says something about the keys it does not name, too: a new `optimizer.lr` takes the place of a recipe's
# `base_lr`, and a new `optimizer.name` makes the numbers that were tuned for the old one meaningless.
_ALTERNATIVES = [("optimizer.lr", "optimizer.base_lr"), ("microbatch", "microbatches")]
_KEPT = {"optimizer": (), "schedule": ("warmup", "warmup_from")}


def _changes(texts: Sequence[str]) -> dict[str, Any]:
    """`key.sub=value` texts as dotted keys and values. A value that is free text, such as a path, is taken as it
    stands, unless it is in quotes; every other value is read as YAML.
    """
    annotations = {key: field.annotation for key, _, field in fields_of(Recipe)}
    overrides: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")) or key.count(".") > DEEPEST:
            raise ConvoyError(f"{brief(text)!r} is not of the form key=value: write for example optimizer.lr=0.4")
        raw = is_text(annotations.get(key)) and value not in ("", "null") and value[:1] not in ("'", '"')
        read = value if raw else parse(value, f"the value of {brief(key)}")
        if key in overrides and overrides[key] != read:
            raise ConvoyError(f"{brief(key)} is set twice, to {show(overrides[key])} and to {show(read)}: set it once")
        overrides[key] = read
    return overrides


def _change(document: dict[str, Any], overrides: dict[str, Any]) -> list[str]:
    """Change a recipe's document in place, and give a sentence for each group of options that no longer apply."""
    notes = []
    for section, kept in _KEPT.items():
        new = overrides.get(f"{section}.name")
        old = document.get(section)
        if new is not None and isinstance(old, dict) and old.get("name") not in (None, new):
            dropped = [key for key in old if key not in (*kept, "name") and f"{section}.{key}" not in overrides]
            document[section] = {key: value for key, value in old.items() if key in kept}
            if dropped:
                what = ", ".join(f"{key}={show(old[key])}" for key in dropped)
                notes.append(f"{section}.name={new} takes the place of {old['name']}: {what} no longer apply")
    for key in sorted(overrides, key=lambda key: key.count(".")):  # a whole section first, then its keys
        _put(document, key.split("."), overrides[key])
    for pair in _ALTERNATIVES:
        for key, other in (pair, pair[::-1]):
            if overrides.get(key) is not None and other not in overrides:
                _put(document, other.split("."), None)
    return notes


def _put(document: Any, keys: Sequence[str], value: Any) -> None:
    for depth, key in enumerate(keys[:-1], 1):
        if document.get(key) is None:
            document[key] = {}
        document = document[key]
        if not isinstance(document, dict):
            path = ".".join(keys[:depth])
            raise ConvoyError(f"{brief('.'.join(keys))} cannot be set: {path} is {show(document)}, not a section")
    document[keys[-1]] = value


def check_names(recipe: Recipe) -> None:
    """Refuse a network, file of weights, or data set that is not there, as far as that is seen without torch."""
    check_name(recipe.model.name)
    weights = recipe.model.weights
    if weights is not None and weights.startswith(("torchvision:", "timm:")):
        check_name(weights)
    elif weights is not None and not expanded(weights).exists():
        raise ConvoyError(f"weights file {recipe.model.weights} does not exist: check the path")
    if (loss := recipe.loss.function) in get_args(LossConfig.model_fields["name"].annotation):
        raise ConvoyError(f"loss {loss!r} names no function: for the built-in one: --set loss.name={loss}")
    for key, name in recipe.own_code().items():
        own.check_name(name, {"loss": "loss", "data": "augment"}.get(key.partition(".")[0], "metric"))
    existing(recipe.data.path)
    if recipe.trackers:
        check_trackers(recipe.trackers)


def _read(name_or_path: str) -> dict[str, Any]:
    path = expanded(name_or_path)
    is_path = path.suffix in (".yaml", ".yml") or len(path.parts) > 1 or path.exists()
    if is_path and name_or_path not in recipe_names():
        return read_mapping(path, "recipe")
    document = parse(recipe_text(name_or_path), f"{name_or_path}.yaml")
    assert isinstance(document, dict)
    return document
