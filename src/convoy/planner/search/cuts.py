"""Where to cut a chain of layers into stages: what a stage from any cut to any other takes, and the best cuts.

The stages are consecutive layers, and the best cuts those by which

    the seconds of one pass through all stages, with what is sent
  + the other passes and the end of the update, of the stage for which these take longest

add up to least: dynamic programming over the layers at which a stage may end, stage by stage, since devices, links and
the passes whose activations are kept differ between stages. PipeDream (Narayanan et al., 2019) cuts likewise, for the
slowest stage alone.
"""

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from convoy.graph.graph import Graph
from convoy.ops.postponed import postponed_part
from convoy.ops.recompute import KeptTensors
from convoy.planner.cost.additive import Additive, OfParameter, sums_of_calls
from convoy.planner.cost.link import Link
from convoy.planner.cost.prediction import workspace
from convoy.plans.place import COMPUTE, PlacedCall, Placement
from convoy.plans.stages import cut_points, open_points

# Of the stage from one cut to another, by the numbers of both; of no meaning where the second is not later
Numbers = NDArray[np.float64]


_FINE = 160  # layers up to which a stage may begin at any; in longer networks, at those with weights to multiply by


def cuts_of(graph: Graph) -> tuple[int, ...]:
    """The calls before which a stage may begin, and those at both ends."""
    points = cut_points(graph)
    if len(points) > _FINE:
        points = tuple(point for point in points if graph.calls[point].op in COMPUTE)
    return (0, *open_points(graph, points), len(graph.calls))


