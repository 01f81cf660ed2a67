"""Where to cut a network into stages, over how many devices each, in how many passes and in which order.

For every number of stages that divides the devices, the layers' strategies are those of the least sum on the other
axes (`search.py`): stages meet only at the cuts, so that what is best for the network is best for its parts. Of the
best cuts (`cuts.py`) for several bounds on the slowest stage, and of numbers of passes, the schedules are simulated
stage by stage (`cost/simulation.py`), and the fastest counts.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from convoy.errors import ConvoyError
from convoy.planner.cost.additive import Additive
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.link import Link
from convoy.planner.cost.simulation import StageTimes, pipeline_seconds
from convoy.planner.search.cuts import Bounds, Chain, Numbers, best_cuts, cuts_of
from convoy.planner.search.layers import ANY, Constraints
from convoy.planner.search.search import search
from convoy.planner.workload import Workload
from convoy.plans.mesh import STAGE, Mesh, ranks_of
from convoy.plans.plan import Plan
from convoy.plans.schedule import PARTS_PER_STAGE, Schedule, actions, bubble, in_flight


@dataclass(frozen=True)
class Staged:
    """A plan with stages, and its prediction."""

    plan: Plan
    passes: int  # of an update
    schedule: Schedule
    seconds: float  # of an update, simulated stage by stage


_BACK = 2 / 3  # of a layer's computing, what the backward pass takes
# Of a pass's computing, what later stages wait for: under zero-bubble its forward pass alone; see `bubble`
_WAITS: dict[Schedule, float] = {"gpipe": 1.0, "1f1b": 1.0, "zero-bubble": 1 - _BACK}


_Found = TypeVar("_Found")
_MOST_PASSES = 256  # more are not looked at, as simulating them takes long


def in_best_passes(
    counts: Sequence[int], stages: int, found_in: Callable[[int], _Found | None], price: Callable[[_Found], Any]
) -> _Found | None:
    """The best of what is found in some of the numbers of passes in `counts`, which ascend; the least price is best.
    More and more of them are tried, or fewer and fewer, as long as that is better: more leave stages waiting for less
    of the time, and fewer are larger, which is faster to compute. `found_in` gives None where there can be nothing."""
    results: dict[int, _Found | None] = {}

    def at(least: int) -> _Found | None:
        passes = next(number for number in counts if number >= least)
        if passes not in results:
            results[passes] = found_in(passes)
        return results[passes]

    start = min(PARTS_PER_STAGE * stages, counts[-1])
    most = min(counts[-1], max(_MOST_PASSES, start))
    best = at(start)
    for times in (2.0, 0.5):
        number = int(times * start)
        while 1 <= number <= most:
            other = at(number)
            if best is not None and (other is None or price(other) >= price(best)):
                break
            best, number = other, int(times * number)
    return best


def search_stages(
    workload: Workload,
    num_devices: int,
    costs: Costs,
    constraints: Constraints = ANY,
    *,
    known: float = math.inf,
    top: int = 2,
) -> list[Staged]:
    """The fastest plans with stages, at most `top` of them with different numbers of stages, the best first; none where
    there can be none. The devices of a stage are on one axis. `known` is the seconds of the best plan without stages:
    what cannot be much better is not looked at."""
    if not workload.counts or num_devices == 1:
        return []
    return _StageSearch(workload, num_devices, costs, constraints, known).run(top)


_SIMULATED = 6
_WORTH = 1.1  # times as long as the best plan known that may be what is known of others without simulating them


# The best plan in some number of passes, after its seconds; or about those where they are known to be too long
_Priced = tuple[float, Staged | None]


@dataclass
class _StageSearch:
    workload: Workload
    num_devices: int
    costs: Costs
    constraints: Constraints
    known: float

    def __post_init__(self) -> None:
        self.memory_limit = self.constraints.memory_limit
        self.slowdowns, self.schedules = self.costs.slowdowns, self.workload.schedules
        self._equal = replace(self.costs, slowdowns=())
        self._updates: dict[int, tuple[Workload, Additive, float]] = {}

    def _at(self, passes: int) -> tuple[Workload, Additive, float]:
        """The update in some passes, its costs on equal ranks, and seconds of a pass on one device, as fast as in
        any schedule."""
        if passes not in self._updates:
            update = self.workload.through(self.num_devices, passes)
            costs = Additive(self._equal, update.graph, update.passes)
            chain = Chain(update.place(Plan(Mesh((), ()))), costs)
            saved = chain.saved if "zero-bubble" in self.schedules else 0.0
            self._updates[passes] = update, costs, float((chain.seconds - saved)[0, -1])
        return self._updates[passes]

    def run(self, top: int) -> list[Staged]:
        numbers = (number for number in range(2, self.num_devices + 1) if self.num_devices % number == 0)
        return sorted(filter(None, map(self._with, numbers)), key=lambda plan: plan.seconds)[:top]

    def _with(self, stages: int) -> Staged | None:
        inner = self.num_devices // stages
        mesh = Mesh(("gpu",), (inner,)) if inner > 1 else Mesh((), ())
        plans: dict[float | None, Plan | None] = {}

        best = in_best_passes(
            self.workload.counts,
            stages,
            lambda passes: self._in_passes(passes, mesh, stages, plans),
            lambda priced: (priced[1] is None, priced[0]),
        )
        return best[1] if best is not None else None

    def _in_passes(
        self, passes: int, mesh: Mesh, stages: int, plans: dict[float | None, Plan | None]
    ) -> _Priced | None:
        """The best in a number of passes, on as many devices for each stage; None where nothing can be or fits. `plans`
        keeps strategies by the memory that the whole network may take with them, None for the fastest."""
        update, costs, alone = self._at(passes)
        speed = sum(1 / slowdown for slowdown in self.slowdowns) if self.slowdowns else self.num_devices
        busy = 1 - min(bubble(schedule, passes, stages) for schedule in self.schedules)
        ideal = alone * passes / speed / busy  # of stages that are all equal, and send nothing
        if ideal > _WORTH * self.known:
            return ideal, None
        if stages >= len(cuts_of(update.graph)):
            return None
        # where no cut fits into memory, strategies that take less of it may let one
        for limit in [None] if self.memory_limit is None else [None, stages * self.memory_limit]:
            if limit not in plans:
                plans[limit] = self._strategies(update, mesh, limit)
            plan = plans[limit]
            if plan is None:
                continue
            try:
                chain = Chain(update.place(plan), costs)
            except ConvoyError:  # samples of a pass that so many ranks cannot share
                continue
            priced = self._cut(chain, plan, stages)
            if priced is not None:
                return priced
        return None

    def _strategies(self, update: Workload, mesh: Mesh, limit: float | None) -> Plan | None:
        """The fastest strategies on the devices of a stage, None where there are none."""
        if not mesh.sizes:
            return None if self.constraints.fixes else Plan(mesh)  # fixes name strategies on an axis
        with contextlib.suppress(ConvoyError):
            within = replace(self.constraints, memory_limit=limit, meshes=[mesh])
            return search(update, mesh.num_devices, self._equal, within, top=1).best.plan
        return None

    def _cut(self, chain: Chain, plan: Plan, stages: int) -> _Priced | None:
        """The best way to cut it, and in which schedule; None where none fits."""
        mesh = Mesh((STAGE, *plan.mesh.names), (stages, *plan.mesh.sizes))
        passes, graph = chain.passes, chain.placement.graph
        plans: list[Staged] = []
        sums: list[float] = []
        plain = self._times(chain, mesh, stages, postpones=False)
        postponing = self._times(chain, mesh, stages, postpones=True) if "zero-bubble" in self.schedules else plain
        of_schedules = {schedule: postponing if schedule == "zero-bubble" else plain for schedule in self.schedules}
        # without a limit of memory, cuts are those for the schedule that waits least
        leaders = self.schedules if self.memory_limit is not None else (min(self.schedules, key=_WAITS.__getitem__),)
        for leading in leaders:
            bounds = self._bounds(chain, of_schedules[leading], leading)
            if np.isfinite(bounds.least) and bounds.least > _WORTH * self.known:
                sums.append(bounds.least)
                continue
            for cuts in best_cuts(bounds)[:_SIMULATED]:
                sums.append(bounds.seconds(cuts))
                if sums[-1] > _WORTH * self.known:
                    break
                for schedule in (leading,) if self.memory_limit is not None else self.schedules:
                    pairs = zip(of_schedules[schedule], itertools.pairwise(cuts), strict=True)
                    of_stages = [StageTimes(*(float(numbers[pair]) for numbers in times)) for times, pair in pairs]
                    seconds = pipeline_seconds(of_stages, passes, schedule)
                    self.known = min(self.known, seconds)
                    names = tuple(graph.calls[chain.cuts[cut]].layer for cut in cuts[1:-1])
                    plans.append(Staged(Plan(mesh, plan.layers, names), passes, schedule, seconds))
        if plans:
            best = min(plans, key=lambda staged: staged.seconds)
            return best.seconds, best
        return (min(sums), None) if sums else None

    def _times(self, chain: Chain, mesh: Mesh, stages: int, *, postpones: bool) -> list[tuple[Numbers, ...]]:
        """The `StageTimes` of each stage from any cut to any other, where weight gradients are postponed or not."""
        pairs = [self.costs.links.between(mesh, 0, stage, stage + 1) for stage in range(stages - 1)]
        ways = {link: chain.messages(link) for link in dict.fromkeys(pairs)}
        nothing = np.zeros_like(chain.seconds)
        times: list[tuple[Numbers, ...]] = []
        for stage in range(stages):
            after, before = (pairs[at] if 0 <= at < stages - 1 else None for at in (stage, stage - 1))
            sends = ways[after][0] if after is not None else nothing
            returns = ways[before][1] if before is not None else nothing
            beside = max(_share(link) for link in (before, after) if link is not None) * (sends + returns)
            slower = (
                max((self.slowdowns[rank] for rank in ranks_of(mesh, stage)), default=1.0) if self.slowdowns else 1.0
            )
            saved = _joined(chain.passes, stage, stages) * chain.saved if postpones else nothing
            computes = slower * chain.seconds + beside
            # the gradients of weights take half of the backward pass, each computed by itself
            weights = np.maximum(0.0, _BACK / 2 * computes - slower * saved)
            backward = _BACK / 2 * computes + weights
            times.append(((1 - _BACK) * computes, backward, sends, returns, chain.once, weights))
        return times

    def _bounds(self, chain: Chain, times: Sequence[tuple[Numbers, ...]], schedule: Schedule) -> Bounds:
        """What decides about the cuts under a schedule; infinite where a stage does not fit into memory."""
        through, rest = [], []
        passes, stages = chain.passes, len(times)
        for stage, (forward, backward, sends, returns, once, _) in enumerate(times):
            computes, sent = forward + backward, sends + returns
            possible = np.triu(np.ones(computes.shape, bool), 1)
            if self.memory_limit is not None:
                activations = np.maximum(chain.kept, chain.postponed) if schedule == "zero-bubble" else chain.kept
                held = chain.held + in_flight(schedule, passes, stage, stages) * activations
                possible &= held <= self.memory_limit
            remaining = (passes - _WAITS[schedule]) * np.maximum(computes, sent) + once
            through.append(np.where(possible, _WAITS[schedule] * computes + sent, np.inf))
            rest.append(np.where(possible, remaining, np.inf))
        return Bounds(through, rest)


def _share(link: Link) -> float:
    """The part of the seconds of what a stage sends that it takes from its computing, with as much that it receives."""
    return link.cpu_share if link.overlap else 1.0


def _joined(passes: int, stage: int, stages: int) -> float:
    """The part of the weight gradients of all passes but one that zero-bubble computes in one call with others."""
    if passes == 1:
        return 0.0
    calls = sum(kind == "weights" for kind, _ in actions("zero-bubble", passes, stage, stages))
    return (passes - calls) / (passes - 1)
