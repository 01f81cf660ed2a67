"""Memory of a rank in training: what the plan says, the optimizer's state, and the messages with gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.ops.memory import predict_memory
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.gradients import Exchange, exchange
from convoy.planner.cost.pipeline import Staging
from convoy.plans.place import Placement


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank. What a kernel holds while it runs, and the framework itself, come on top.

    Attributes:
        parameters, gradients, buffers, activations: as `convoy.ops.memory` counts them.
        optimizer: the optimizer's state.
        messages: copies of small gradients, in which they are sent.
    """

    parameters: int
    gradients: int
    buffers: int
    activations: int
    optimizer: int
    messages: int

    @property
    def total(self) -> int:
        """All together."""
        held = self.parameters + self.gradients + self.buffers
        return held + self.activations + self.optimizer + self.messages


def rank_memory(placement: Placement, costs: Costs, staging: Staging | None = None) -> list[RankMemory]:
    """Memory of every rank in a pass over the batch that was placed, and the update after it.

    A stage keeps the activations of all its passes that are on their way, with what it receives and sends for them.
    """
    if staging is None:
        return _of_part(placement, costs)
    found = []
    of_stages = [_of_stage(placement, costs, staging, stage) for stage in range(staging.number)]
    for rank in range(placement.mesh.num_devices):
        found.append(of_stages[staging.stage_of(rank)][rank])
    return found


def _of_stage(placement: Placement, costs: Costs, staging: Staging, stage: int) -> list[RankMemory]:
    return _of_part(staging.part(placement, stage), costs, staging.in_flight(stage))


def _of_part(placement: Placement, costs: Costs, in_flight: int = 1) -> list[RankMemory]:
    found = predict_memory(placement, in_flight)
    if not placement.graph.training:
        return [RankMemory(m.parameters, 0, m.buffers, m.activations, 0, 0) for m in found]
    sent = gradient_exchange(placement, costs)
    return [
        RankMemory(
            memory.parameters,
            memory.gradients,
            memory.buffers,
            memory.activations,
            int(costs.update.state * sent.updated[rank]),
            sum(message.copied[rank] for message in sent.messages),
        )
        for rank, memory in enumerate(found)
    ]


def most(memory: Sequence[RankMemory]) -> RankMemory:
    """Of the rank that needs most."""
    return max(memory, key=lambda one: one.total)


def gradient_exchange(placement: Placement, costs: Costs) -> Exchange:
    """The exchange of a step whose gradients become ready last parameter first; of a stage, with those that it has."""
    names = [value.name for value in placement.graph.parameters()]
    order = [name for name in names if name in placement.layouts or not placement.is_part][::-1]
    return exchange(placement, order, costs.update, costs.message_sizes, costs.on_cpu)
