"""Where to cut a network into stages, over how many devices each, in how many passes.

For every number of stages that divides the devices, the layers' strategies are those of the least sum on the other
axes (`search.py`): stages meet only at the cuts, so that what is best for the network is best for its parts. The
stages are then consecutive layers, and the cuts those by which

    the seconds of one pass through all stages, with what is sent
  + the other passes and the end of the update, of the stage for which these take longest

add up to least: dynamic programming over the layers at which a stage may end, stage by stage, since devices, links and
the passes whose activations are kept differ between stages. Of the least sums for several bounds on the slowest stage,
and of numbers of passes, the schedules are simulated stage by stage (`cost/pipeline.py`), and the fastest counts.
PipeDream (Narayanan et al., 2019) cuts likewise, for the slowest stage alone.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from convoy.errors import ConvoyError
from convoy.graph.graph import Graph
from convoy.ops import place
from convoy.ops.kept import KeptTensors
from convoy.planner.cost.link import Link, Links
from convoy.planner.cost.pipeline import StageTimes, pipeline_seconds
from convoy.planner.search.meshes import Parts
from convoy.planner.search.prices import Costs
from convoy.planner.search.search import search
from convoy.plans.fixes import Fix
from convoy.plans.mesh import STAGE, Mesh
from convoy.plans.place import COMPUTE, Batch, Placement, sample_axes
from convoy.plans.plan import Plan
from convoy.plans.schedule import PARTS_PER_STAGE, SCHEDULES, Schedule, in_flight
from convoy.plans.stages import cut_points
from convoy.plans.traffic import needs_gradient

Numbers = NDArray[np.float64]
"""Of the stage from one cut to another, by the numbers of both; of no meaning where the second is not later."""


@dataclass(frozen=True)
class InPasses:
    """An update in some number of passes.

    Attributes:
        graph: the network at the samples of a pass.
        outputs: names of the values that it returns.
        passes: their number.
        parts: how the samples of a pass are divided over a number of ranks.
        costs: of the update.
    """

    graph: Graph
    outputs: Sequence[str]
    passes: int
    parts: Parts
    costs: Costs

    def place(self, plan: Plan) -> Placement:
        """A pass under a plan.

        Raises:
            ConvoyError: a layer cannot be divided as the plan says.
        """
        axes = sample_axes(((call.layer, call.op) for call in self.graph.calls), plan)
        return place(self.graph, plan, Batch(plan.mesh, axes, self.parts(plan.mesh.size(axes))), self.outputs)


@dataclass(frozen=True)
class Staged:
    """A plan with stages, and what it is predicted to take.

    Attributes:
        passes: in an update.
        seconds: of an update, simulated stage by stage.
    """

    plan: Plan
    passes: int
    schedule: Schedule
    seconds: float


_FINE = 160
"""Layers up to which a stage may begin at any; in longer networks, at those with weights to multiply by."""
_BACK = 2 / 3
"""Of a layer's computing, what the backward pass takes."""


def cuts_of(graph: Graph) -> tuple[int, ...]:
    """The calls before which a stage may begin, and those at both ends. No weight or buffer is used on both sides."""
    points = cut_points(graph)
    if len(points) > _FINE:
        points = tuple(point for point in points if graph.calls[point].op in COMPUTE)
    uses: dict[str, list[int]] = {}
    for number, call in enumerate(graph.calls):
        for name in call.inputs:
            if graph.values[name].origin in ("parameter", "buffer"):
                uses.setdefault(name, []).append(number)
    shared = [(own[0], own[-1]) for own in uses.values() if own[0] < own[-1]]
    inside = (point for point in points if not any(first < point <= last for first, last in shared))
    return (0, *inside, len(graph.calls))


