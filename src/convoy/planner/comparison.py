"""Predicted beside measured: two timelines of an update side by side, by its parts and by groups of its layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, field, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator
from pydantic.dataclasses import dataclass

from convoy.files import finite
from convoy.plans.place import Placement
from convoy.plans.timeline import PARTS, LayerSeconds, Summary
from convoy.plans.traffic import gradient_traffic
from convoy.units import seconds, table

MOST = 20  # groups that still fit into a table
GRADIENTS = "gradients of all layers"
Seconds = Annotated[Annotated[float, Field(ge=0)] | None, BeforeValidator(finite)]  # None where there is nothing


@dataclass(frozen=True)
class Both:
    """Seconds of something, predicted and measured."""

    predicted_s: Seconds = None
    measured_s: Seconds = None

    @property
    def longest(self) -> float:
        return max(self.predicted_s or 0.0, self.measured_s or 0.0)

    @property
    def error(self) -> float | None:
        """By which part of the measured time the predicted one is longer; None where one of them is not known."""
        return None if self.predicted_s is None or not self.measured_s else self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Group:
    """Layers that stand together."""

    name: str  # of the module, or `GRADIENTS` for what is exchanged when all layers are done
    computes: Both  # forward, backward and packing
    waits: Both  # exchanging what layers need of other ranks
    stages: tuple[int, ...] = ()  # that run them, from 1; empty for a network in one piece

    @property
    def title(self) -> str:
        numbers = ", ".join(map(str, self.stages))
        return f"{self.name} (stage{'s'[: len(self.stages) > 1]} {numbers})" if numbers else self.name


@dataclass(frozen=True)
class Comparison:
    """An update as it was predicted and as it was measured, which `prediction.json` keeps; seconds of one rank."""

    model: str = ""
    plan: str = ""
    devices: int = 1
    batch: int = 0  # samples of an update
    rank: int = 0  # whose seconds they are: the one that is predicted to compute longest
    timed: int = 0  # updates of which `update` is the median, without evaluations and checkpoints
    watched: int = 0  # updates of which `parts` are medians
    learned: int = 0  # operations whose times the profile store has taken over
    update: Both = Both()
    parts: Mapping[str, Both] = field(default_factory=dict)  # by name, as in `convoy.plans.timeline.PARTS`
    groups: tuple[Group, ...] = ()  # in the order of the network; empty where layers were not watched
    # of the rank of each that computes longest; empty without stages, or where they were not watched
    stages: tuple[Group, ...] = ()
    notes: tuple[str, ...] = ()  # sentences on what is missing
    one_device_s: Seconds = None  # an update on one device, as predicted; None where one runs
    version: Literal[1] = 1

    @field_validator("parts", mode="before")
    @classmethod
    def _older_spelling(cls, parts: object) -> object:
        return {_OLDER.get(name, name): part for name, part in parts.items()} if isinstance(parts, dict) else parts

    @property
    def error(self) -> float | None:
        return self.update.error

    def to_document(self) -> dict[str, Any]:
        return asdict(self)


_OLDER = {"optimiser": "optimizer"}


def _beside(before: Summary | None, after: Summary | None, read: Callable[[Summary], float | None]) -> Both:
    return Both(*(None if summary is None else read(summary) for summary in (before, after)))


def parts_beside(before: Summary | None, after: Summary | None) -> dict[str, Both]:
    """The parts of an update, predicted and measured."""
    both = [summary.parts if summary is not None else {} for summary in (before, after)]
    names = [part for part in PARTS if part != "stages" or any(part in parts for parts in both)]
    return {name: Both(*(parts.get(name) for parts in both)) for name in names}


def of_all_stages(summaries: Sequence[Summary]) -> Summary | None:
    """The first of some summaries, with the layers that other ranks run; None of none."""
    layers = {name: seconds_of for summary in reversed(summaries) for name, seconds_of in summary.layers.items()}
    return replace(summaries[0], layers=layers) if summaries else None


def layer_groups(placement: Placement) -> dict[str, list[str]]:
    """The layers of every group, in the order of the network. Layers are together that are in the same module, of the
    deepest level at which there are at most `MOST`; layers without parameters belong to what comes before them. Where
    even the outermost modules are too many, they are not put together any further."""
    has_parameters: dict[str, bool] = {}
    for call in (placed.call for placed in placement.calls):
        is_parametric = any(placement.graph.values[name].origin == "parameter" for name in call.inputs)
        has_parameters[call.layer] = has_parameters.get(call.layer, False) or is_parametric
    groups: dict[str, list[str]] = {}
    for depth in range(max((layer.count(".") + 1 for layer in has_parameters), default=1), 0, -1):
        modules = {layer: ".".join(layer.split(".")[:depth]) for layer in has_parameters}
        heavy = {modules[layer] for layer, is_heavy in has_parameters.items() if is_heavy}
        groups, group = {}, ""
        for layer, module in modules.items():
            group = module if module in heavy or not group else group
            groups.setdefault(group, []).append(layer)
        if len(groups) <= MOST:
            break
    return groups


def groups_beside(
    placement: Placement, before: Summary | None, after: Summary | None, stages: Sequence[int] = ()
) -> tuple[Group, ...]:
    """The layers in groups, and what gradients of all of them take; without what nobody knows. `before` was predicted,
    `after` measured. `stages` are those of the calls, from 0; empty for a network in one piece."""
    if after is None or not after.layers:
        return ()
    run_by: dict[str, int] = {}
    for placed, stage in zip(placement.calls if stages else (), stages, strict=True):
        run_by.setdefault(placed.call.layer, stage)

    def of_layers(summary: Summary) -> LayerSeconds:
        return sum((summary.layers.get(name, LayerSeconds()) for name in layers), LayerSeconds())

    groups = []
    for name, layers in layer_groups(placement).items():
        computes = _beside(before, after, lambda summary: of_layers(summary).computes)
        waits = _beside(before, after, lambda summary: of_layers(summary).waits)
        numbers = tuple(sorted({run_by[layer] + 1 for layer in layers if layer in run_by}))
        groups.append(Group(name or "the network itself", computes, waits, numbers))
    if not run_by or any(map(any, gradient_traffic(placement).values())):
        waits = _beside(before, after, lambda summary: summary.gradients)
        groups.append(Group(GRADIENTS, _beside(before, after, lambda _: 0.0), waits))
    return tuple(groups)


def stages_beside(before: Sequence[Summary], after: Sequence[Summary]) -> tuple[Group, ...]:
    """What a rank of each stage computes, and waits for the others."""

    def computes(summary: Summary) -> float:
        return sum(summary.parts.get(part, 0.0) for part in ("forward", "backward", "packing"))

    rows = []
    for number, measured in enumerate(after):
        pair = before[number] if before else None, measured
        waits = _beside(*pair, lambda summary: summary.parts.get("stages", 0.0))
        rows.append(Group(f"stage {number + 1}", _beside(*pair, computes), waits, (number + 1,)))
    return tuple(rows)


# The parts of an update for people
WORDS = {
    "input": "input",
    "forward": "forward",
    "backward": "backward",
    "rest": "loss and all else",
    "packing": "packing for messages",
    "waiting": "exposed communication",
    "stages": "waiting for other stages",
    "optimizer": "optimizer",
}
_ALIKE = 0.02


def headline(comparison: Comparison) -> str:
    """The whole update in a sentence; empty where it was not measured."""
    predicted, measured = comparison.update.predicted_s, comparison.update.measured_s
    if measured is None:
        return ""
    sentence = f"an update took {seconds(measured)}, the median of {comparison.timed}"
    if comparison.error is None or predicted is None:
        return sentence
    shared = ", without the other processes here" if any("other processes" in note for note in comparison.notes) else ""
    return f"{sentence}; {seconds(predicted)} were predicted{shared} ({difference(comparison.error)})"


def difference(error: float) -> str:
    """By how much a prediction is off: `+3.2 %`."""
    return f"{100 * error:+.1f} %" if abs(error) < 0.0995 else f"{100 * error:+.0f} %"


def apart(parts_s: float, update_s: float | None) -> str:
    """Why the parts of an update add up to another time than an update takes; empty where they do not."""
    if update_s is None or abs(parts_s / update_s - 1) < _ALIKE:
        return ""
    return ", as watching takes time too" if parts_s > update_s else ", as no two updates are alike"


def shown(number: float | None) -> str:
    """Seconds, empty where there are none."""
    return "" if number is None else seconds(number)


def comparison_text(comparison: Comparison) -> str:
    """The whole update, its parts and its layers, as aligned tables; no more than sentences where there is little."""
    lines = list(filter(None, [headline(comparison)]))
    measured: tuple[str, ...] = (
        ("predicted", "measured") if comparison.update.predicted_s is not None else ("measured",)
    )

    def cells(*pairs: Both) -> list[str]:
        numbers = [number for pair in pairs for number in (pair.predicted_s, pair.measured_s)[-len(measured) :]]
        return list(map(shown, numbers))

    if comparison.watched:
        rows = [(WORDS[name], *cells(pair)) for name, pair in comparison.parts.items() if pair.longest]
        lines += table(("time", *measured), rows, measured)
        total = sum(pair.measured_s or 0.0 for pair in comparison.parts.values())
        updates = "1 other update" if comparison.watched == 1 else f"{comparison.watched} other updates"
        why = apart(total, comparison.update.measured_s)
        lines.append(f"measured: each part the median of {updates}; they add up to {seconds(total)}{why}")
    if comparison.watched and comparison.groups:
        names = ["computes", "waits"]
        if len(measured) > 1:
            names = ["computes: predicted", "measured", "waits: predicted", "measured"]
        rows = [(group.title, *cells(group.computes, group.waits)) for group in comparison.groups]
        lines += ["", *table(("layer", *names), rows, names)]
    return "\n".join([*lines, *comparison.notes])
