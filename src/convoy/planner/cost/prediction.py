"""What is predicted of a plan: the memory of its ranks, and the timeline of an update."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from convoy.errors import TooLargeError
from convoy.ops.memory import predict_memory
from convoy.ops.postponed import postpones
from convoy.ops.recompute import kept_by, with_recomputed
from convoy.planner.cost.costs import Costs, HostCost
from convoy.planner.cost.program import gradient_axes, held_bytes, weights_of
from convoy.planner.cost.simulation import simulate
from convoy.planner.cost.step import Staging, samples_of, step_tasks
from convoy.plans.mesh import ranks_of
from convoy.plans.place import Memory, PlacedCall, Placement
from convoy.plans.plan import Plan
from convoy.plans.schedule import returning
from convoy.plans.stages import Crossing
from convoy.plans.timeline import Timeline
from convoy.units import size


@dataclass(frozen=True)
class RankMemory(Memory):
    """Bytes on one rank in all. The framework itself comes on top, and what kernels hold on GPUs."""

    optimizer: int  # its state
    messages: int  # copies of small gradients, in which they are sent; what stages send each other, beside activations
    workspace: int = 0  # of the kernel that holds most while it runs

    @property
    def total(self) -> int:
        return super().total + self.optimizer + self.messages + self.workspace


def rank_memory(placement: Placement, costs: Costs, staging: Staging | None = None) -> list[RankMemory]:
    """Memory of every rank in a pass over the batch that was placed, and the update after it. A stage keeps the
    activations of all its passes in flight, with what it receives and sends for them. Of one weight after the other it
    also has a pass's own gradient, until that is added to those before."""
    memories: dict[int, RankMemory] = {}
    for stage in range(staging.number if staging is not None else 1):
        part = placement if staging is None else staging.staged.part(placement, stage)
        memories |= _of_part(part, costs, staging, stage)
    return [memories[rank] for rank in sorted(memories)]


def _of_part(placement: Placement, costs: Costs, staging: Staging | None, stage: int) -> dict[int, RankMemory]:
    """The memory of a stage's ranks, or of all where there are no stages."""
    graph, passes, in_flight = placement.graph, 1, 1
    if staging is not None:
        passes, in_flight = len(staging.samples), staging.in_flight(stage)
    mesh, counted = placement.mesh, predict_memory(placement, in_flight)
    ranks: Sequence[int] = range(mesh.num_devices) if staging is None else ranks_of(mesh, stage)
    if not graph.training:
        return {rank: RankMemory(**vars(counted[rank]), optimizer=0, messages=0) for rank in ranks}
    held, alone = held_bytes(placement, weights_of(placement)), costs.message_sizes.alone
    small = [sizes for name, sizes in held.items() if gradient_axes(placement, name) and max(sizes) < alone]
    later = list[str]()
    if staging is not None and staging.schedule == "zero-bubble":  # inputs and gradients, of all passes, at the end
        calls = [placed.call for placed in placement.calls if postpones(placed, graph)]
        later = [name for call in calls for name in (call.attributes["input"], call.outputs[0])]
    by_rank = {}
    for rank in ranks:
        memory, messages = counted[rank], sum(sizes[rank] for sizes in small)
        if staging is not None:
            messages += _sent_and_received(placement, staging, stage, rank)
        weights = [sizes[rank] for sizes in held.values()]
        by_rank[rank] = RankMemory(
            memory.parameters,
            memory.gradients + (max(weights, default=0) if passes > 1 else 0),
            memory.buffers,
            max(memory.activations, passes * sum(placement.local_bytes(name, rank) for name in later)),
            int(costs.update.state * sum(weights)),
            messages,
            max((workspace(call, placement, rank) for call in placement.calls if costs.on_cpu), default=0),
        )
    return by_rank


def _sent_and_received(placement: Placement, staging: Staging, stage: int, rank: int) -> int:
    """Bytes that a rank of a stage has beside the activations when it begins to run a pass back: the pass's gradients
    and those of the next one, the values of the next pass forward, and the gradients that it has sent."""
    passes, in_flight, differentiable = len(staging.samples), staging.in_flight(stage), placement.graph.differentiable

    def size(crossing: Crossing, gradient: bool) -> int:
        return 0 if gradient and crossing.value not in differentiable else placement.local_bytes(crossing.value, rank)

    total = min(2, in_flight) * sum(size(crossing, True) for crossing in staging.staged.sent(stage))
    for crossing in staging.staged.received(stage):
        passes_kept = returning(staging.schedule, passes, crossing.source, stage, staging.number)
        total += passes_kept * size(crossing, True) + (in_flight < passes) * size(crossing, False)
    return total


