"""What is predicted of a plan: the timeline of an update, and the memory of its ranks."""

from dataclasses import dataclass, replace

from convoy.planner.cost.costs import Costs, HostCost
from convoy.planner.cost.memory import RankMemory, most, rank_memory
from convoy.planner.cost.pipeline import Staging
from convoy.planner.cost.simulation import simulate
from convoy.planner.cost.step import samples_of, step_tasks
from convoy.plans.place import Placement
from convoy.plans.plan import Plan
from convoy.plans.timeline import Timeline, split_engine_time


def predict(
    placement: Placement, costs: Costs, passes: int = 1, every_rank: bool = False, staging: Staging | None = None
) -> Timeline:
    """The timeline of an update; arguments as for `step_tasks`. What others get ready beside the computation is waited
    for at the beginning, if an update is too short for it."""
    ahead = costs.input
    if not ahead.beside:
        return simulate(step_tasks(placement, costs, passes, every_rank, staging))
    without = predict(placement, replace(costs, input=HostCost()), passes, every_rank, staging)
    late = passes * max(ahead.seconds(samples) for samples in samples_of(placement)) - without.total
    if late <= 0:
        return without
    return predict(placement, replace(costs, input=HostCost(per_pass=late / passes)), passes, every_rank, staging)


@dataclass(frozen=True)
class Scored:
    """A plan and what is predicted of it."""

    plan: Plan
    placement: Placement
    timeline: Timeline  # the simulated update
    memory: RankMemory  # of the rank that needs most
    passes: int = 1  # of an update
    staging: Staging | None = None  # None for a plan without stages
    by_stage: tuple[RankMemory, ...] = ()  # of the rank of each stage that needs most

    @property
    def seconds(self) -> float:
        return self.timeline.total

    @property
    def bubbles(self) -> tuple[float, ...]:
        """For each stage, the part of an update in which its devices wait for others and have nothing to compute."""
        idle_parts: dict[int, list[float]] = {}
        if self.staging is None:
            return ()
        for rank in self.timeline.ranks:
            idle = self.timeline.by_kind(rank)["idle"]
            idle_parts.setdefault(self.staging.stage_of(rank), []).append(idle / self.seconds if self.seconds else 0.0)
        return tuple(sum(idle_parts[stage]) / len(idle_parts[stage]) for stage in sorted(idle_parts))

    @property
    def bubble(self) -> float:
        """The bubble of all devices together; 0 without stages."""
        return sum(self.bubbles) / len(self.bubbles) if self.bubbles else 0.0

    def again(self, costs: Costs, passes: int | None = None) -> float:
        """Seconds of an update at other costs, or in another number of passes as large as these."""
        passes, staging = self.passes if passes is None else passes, self.staging
        if staging is not None and passes != len(staging.samples):
            staging = replace(staging, samples=(max(staging.samples),) * passes)
        return predict(self.placement, costs, passes, staging=staging).total


def scored(plan: Plan, placement: Placement, costs: Costs, passes: int = 1, staging: Staging | None = None) -> Scored:
    """The prediction for a plan that is placed; the engine's own time has a span beside the optimizer's."""
    timeline = split_engine_time(predict(placement, costs, passes, staging=staging), costs.update.fixed)
    memory = rank_memory(placement, costs, staging)
    by_stage: tuple[RankMemory, ...] = ()
    if staging is not None:
        of_stages = [
            [one for rank, one in enumerate(memory) if staging.stage_of(rank) == s] for s in range(staging.number)
        ]
        by_stage = tuple(map(most, of_stages))
    return Scored(plan, placement, timeline, most(memory), passes, staging, by_stage)
