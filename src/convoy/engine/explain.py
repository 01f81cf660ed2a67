"""What a plan does with a parallelized network, as text for people."""

import math
from collections.abc import Sequence

from torch import nn

from convoy.engine.layerwise import Layerwise
from convoy.engine.network import network_of
from convoy.engine.stages import StagedNetwork
from convoy.ops.memory import memory_in_stages, predict_memory, what_is_recomputed
from convoy.plans.explain import explain as text_of_placement
from convoy.plans.explain import explanation, listed, setting_text, text_of, together
from convoy.plans.plan import Plan
from convoy.plans.schedule import bubble
from convoy.units import plural, rough_percent


def explain(net: nn.Module, samples: Sequence[int] | None = None) -> str:
    """The effect of a parallelized network's plan, layer by layer, as text.

    For every layer its strategy, how its output lies over the ranks, what is sent for its input, and the bytes that a
    rank sends and holds; which layers run whole on every rank, and why; how the network was captured. It holds for the
    mode that the network is in, and for as many samples on each rank as the example had, unless `samples` says
    otherwise. How long stages wait is said for the schedule of the last training pass. No rank waits for another.

    >>> print(convoy.explain(net))  # doctest: +ELLIPSIS
    plan sample=2
    training, 8 samples (4 + 4), 2 ranks, captured as one program
    <BLANKLINE>
    layer  work    strategy  gives                sent for its input  forward  backward  gradients  parameters
    0      conv    sample    samples over sample  -                         -         -      896 B       896 B
    ...

    Args:
        net: what `convoy.parallelize` returned.
        samples: number of samples of every sample rank, e.g. (96, 96, 64) where the batch is divided 3 : 3 : 2.

    Raises:
        ConvoyError: the network is not parallelized, or cannot run in this mode, or the batch is not divided into as
            many parts as `samples` says.
    """
    network = network_of(net)
    plan = network.plan if isinstance(network.plan, Plan) else None
    if isinstance(network, Layerwise):
        return _layer_by_layer(network, plan, net.training, samples)
    placement = network.example_placement(net.training, samples)
    staged = network.staged(placement)
    memory = predict_memory(placement) if staged is None else memory_in_stages(placement, staged)
    said = None if network.undivided else what_is_recomputed(placement, staged)
    notes = [] if said is None else [said]
    if staged is not None and isinstance(network, StagedNetwork):
        parts = network.example_parts(samples)
        share = rough_percent(bubble(network.schedule, parts, staged.number))
        notes.append(
            f"a rank's samples go through the stages in {plural(parts, 'part')}, schedule {network.schedule}: stages "
            f"of equal work wait {share} of the time"
        )
    return text_of_placement(placement, memory, plan, network.captured, staged, notes)


def _layer_by_layer(network: Layerwise, plan: Plan | None, training: bool, samples: Sequence[int] | None) -> str:
    parts = network.parts
    inside = {f"{name}.{key}" for name, part in parts.items() for key in part.shapes}
    outside = [name for name, _ in network.model.named_parameters() if name not in inside]
    rest = sum(math.prod(shape) * dtype.itemsize for shape, dtype in map(network.shapes.__getitem__, outside))
    placements = {name: part.example_placement(training, samples) for name, part in parts.items()}
    found = together(
        [(name, explanation(placement, predict_memory(placement), plan)) for name, placement in placements.items()],
        rest,
    )
    notes = ["between these layers every rank computes the whole batch: what is gathered for that is not counted"]
    for reason in dict.fromkeys(network.alone.values()):
        layers = [name for name, why in network.alone.items() if why == reason]
        notes.append(f"whole on every rank, as {reason}: {listed(layers)}")
    shares = network.example_samples(samples)
    setting = setting_text(training, shares, network.plan.mesh.num_devices, network.captured)
    return text_of(found, setting, f"plan {network.plan}", notes)
