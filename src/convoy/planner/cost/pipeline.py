"""Stages of a network through which passes go one after the other, and how long an update takes them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from convoy.graph.graph import Graph
from convoy.ops import work
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from convoy.plans.schedule import Action, Schedule, actions, in_flight
from convoy.plans.stages import StagedGraph, Stages


@dataclass(frozen=True)
class Staging:
    """A network in stages, and the passes that go through them."""

    mesh: Mesh  # with an axis of stages
    staged: StagedGraph  # with the stage of every call
    samples: tuple[int, ...]  # of every pass of an update
    schedule: Schedule = "1f1b"

    @staticmethod
    def of(plan: Plan, graph: Graph, outputs: Sequence[str], samples: Sequence[int]) -> "Staging | None":
        """The staging of a plan; None where it has no axis `stage`. The graph has the samples of the largest pass. A
        network that cannot be cut so is a ConvoyError."""
        axis = plan.mesh.stage_axis
        if axis is None:
            return None
        number = plan.mesh.sizes[axis]
        stages = Stages.of(graph, number, plan.stages, work(graph))
        stages.owners(graph)
        return Staging(plan.mesh, StagedGraph(graph, tuple(outputs), stages.of_calls(graph), number), tuple(samples))

    def scheduled(self, schedule: Schedule) -> "Staging":
        """The same in another order."""
        return replace(self, schedule=schedule)

    @property
    def axis(self) -> int:
        """Position of the stages' axis in the mesh."""
        assert self.mesh.stage_axis is not None
        return self.mesh.stage_axis

    @property
    def number(self) -> int:
        """How many stages there are."""
        return self.staged.number

    def peer(self, rank: int, stage: int) -> int:
        """The rank of another stage with which a rank exchanges what crosses between them."""
        place = list(self.mesh.coordinates(rank))
        place[self.axis] = stage
        return self.mesh.rank(place)

    def in_flight(self, stage: int) -> int:
        """Passes whose activations a stage keeps at once, at most."""
        return in_flight(self.schedule, len(self.samples), stage, self.number)


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a stage."""

    forward: float  # of one pass; likewise `backward`
    backward: float
    sends: float = 0.0  # a pass's activations to the next stage
    returns: float = 0.0  # a pass's gradients to the stage before
    once: float = 0.0  # after the last pass: exchange of gradients and optimizer
    weights: float = 0.0  # the part of `backward` that zero-bubble postpones: gradients of weights


def in_order(schedule: Schedule, passes: int, stages: int) -> Iterator[tuple[int, Action]]:
    """What all stages do in an update, each as far as the passes that it is sent by the stage before (of gradients, by
    the one after) have been listed."""
    orders = [iter(actions(schedule, passes, stage, stages)) for stage in range(stages)]
    following = [next(order, None) for order in orders]
    done: set[tuple[int, Action]] = set()
    while any(following):
        for stage, order in enumerate(orders):
            while (action := following[stage]) is not None:
                sender = stage - 1 if action[0] == "forward" else stage + 1
                if action[0] != "weights" and 0 <= sender < stages and (sender, action) not in done:
                    break
                done.add((stage, action))
                following[stage] = next(order, None)
                yield stage, action


def pipeline_seconds(stages: Sequence[StageTimes], passes: int, schedule: Schedule) -> float:
    """Seconds of an update, stage by stage; each sends one message after the other, beside its computing.

    Four equal stages and eight passes take as long as eleven passes through one of them:

    >>> pipeline_seconds([StageTimes(1.0, 2.0)] * 4, 8, "1f1b")
    33.0
    >>> pipeline_seconds([StageTimes(1.0, 2.0, weights=1.0)] * 4, 8, "zero-bubble")
    27.0
    """
    count, postpones = len(stages), schedule == "zero-bubble"
    free, way_out, computed = [0.0] * count, [0.0] * count, [-1] * count
    arrived: dict[tuple[int, Action], float] = {}
    for stage, action in in_order(schedule, passes, count):
        (kind, number), times = action, stages[stage]
        if kind == "weights":
            free[stage] += times.weights * (number - computed[stage])
            computed[stage] = number
            continue
        seconds = times.forward if kind == "forward" else times.backward - postpones * times.weights
        free[stage] = max(free[stage], arrived.get((stage, action), 0.0)) + seconds
        target = stage + 1 if kind == "forward" else stage - 1
        if 0 <= target < count:
            way_out[stage] = max(free[stage], way_out[stage]) + (times.sends if kind == "forward" else times.returns)
            arrived[target, action] = way_out[stage]
    return max(end + stage.once for end, stage in zip(free, stages, strict=True))
