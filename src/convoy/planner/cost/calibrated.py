"""Times of operations that were not measured, from those that were.

How fast a layer runs depends on its kind and on its sizes, and changes slowly with them. A regression for each kind
gives the way from one size to another, and the measured neighbors give the height. Its seconds are a sum: so much for
starting, for each floating-point operation, and for each byte of two sorts. Weights are read, and their gradients
written, however few samples there are; so their bytes count apart from those of activations. The four rates are the
least squares of relative errors, none below zero, held near a device's roofline where the measurements say nothing.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from convoy.planner.cost.costs import Roofline, Times
from convoy.planner.cost.local_op import VIEWS, LocalOp

Way = Literal[0, 1]  # forward or backward, as places in `Both`

_HELD = 0.001  # weight of the roofline beside the squared relative error of one measurement
_ROUNDS = 200


@dataclass(frozen=True)
class Regression:
    """Seconds of operations of one kind, forward or backward."""

    roofline: Roofline  # gives the unit of each rate
    way: Way
    rates: tuple[float, ...]  # seconds per unit for starting, operations, bytes of activations, bytes of parameters

    def __call__(self, local_op: LocalOp) -> float:
        return sum(rate * term for rate, term in zip(self.rates, terms(local_op, self.way, self.roofline), strict=True))


def terms(local_op: LocalOp, way: Way, roofline: Roofline) -> tuple[float, ...]:
    """What an operation consists of, in seconds on the roofline."""
    flops, moved = local_op.flops[way], local_op.bytes[way]
    if not flops and not moved:
        return 0.0, 0.0, 0.0, 0.0
    weights = min(moved, sum(operand.bytes for operand in local_op.inputs if operand.role == "parameter") * (1 + way))
    return (
        max(roofline.overhead_s, 1e-6),
        flops / roofline.flops_per_s,
        (moved - weights) / roofline.bytes_per_s,
        weights / roofline.bytes_per_s,
    )


def fit(measured: Sequence[tuple[LocalOp, float]], way: Way, roofline: Roofline) -> Regression | None:
    """The regression of measured operations of a kind and their seconds; None where none of them takes time."""
    rows = [(terms(local_op, way, roofline), seconds) for local_op, seconds in measured if seconds > 0]
    points = [[term / seconds for term in row] for row, seconds in rows if sum(row) > 0]
    if not points:
        return None
    level = median(1 / sum(point) for point in points)  # of the whole roofline, before its parts are told apart
    count = range(len(points[0]))
    products = [[sum(point[i] * point[j] for point in points) for j in count] for i in count]
    sums = [sum(point[i] for point in points) for i in count]
    rates = [level for _ in count]
    for _ in range(_ROUNDS):
        for i in count:
            rest = sum(products[i][j] * rates[j] for j in count if j != i)
            rate = (sums[i] - rest + _HELD / level) / (products[i][i] + _HELD / level**2)
            rates[i] = max(0.0, rate)
    return Regression(roofline, way, tuple(rates))


Ratios = tuple[float, float]  # measured over modelled, forward and backward; 0 where there is nothing to compare

_COUNT = 4
_WINDOW = 16
# How far apart, in factors of e, two operations count beyond their sizes for each option in which they differ
_UNLIKE = 3.0


@dataclass(frozen=True)
class _Known:
    work: float
    features: tuple[float, ...]
    options: frozenset[tuple[str, object]]
    gradients: tuple[bool, ...]
    ratios: Ratios


class Neighbours:
    """Measured operations of one kind, with their measured over modelled times."""

    def __init__(self, ratios: Mapping[LocalOp, Ratios]) -> None:
        operations = sorted((_known(local_op, ratio) for local_op, ratio in ratios.items()), key=lambda one: one.work)
        self._all = operations
        self._alike: dict[frozenset[tuple[str, object]], list[_Known]] = {}
        for one in operations:
            self._alike.setdefault(one.options, []).append(one)

    def correction(self, local_op: LocalOp) -> Ratios:
        """What to multiply the model's times by: the mean of the neighbours' ratios, the nearer the more. Operations
        with other options count only where too few have the same."""
        target = _known(local_op, (0.0, 0.0))
        same_options = self._alike.get(target.options, [])
        among = _around(same_options if len(same_options) >= _COUNT else self._all, target.work)
        near = sorted(((_distance(target, other), at) for at, other in enumerate(among)))[:_COUNT]
        weighted = [(1 / (0.01 + far * far), among[at].ratios) for far, at in near]
        forward, backward = (
            [(weight, ratios[way]) for weight, ratios in weighted if ratios[way] > 0] for way in (0, 1)
        )
        return _mean(forward), _mean(backward)


def _known(local_op: LocalOp, ratios: Ratios) -> _Known:
    flops, moved = local_op.flops.forward, local_op.bytes.forward
    tensors = (*local_op.inputs[:2], *local_op.outputs[:1])
    sizes = (math.log(1 + size) for operand in tensors for size in operand.shape)
    features = (math.log(1 + flops), math.log(1 + moved), *sizes)
    options = frozenset(option for option in local_op.options if option[0] != "padding")
    return _Known(sum(features[:2]), features, options, tuple(operand.gradient for operand in local_op.inputs), ratios)


def _around(operations: Sequence[_Known], work: float) -> Sequence[_Known]:
    at = bisect_left(operations, work, key=lambda one: one.work)
    return operations[max(0, at - _WINDOW) : at + _WINDOW]


def _distance(one: _Known, other: _Known) -> float:
    """Zero for the same sizes; a factor of e in all sizes is about one."""
    if len(one.features) != len(other.features):
        return 4 * _UNLIKE
    sizes = math.dist(one.features, other.features) / math.sqrt(2)
    unlike = max(len(one.options - other.options), len(other.options - one.options))
    return sizes + _UNLIKE * unlike + (one.gradients != other.gradients)


def _mean(weighted: Sequence[tuple[float, float]]) -> float:
    total = sum(weight for weight, _ in weighted)
    return math.exp(sum(weight * math.log(value) for weight, value in weighted) / total) if total else 1.0


class Calibrated:
    """Times that are exact where measured, and elsewhere follow from the measured operations of the kind. Empty
    operations and views calibrate nothing. The roofline is by default made from what was measured."""

    def __init__(self, measured: Mapping[LocalOp, Times], roofline: Roofline | None = None) -> None:
        self.measured = dict(measured)
        self.roofline = roofline or fitted(measured)
        groups: dict[tuple[str, str], list[tuple[LocalOp, Times]]] = {}
        for local_op, times in self.measured.items():
            if not local_op.is_empty and local_op.op not in VIEWS and times.forward > 0:
                groups.setdefault((local_op.op, local_op.function), []).append((local_op, times))
        self._kinds = {kind: self._of_kind(group) for kind, group in groups.items()}
        everything = [pair for group in groups.values() for pair in group]
        multiplying = [pair for pair in everything if pair[0].flops.forward > 0]
        moving = [pair for pair in everything if pair[0].flops.forward == 0]
        self._of_op = {op: self._middle([pair for pair in everything if pair[0].op == op]) for op, _ in groups}
        self._of_bound = {True: self._middle(multiplying or everything), False: self._middle(moving or everything)}
        self._issuing = {op: _issuing([pair for pair in everything if pair[0].op == op]) for op in self._of_op}
        self._issuing[""] = _issuing(everything)
        self._found: dict[LocalOp, Times] = {}

    def __call__(self, local_op: LocalOp, /) -> Times:
        if local_op in self.measured:
            return self.measured[local_op]
        if local_op not in self._found:
            self._found[local_op] = self._predicted(local_op)
        return self._found[local_op]

    def _predicted(self, local_op: LocalOp) -> Times:
        model = self.roofline(local_op)
        forward, backward = self._of_op.get(local_op.op, self._of_bound[local_op.flops.forward > 0])
        seconds = [model.forward * forward, model.backward * backward]
        if (local_op.op, local_op.function) in self._kinds:
            regressions, neighbours = self._kinds[local_op.op, local_op.function]
            correction = neighbours.correction(local_op)
            for way, regression in enumerate(regressions):
                if regression is not None:
                    seconds[way] = regression(local_op) * correction[way]
        host = self._issuing.get(local_op.op, self._issuing[""])
        return Times(seconds[0], seconds[1], *host)

    def _of_kind(self, group: Sequence[tuple[LocalOp, Times]]) -> tuple[list[Regression | None], Neighbours]:
        ways: tuple[Way, Way] = (0, 1)
        regressions = [fit([(one, times.numbers[way]) for one, times in group], way, self.roofline) for way in ways]
        ratios = {}
        for one, times in group:
            forward, backward = (_ratio(regressions[way], one, times.numbers[way]) for way in ways)
            ratios[one] = (forward, backward)
        return regressions, Neighbours(ratios)

    def _middle(self, pairs: Sequence[tuple[LocalOp, Times]]) -> tuple[float, float]:
        """Measured over roofline, forward and backward."""
        models = [(self.roofline(local_op), times) for local_op, times in pairs]
        forward = [times.forward / model.forward for model, times in models if model.forward > 0]
        backward = [times.backward / model.backward for model, times in models if model.backward > 0]
        backward = [ratio for ratio in backward if ratio > 0]
        first = median(forward) if forward else 1.0
        return first, median(backward) if backward else first


def _issuing(pairs: Sequence[tuple[LocalOp, Times]]) -> tuple[float, float]:
    """Seconds that a host takes to issue such operations: about the same whatever their sizes."""
    timed = [times for _, times in pairs if times.host > 0]
    if not timed:
        return 0.0, 0.0
    return median(times.host_forward for times in timed), median(times.host_backward for times in timed)


def _ratio(regression: Regression | None, local_op: LocalOp, seconds: float) -> float:
    model = regression(local_op) if regression is not None else 0.0
    return seconds / model if model > 0 else 0.0


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
