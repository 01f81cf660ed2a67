"""Predicted beside measured: an update of a run, its parts, and its layers in groups."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from convoy.planning.groups import layer_groups
from convoy.planning.observed import PARTS, LayerSeconds, Observed
from convoy.planning.planner import Scored
from convoy.plans.place import Placement

VERSION = 1
"""Of `prediction.json`."""
GRADIENTS = "gradients of all layers"
_KINDS = {"forward": "forward", "backward": "backward", "copy": "packing", "update": "optimiser"}


@dataclass(frozen=True)
class Both:
    """Seconds; None where there is nothing."""

    predicted_s: float | None
    measured_s: float | None


@dataclass(frozen=True)
class Group:
    """Layers that stand together.

    Attributes:
        name: of the module; `GRADIENTS` for what is exchanged when all layers are done.
        computes: forward, backward and packing.
        waits: exchanging what layers need of others.
    """

    name: str
    computes: Both
    waits: Both


@dataclass(frozen=True)
class Comparison:
    """An update as it was predicted and as it was measured; seconds are those of one rank.

    Attributes:
        batch: samples of an update.
        rank: whose seconds they are: of the prediction's, the one that computes longest.
        update: the whole; measured, the median of `timed` updates, without evaluations and checkpoints.
        parts: by name, as `convoy.planning.observed.PARTS` has them; measured, the medians of `watched` updates.
        groups: in the order of the network; empty where its layers were not watched.
        learned: pieces whose times the profile store has taken over.
        notes: sentences on what there is not.
        one_device_s: seconds of an update on one device, as predicted; None where nothing was, or where one runs.
    """

    model: str
    plan: str
    devices: int
    batch: int
    rank: int
    timed: int
    watched: int
    learned: int
    update: Both
    parts: Mapping[str, Both]
    groups: tuple[Group, ...]
    notes: tuple[str, ...]
    one_device_s: float | None = None

    @property
    def error(self) -> float | None:
        """By which part of the measured update the predicted one is longer; None where one of them is not known."""
        predicted, measured = self.update.predicted_s, self.update.measured_s
        return None if predicted is None or not measured else predicted / measured - 1

    def to_document(self) -> dict[str, Any]:
        """As `prediction.json` has it, in seconds."""
        return {"version": VERSION, **asdict(self)}


def predicted(scored: Scored) -> Observed:
    """What is predicted of the rank that computes longest, in the words of what is observed."""
    timeline = scored.timeline
    rank, kinds = timeline.busiest, timeline.by_kind()
    parts = dict.fromkeys(PARTS, 0.0)
    layers: dict[str, LayerSeconds] = defaultdict(LayerSeconds)
    for span in timeline.spans:
        task, seconds = span.task, span.end - span.start
        if task.rank != rank or task.stream != "compute":
            continue
        parts[_KINDS.get(task.kind, "input" if task.name == "input" else "rest")] += seconds
        if task.kind in ("forward", "backward", "copy"):
            layers[task.layer] += LayerSeconds(computes=seconds)
    gradients = 0.0
    for span, seconds in timeline.exposed_spans():
        if span.task.kind == "gradient":
            gradients += seconds
        else:
            layers[span.task.layer] += LayerSeconds(waits=seconds)
    parts["waiting"] = kinds["exposed"] + kinds["idle"]
    return Observed(parts, dict(layers), gradients)


def parts_beside(before: Observed | None, after: Observed | None) -> dict[str, Both]:
    """The parts of an update."""
    return {part: Both(before.parts[part] if before else None, after.parts[part] if after else None) for part in PARTS}


def groups_beside(placement: Placement, before: Observed | None, after: Observed | None) -> tuple[Group, ...]:
    """The layers in groups, and what gradients of all of them take; without what nobody knows.

    Args:
        placement: of the network, for the order of its layers.
        before: what was predicted.
        after: what was measured.
    """
    if after is None or not after.layers:
        return ()
    return tuple(_groups(layer_groups(placement), before, after))


def _groups(of_layer: Mapping[str, str], before: Observed | None, after: Observed) -> Iterator[Group]:
    members: dict[str, list[str]] = {}
    for layer, group in of_layer.items():
        members.setdefault(group, []).append(layer)
    for name, layers in members.items():
        own, measured = _total(before, layers) if before is not None else None, _total(after, layers)
        yield Group(
            name or "the network itself",
            Both(own.computes if own is not None else None, measured.computes),
            Both(own.waits if own is not None else None, measured.waits),
        )
    waits = Both(before.gradients if before is not None else None, after.gradients)
    yield Group(GRADIENTS, Both(None if before is None else 0.0, 0.0), waits)


def _total(one: Observed, layers: Sequence[str]) -> LayerSeconds:
    return sum((one.layers.get(name, LayerSeconds()) for name in layers), LayerSeconds())