class Chain:
    """What stages of a placed network take, from any cut to any later one.

    Args:
        update: the network, without stages.
        placement: a pass of it on the devices of a stage.

    Attributes:
        cuts: the calls before which a stage may begin, and those at both ends.
        seconds: of a pass, forward and backward.
        once: seconds of the exchange of gradients and of the optimizer.
        held: bytes of parameters, gradients and optimizer.
        kept: bytes of activations of a pass, with what is received and sent.
    """

    def __init__(self, update: InPasses, placement: Placement) -> None:
        graph, mesh, costs = update.graph, placement.mesh, update.costs
        self.update, self.placement = update, placement
        self.cuts = cuts_of(graph)
        self._unit = np.searchsorted(self.cuts, range(len(graph.calls)), side="right") - 1
        units = len(self.cuts) - 1
        passes, once, held = np.zeros(units), np.zeros(units), np.zeros(units)
        differentiable = needs_gradient(graph)
        seen: set[str] = set()
        asked = [
            (unit, *one)
            for unit, placed in zip(self._unit, placement.calls, strict=True)
            for one in placed.transfers.items()
        ]
        asked += [(units - 1, *one) for one in placement.outputs.items()]
        first = {(name, steps[-1].target): (unit, steps) for unit, name, steps in reversed(asked) if steps}
        for (name, _), (unit, steps) in first.items():
            value = graph.values[name]
            for step in steps:
                seconds = costs.transfer(step, mesh, value.shape, value.dtype.itemsize, name in differentiable)
                passes[unit] += seconds
        for unit, placed in zip(self._unit, placement.calls, strict=True):
            passes[unit] += costs.compute(placed, placement)
            for name in placed.call.inputs:
                value = graph.values[name]
                if value.origin == "parameter" and name not in seen:
                    layout = placement.layouts[name]
                    passes[unit] += (update.passes - 1) * costs.adding(value, layout, mesh)
                    once[unit] += costs.gradient(value, layout, mesh) + costs.update(value, layout, mesh)
                    held[unit] += costs.parameter_memory(value, layout, mesh)
                    seen.add(name)
        self.seconds, self.once, self.held = (_between(numbers) for numbers in (passes / update.passes, once, held))

    @cached_property
    def _touched(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """The values that calls give: name, bytes on a rank, and the parts between cuts in which they are made or used;
        the network's outputs are used at its end."""
        graph, mesh = self.update.graph, self.placement.mesh
        found: dict[str, set[int]] = {}
        for unit, call in zip(self._unit.tolist(), graph.calls, strict=True):
            for name in call.outputs:
                found[name] = {unit}
            for name in call.inputs:
                if name in found:
                    found[name].add(unit)
        for name in self.update.outputs:
            if name in found:
                found[name].add(len(self.cuts) - 2)
        origin = (0,) * len(mesh.sizes)
        return [
            (
                name,
                prod(self.placement.layouts[name].local_shape(graph.shape(name), mesh, origin))
                * graph.values[name].dtype.itemsize,
                tuple(sorted(units)),
            )
            for name, units in found.items()
        ]

    def sends(self, link: Link) -> Numbers:
        """Seconds of the activations of a pass that a stage sends to later ones: each to the next that uses it."""
        found = self._empty()
        for _, size, touches in self._touched:
            for own, other in itertools.pairwise(touches):
                found[: own + 1, own + 1 : other + 1] += link.exchange(size)
        return found

    def returns(self, link: Link) -> Numbers:
        """Seconds of the gradients of a pass that a stage sends to earlier ones: of all that these have sent to it."""
        found, differentiable = self._empty(), needs_gradient(self.update.graph)
        for name, size, touches in self._touched:
            for other, own in itertools.pairwise(touches) if name in differentiable else ():
                found[other + 1 : own + 1, own + 1 :] += link.exchange(size)
        return found

    @cached_property
    def kept(self) -> Numbers:
        found, values = self._empty(), self.update.graph.values
        # of what is computed again only that which crosses cuts: so no cuts are missed, and what is chosen is looked at
        calls = zip(self.placement.calls, KeptTensors(self.placement).calls, strict=True)
        kept = {one for placed, own in calls if not placed.call.recomputed for one in own}
        plain = {one.value for one in kept if not one.inside and one.itemsize == values[one.value].dtype.itemsize}
        for name, size, touches in self._touched:
            for before, own in itertools.pairwise((-1, *touches)):
                found[before + 1 : own + 1, own + 1 :] += size
            if name not in plain:  # it is gone where no other stage is sent it
                found[: touches[0] + 1, touches[-1] + 1 :] -= size
        first = {name: touches[0] for name, _, touches in self._touched}
        inside = np.zeros(len(self.cuts) - 1)
        mesh = self.placement.mesh
        for one in kept:
            if one.inside or one.itemsize != values[one.value].dtype.itemsize:
                shape = one.layout.local_shape(values[one.value].shape, mesh, (0,) * len(mesh.sizes))
                inside[first.get(one.value, 0)] += prod(shape) * one.itemsize
        return found + _between(inside)

    def _empty(self) -> Numbers:
        return np.zeros((len(self.cuts), len(self.cuts)))


def _between(numbers: Numbers) -> Numbers:
    sums = np.concatenate(([0.0], np.cumsum(numbers)))
    return sums[None, :] - sums[:, None]


@dataclass(frozen=True)
class Bounds:
    """What decides about the cuts, for each stage from any cut to any other: their sum is to be least.

    Attributes:
        through: seconds of one pass through the stage, with what it sends; infinite where it cannot be.
        rest: seconds of its other passes, and of its end.
    """

    through: Sequence[Numbers]
    rest: Sequence[Numbers]

    def seconds(self, cuts: Sequence[int]) -> float:
        """Of some cuts: all stages of one pass, and the rest of the slowest."""
        pairs = list(itertools.pairwise(cuts))
        through = sum(own[pair] for own, pair in zip(self.through, pairs, strict=True))
        return float(through + max(own[pair] for own, pair in zip(self.rest, pairs, strict=True)))


_STEPS = 200
_LOOSER = (1.0, 1.05, 1.1, 1.2, 1.5)
"""Times the least that the slowest stage can take, up to which cuts are looked at too: where messages hold up more than
the stages, the schedules may prefer those that send less."""


def best_cuts(bounds: Bounds) -> list[tuple[int, ...]]:
    """Cuts by their seconds, those of the least first: of each the numbers, from that at the beginning to the last.

    Dynamic programming gives the least sum through stages none of which takes longer for the rest than some limit. The
    limit sinks to below the slowest of them, and to where a larger sum could still pay, until there is no better one.
    """
    shape, stages = bounds.through[0].shape, len(bounds.through)
    later = np.triu(np.ones(shape, bool), 1)
    through = [np.where(later, own, np.inf) for own in bounds.through]
    rest = [np.where(np.isfinite(sums), own, np.inf) for own, sums in zip(bounds.rest, through, strict=True)]
    slowest = np.where(np.arange(shape[0]) == 0, -np.inf, np.inf)
    for own in rest:
        slowest = np.maximum(slowest[:, None], own).min(axis=0)
    least = slowest[-1]
    if not np.isfinite(least):
        return []
    found: dict[tuple[int, ...], float] = {}

    def look(limit: float) -> tuple[int, ...] | None:
        sums = np.where(np.arange(shape[0]) == 0, 0.0, np.inf)
        before: list[NDArray[np.int64]] = []
        for stage in range(stages):
            total = np.where(rest[stage] <= limit, sums[:, None] + through[stage], np.inf)
            before.append(total.argmin(axis=0))
            sums = total.min(axis=0)
        if not np.isfinite(sums[-1]):
            return None
        back = [shape[0] - 1]
        for at in reversed(before):
            back.append(int(at[back[-1]]))
        cuts = tuple(reversed(back))
        found[cuts] = bounds.seconds(cuts)
        return cuts

    limit = np.inf
    for _ in range(_STEPS):
        cuts = look(limit)
        if cuts is None:
            break
        slow = max(own[pair] for own, pair in zip(rest, itertools.pairwise(cuts), strict=True))
        limit = min(np.nextafter(slow, -np.inf), min(found.values()) - (found[cuts] - slow))
    for times in _LOOSER:
        look(times * least)
    return sorted(found, key=lambda cuts: found[cuts])


_Found = TypeVar("_Found")


def in_best_passes(
    counts: Sequence[int], stages: int, found_in: Callable[[int], _Found | None], price: Callable[[_Found], Any]
) -> _Found | None:
    """The best of what is found in some numbers of passes.

    More and more of them are tried, or fewer and fewer, as long as that is better: more leave stages waiting for less
    of the time, and fewer are larger, which is faster to compute.

    Args:
        counts: the numbers that there may be, ascending.
        stages: through which the passes go.
        found_in: what there is in a number of passes; None if there can be nothing.
        price: is to be least.
    """
    known: dict[int, _Found | None] = {}

    def at(wanted: int) -> _Found | None:
        passes = next(number for number in counts if number >= wanted)
        if passes not in known:
            known[passes] = found_in(passes)
        return known[passes]

    start = min(PARTS_PER_STAGE * stages, counts[-1])
    best = at(start)
    for times in (2.0, 0.5):
        wanted = int(times * start)
        while 1 <= wanted <= counts[-1]:
            other = at(wanted)
            if best is not None and (other is None or price(other) >= price(best)):
                break
            best, wanted = other, int(times * wanted)
    return best


def search_stages(
    at: Callable[[int], InPasses],
    counts: Sequence[int],
    num_devices: int,
    links: Links,
    *,
    slowdowns: Sequence[float] = (),
    fixes: Sequence[str | Fix] = (),
    memory_limit: float | None = None,
    known: float = float("inf"),
    top: int = 2,
    schedules: Sequence[Schedule] = SCHEDULES,
) -> list[Staged]:
    """The fastest plans with stages, the first of them first; none where there can be none.

    Args:
        at: the update in a number of passes; asked again and again for the same.
        counts: the numbers of passes that it may have, ascending.
        num_devices: ranks that the plans are for.
        links: between them.
        slowdowns: how many times as long as in the costs each rank computes; empty for equal ones.
        fixes: strategies that are given.
        memory_limit: bytes that each rank has.
        known: seconds of the best plan without stages; what cannot be much better is not looked at.
        top: how many plans to give at most, each with another number of stages.
        schedules: the orders of passes that there may be.
    """
    return _StageSearch(at, counts, num_devices, links, slowdowns, fixes, memory_limit, known, schedules).run(top)


_SIMULATED = 6
_WORSE = 2
_WORTH = 1.1
"""Times as long as the best plan known that may be what is known of others without simulating them."""


@dataclass
class _StageSearch:
    at: Callable[[int], InPasses]
    counts: Sequence[int]
    num_devices: int
    links: Links
    slowdowns: Sequence[float]
    fixes: Sequence[str | Fix]
    memory_limit: float | None
    known: float
    schedules: Sequence[Schedule]
    _fits: bool = False  # what was looked at, fast or slow

    def run(self, top: int) -> list[Staged]:
        found: list[Staged] = []
        worse = 0
        for stages in (n for n in range(2, self.num_devices + 1) if self.num_devices % n == 0):
            best = self._with(stages)
            if best is not None:
                worse = 0 if best.seconds <= min((one.seconds for one in found), default=np.inf) else worse + 1
                found.append(best)
            elif self._fits:
                worse += 1
            if worse == _WORSE:  # a finer division has ever more bubble and messages
                break
        return sorted(found, key=lambda one: one.seconds)[:top]

    def _with(self, stages: int) -> Staged | None:
        """The best plan with so many stages."""
        inner = self.num_devices // stages
        mesh = Mesh(("gpu",), (inner,)) if inner > 1 else Mesh((), ())
        plans: dict[float | None, Plan | None] = {}

        def found_in(passes: int) -> Staged | None:
            found = self._in_passes(passes, mesh, stages, plans)
            return min(found, key=lambda one: one.seconds, default=None)

        return in_best_passes(self.counts, stages, found_in, lambda one: one.seconds)

    def _in_passes(
        self, passes: int, mesh: Mesh, stages: int, plans: dict[float | None, Plan | None]
    ) -> Iterator[Staged]:
        """Plans in a number of passes, on as many devices for each stage.

        Args:
            plans: strategies by the memory that the whole network may take with them; None for the fastest.
        """
        if self._ideal(stages, passes) > _WORTH * self.known:
            self._fits = True
            return
        update = self.at(passes)
        if stages >= len(cuts_of(update.graph)):
            return
        # where no cut fits into memory, strategies that take less of it may let one
        for limit in [None] if self.memory_limit is None else [None, stages * self.memory_limit]:
            if limit not in plans:
                plans[limit] = self._strategies(update, mesh, limit)
            plan = plans[limit]
            if plan is None:
                continue
            try:
                chain = Chain(update, update.place(plan))
            except ConvoyError:  # samples of a pass that so many ranks cannot share
                continue
            found = self._cut(chain, plan, stages)
            if found is not None:
                self._fits = True
                yield from found
                return

    def _ideal(self, stages: int, passes: int) -> float:
        """Seconds of stages that are all equal, and send nothing."""
        speed = sum(1 / own for own in self.slowdowns) if self.slowdowns else self.num_devices
        return self._alone(passes) * (passes + stages - 1) / speed

    def _alone(self, passes: int) -> float:
        """Seconds of a pass on one device."""
        if passes not in self._known_alone:
            update = self.at(passes)
            chain = Chain(update, update.place(Plan(Mesh((), ()))))
            self._known_alone[passes] = float(chain.seconds[0, -1])
        return self._known_alone[passes]

    @cached_property
    def _known_alone(self) -> dict[int, float]:
        return {}

    def _strategies(self, update: InPasses, mesh: Mesh, limit: float | None) -> Plan | None:
        """The fastest strategies on the devices of a stage, None where there are none."""
        if not mesh.sizes:
            return None if self.fixes else Plan(mesh)  # fixes name strategies on an axis
        try:
            return search(
                update.graph,
                mesh.num_devices,
                update.costs,
                parts=update.parts,
                outputs=update.outputs,
                fixes=self.fixes,
                memory_limit=limit,
                top=1,
                on=[mesh],
            ).best.plan
        except ConvoyError:
            return None

    def _cut(self, chain: Chain, plan: Plan, stages: int) -> list[Staged] | None:
        """Ways to cut it, in one schedule each, that may be faster than what is known; None where none fits."""
        mesh = Mesh((STAGE, *plan.mesh.names), (stages, *plan.mesh.sizes))
        pairs = [self.links.between(mesh, 0, stage, stage + 1) for stage in range(stages - 1)]
        ways = {link: (chain.sends(link), chain.returns(link)) for link in dict.fromkeys(pairs)}
        nothing = np.zeros_like(chain.seconds)
        times: list[tuple[Numbers, ...]] = []  # of each stage: computes, sends, returns, at its end
        for stage in range(stages):
            after, before = (pairs[at] if 0 <= at < stages - 1 else None for at in (stage, stage - 1))
            sends = ways[after][0] if after is not None else nothing
            returns = ways[before][1] if before is not None else nothing
            beside = max(_share(link) for link in (before, after) if link is not None)
            computes = self._slowdown(mesh, stage) * chain.seconds + beside * (sends + returns)
            times.append((computes, sends, returns, chain.once))
        passes, found, fits = chain.update.passes, [], False
        for schedules in [self.schedules] if self.memory_limit is None else [(one,) for one in self.schedules]:
            through, rest = [], []
            for stage, (computes, sends, returns, once) in enumerate(times):
                own = computes + sends + returns
                if self.memory_limit is not None:
                    held = chain.held + in_flight(schedules[0], passes, stage, stages) * chain.kept
                    own = np.where(held <= self.memory_limit, own, np.inf)
                through.append(own)
                rest.append((passes - 1) * np.maximum(computes, sends + returns) + once)
            bounds = Bounds(through, rest)
            best = best_cuts(bounds)
            fits = fits or bool(best)
            for cuts in best[:_SIMULATED]:
                if bounds.seconds(cuts) > _WORTH * self.known:
                    break
                each = [_times(own, pair) for own, pair in zip(times, itertools.pairwise(cuts), strict=True)]
                for schedule in schedules:
                    seconds = pipeline_seconds(each, passes, schedule)
                    self.known = min(self.known, seconds)
                    graph = chain.update.graph
                    names = tuple(graph.calls[chain.cuts[cut]].layer for cut in cuts[1:-1])
                    found.append(Staged(Plan(mesh, plan.layers, names), passes, schedule, seconds))
        return found if fits else None

    def _slowdown(self, mesh: Mesh, stage: int) -> float:
        """Of the slowest rank of a stage."""
        if not self.slowdowns:
            return 1.0
        return max(own for rank, own in enumerate(self.slowdowns) if mesh.coordinates(rank)[0] == stage)


def _share(link: Link) -> float:
    """Of the seconds of what a stage sends, those that it takes from its computing, with as much that it receives."""
    return link.cpu_share if link.overlap else 1.0


def _times(own: tuple[Numbers, ...], pair: tuple[int, int]) -> StageTimes:
    computes, sends, returns, once = (float(numbers[pair]) for numbers in own)
    return StageTimes((1 - _BACK) * computes, _BACK * computes, sends, returns, once, _BACK / 2 * computes)