class Chain:
    """What stages of a placed network take, from any cut to any later one: the placement is a pass on the devices of a
    stage. Seconds are those of a pass, forward and backward, but for `once`."""

    def __init__(self, placement: Placement, costs: Additive) -> None:
        self.placement, self.passes = placement, costs.passes
        self.cuts = cuts_of(placement.graph)  # the calls before which a stage may begin, and both ends
        rows = zip(placement.calls, sums_of_calls(placement, costs), strict=True)
        of_calls = np.array([self._of_call(placed, *sums, costs) for placed, sums in rows]).T
        to_sum, to_compare = of_calls[:5], of_calls[5:]
        seconds, saved, once, postponed, held = (_between(np.add.reduceat(row, self.cuts[:-1])) for row in to_sum)
        # Gradients are added to those before. Less, under zero-bubble, are the seconds of weight gradients of all
        # passes that are computed in one call each.
        self.seconds, self.saved = seconds / self.passes, saved / self.passes
        # Seconds for the exchange of gradients and the optimizer; bytes from which weight gradients are computed.
        self.once, self.postponed = once, postponed
        # bytes of parameters, gradients and optimizer, of a pass's own gradient, and of the kernel that holds most
        self.held = held + sum(_largest(np.maximum.reduceat(row, self.cuts[:-1])) for row in to_compare)

    def _of_call(
        self, placed: PlacedCall, seconds: float, parameters: Mapping[str, OfParameter], costs: Additive
    ) -> tuple[float, ...]:
        placement, more = self.placement, self.passes - 1
        part = postponed_part(placed, placement.graph)
        later = (placed.call.attributes["input"], placed.call.outputs[0]) if part else ()
        gradients = [placement.local_bytes(name, 0) for name in parameters] if more else []
        return (
            seconds + more * sum(of.adding for of in parameters.values()),
            costs.postponing(placed, placement, part) if part else 0.0,
            sum(of.seconds for of in parameters.values()),
            sum(placement.local_bytes(name, 0) for name in later),
            sum(of.held for of in parameters.values()),
            max(gradients, default=0),
            workspace(placed, placement, 0) if costs.costs.on_cpu else 0,
        )

    @cached_property
    def _touched(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """The values that calls give: name, bytes on a rank, and the parts between cuts in which they are made or used;
        the network's outputs are used at its end."""
        units_of: dict[str, set[int]] = {}
        for number, placed in enumerate(self.placement.calls):
            unit = bisect_right(self.cuts, number) - 1
            units_of |= {name: {unit} for name in placed.call.outputs}
            for name in units_of.keys() & placed.call.inputs:
                units_of[name].add(unit)
        for name in units_of.keys() & self.placement.outputs.keys():
            units_of[name].add(len(self.cuts) - 2)
        return [(name, self.placement.local_bytes(name, 0), tuple(sorted(units))) for name, units in units_of.items()]

    def messages(self, link: Link) -> tuple[Numbers, Numbers]:
        """Seconds of the activations of a pass that a stage sends to later ones, each to the next that uses it, and of
        the gradients that it sends to earlier ones: of all that these have sent to it."""
        sends, returns = self._empty(), self._empty()
        for name, size, touches in self._touched:
            for sender, receiver in itertools.pairwise(touches):
                sends[: sender + 1, sender + 1 : receiver + 1] += link.exchange(size)
                if name in self.placement.graph.differentiable:
                    returns[sender + 1 : receiver + 1, receiver + 1 :] += link.exchange(size)
        return sends, returns

    @cached_property
    def kept(self) -> Numbers:
        """Bytes of activations of a pass, with what is received and sent."""
        held, graph = self._empty(), self.placement.graph
        # of what is computed again only that which crosses cuts: so no cuts are missed, and what is chosen is looked at
        calls = zip(self.placement.calls, KeptTensors(self.placement).calls, strict=True)
        tensors = {tensor for placed, of_call in calls if not placed.call.recomputed for tensor in of_call}
        plain = {tensor.value for tensor in tensors if not tensor.is_extra(graph)}
        for name, size, touches in self._touched:
            for before, unit in itertools.pairwise((-1, *touches)):
                held[before + 1 : unit + 1, unit + 1 :] += size
            if name not in plain:  # it is gone where no other stage is sent it
                held[: touches[0] + 1, touches[-1] + 1 :] -= size
        first = {name: touches[0] for name, _, touches in self._touched}
        inside = np.zeros(len(self.cuts) - 1)
        for tensor in (tensor for tensor in tensors if tensor.is_extra(graph)):
            inside[first.get(tensor.value, 0)] += tensor.bytes(self.placement)
        return held + _between(inside)

    def _empty(self) -> Numbers:
        return np.zeros((len(self.cuts), len(self.cuts)))


def _between(numbers: Numbers) -> Numbers:
    sums = np.concatenate(([0.0], np.cumsum(numbers)))
    return sums[None, :] - sums[:, None]


def _largest(numbers: Numbers) -> Numbers:
    """The largest of the numbers between two cuts."""
    largest = np.zeros((len(numbers) + 1, len(numbers) + 1))
    for begin in range(len(numbers)):
        largest[begin, begin + 1 :] = np.maximum.accumulate(numbers[begin:])
    return largest


@dataclass(frozen=True)
class Bounds:
    """What decides about the cuts, for each stage from any cut to any other: their sum is to be least. Both are
    infinite where a stage cannot be."""

    through: Sequence[Numbers]  # seconds of one pass through the stage, with what it sends
    rest: Sequence[Numbers]  # seconds of its other passes, and of its end

    def seconds(self, cuts: Sequence[int]) -> float:
        """Seconds of one pass through all stages, and of the rest of the slowest."""
        pairs = list(itertools.pairwise(cuts))
        through = sum(of_stage[pair] for of_stage, pair in zip(self.through, pairs, strict=True))
        return float(through + max(of_stage[pair] for of_stage, pair in zip(self.rest, pairs, strict=True)))

    @cached_property
    def least(self) -> float:
        """Seconds of the rest that the slowest stage takes at least; infinite where there are no cuts."""
        slowest = np.where(np.arange(len(self.rest[0])) == 0, -np.inf, np.inf)
        for of_stage in self.rest:
            slowest = np.maximum(slowest[:, None], of_stage).min(axis=0)
        return float(slowest[-1])


_STEPS = 200
# Times the least that the slowest stage can take, up to which cuts are looked at too: where messages hold up more than
# the stages, the schedules may prefer those that send less
_LOOSER = (1.0, 1.05, 1.1, 1.2, 1.5)


def best_cuts(bounds: Bounds) -> list[tuple[int, ...]]:
    """Cuts by their seconds, those of the least first: of each the numbers, from that at the beginning to the last.

    Dynamic programming gives the least sum through stages none of which takes longer for the rest than some limit. The
    limit sinks to below the slowest of them, and to where a larger sum could still pay, until there is no better one.
    """
    count, rest, through = len(bounds.rest[0]), bounds.rest, bounds.through
    if not np.isfinite(bounds.least):
        return []
    seconds_of: dict[tuple[int, ...], float] = {}

    def look(limit: float) -> tuple[int, ...] | None:
        sums = np.where(np.arange(count) == 0, 0.0, np.inf)
        before: list[NDArray[np.int64]] = []
        for stage in range(len(rest)):
            total = np.where(rest[stage] <= limit, sums[:, None] + through[stage], np.inf)
            before.append(total.argmin(axis=0))
            sums = total.min(axis=0)
        if not np.isfinite(sums[-1]):
            return None
        back = [count - 1]
        for at in reversed(before):
            back.append(int(at[back[-1]]))
        cuts = tuple(reversed(back))
        seconds_of[cuts] = bounds.seconds(cuts)
        return cuts

    limit = np.inf
    for _ in range(_STEPS):
        cuts = look(limit)
        if cuts is None:
            break
        slow = max(row[pair] for row, pair in zip(rest, itertools.pairwise(cuts), strict=True))
        limit = min(np.nextafter(slow, -np.inf), min(seconds_of.values()) - (seconds_of[cuts] - slow))
    for times in _LOOSER:
        look(times * bounds.least)
    return sorted(seconds_of, key=lambda cuts: seconds_of[cuts])