def workspace(placed: PlacedCall, placement: Placement, rank: int) -> int:
    """Bytes that a call's backward pass holds on a CPU while it runs, beside what it is given and gives.

    oneDNN computes a convolution with its weight laid out otherwise, and gives the weight's gradient in that layout:
    torch has two copies of a weight in channels_last. Where filters are of 1 × 1 without a stride there are none. Of
    contiguous images there is one, and copies of the images.
    """
    call = placed.call
    if call.op != "conv":
        return 0
    name = call.attributes["weight"]
    plain = set(placement.graph.shape(name)[2:]) == {1} and set(call.attributes["stride"]) == {1}
    return 0 if plain else 2 * placement.local_bytes(name, rank)


def most(memory: Sequence[RankMemory]) -> RankMemory:
    """The memory of the rank that needs most."""
    return max(memory, key=lambda of_rank: of_rank.total)


def predict(placement: Placement, costs: Costs, passes: int = 1, staging: Staging | None = None) -> Timeline:
    """The timeline of an update; arguments as for `step_tasks`. What others get ready beside the computation is waited
    for at the beginning, if an update is too short for it."""
    ahead = costs.input
    if not ahead.beside:
        return simulate(step_tasks(placement, costs, passes, staging))
    without = predict(placement, replace(costs, input=HostCost()), passes, staging)
    late = passes * max(ahead.seconds(samples) for samples in samples_of(placement)) - without.total
    if late <= 0:
        return without
    return predict(placement, replace(costs, input=HostCost(per_pass=late / passes)), passes, staging)


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
        if self.staging is None:
            return ()
        mesh, idle_parts = self.staging.mesh, defaultdict[int, list[float]](list)
        for rank in self.timeline.ranks:
            idle = self.timeline.by_kind(rank)["idle"]
            idle_parts[mesh.stage_of(rank)].append(idle / self.seconds if self.seconds else 0.0)
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


def predicted(
    plan: Plan, placement: Placement, costs: Costs, passes: int = 1, staging: Staging | None = None
) -> Scored:
    """The prediction for a plan that is placed."""
    timeline = predict(placement, costs, passes, staging=staging)
    memory = rank_memory(placement, costs, staging)
    of_stages: dict[int, list[RankMemory]] = {}
    for rank, of_rank in enumerate(memory) if staging is not None else ():
        of_stages.setdefault(plan.mesh.stage_of(rank), []).append(of_rank)
    by_stage = tuple(most(of_stages[stage]) for stage in sorted(of_stages))
    return Scored(plan, placement, timeline, most(memory), passes, staging, by_stage)


def nothing_fits(
    placement: Placement,
    costs: Costs,
    needed: float,
    limit: float,
    what: str = "no plan fits: the smallest",
    staging: Staging | None = None,
) -> TooLargeError:
    """The error for where even the smallest plan is too large."""
    layers = defaultdict[str, float](float)
    outputs: dict[str, int] = {}  # several layers may keep the same one
    mesh, values, parameters = placement.mesh, placement.graph.values, 0.0
    for placed in placement.calls:
        weights = [name for name in placed.call.inputs if values[name].origin == "parameter"]
        trained = sum(placement.local_bytes(name, 0) for name in weights if values[name].trains)
        held = sum(placement.local_bytes(name, 0) for name in weights) + (1 + costs.update.state) * trained
        parameters += held
        layers[placed.call.layer] += held
        for tensor in kept_by(placed, placement):
            if values[tensor.value].origin in ("call", "input"):
                num_bytes = tensor.bytes(placement)
                outputs[tensor.value] = max(num_bytes, outputs.get(tensor.value, 0))
                layers[placed.call.layer] += num_bytes
    largest = max(layers, key=lambda layer: layers[layer])
    name = f"layer {largest}" if largest else "what the network itself computes"
    parts = ""
    if mesh.stage_axis is None:  # else a device has some of the layers
        of_calls, of_parameters = size(sum(outputs.values())), size(int(parameters))
        parts = f" ({of_calls} for outputs of {len(outputs)} calls, {of_parameters} for parameters and gradients)"
    again = most(rank_memory(with_recomputed(placement, True), costs, staging)).total
    recompute = f"; with --recompute it needs {size(int(again))}" if again <= limit else ""
    more = "more devices" if mesh.stage_axis is None else "more stages on more devices"
    return TooLargeError(
        f"{what} needs {size(int(needed))} on a device{parts}, {size(int(needed - limit))} more than the "
        f"{size(int(limit))} there are; {name} takes most, {size(int(layers[largest]))}: use {more}, smaller "
        f"microbatches, smaller images, or a larger --memory-limit if the devices have more{recompute}",
        needed,
    )
