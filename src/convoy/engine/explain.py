"""What a plan does with a parallelized network, as text for people."""

from collections.abc import Sequence

from torch import nn

from convoy.engine.network import network_of
from convoy.engine.stages import StagedNetwork
from convoy.engine.uncaptured import Uncaptured
from convoy.ops.memory import memory_in_stages, predict_memory, what_is_recomputed
from convoy.plans.schedule import bubble
from convoy.plans.traffic import explain as text_of_placement
from convoy.plans.traffic import setting_text
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
    if isinstance(network, Uncaptured):
        shares = network.example_samples(samples)
        setting = setting_text(net.training, shares, network.plan.mesh.num_devices, network.captured)
        return f"plan {network.plan}\n{setting}\n\nevery rank runs all layers on the whole batch"
    placement = network.example_placement(net.training, samples)
    staged = network.staged(placement)
    memory = predict_memory(placement) if staged is None else memory_in_stages(placement, staged)
    recomputed_text = None if network.undivided else what_is_recomputed(placement, staged)
    notes = [] if recomputed_text is None else [recomputed_text]
    if staged is not None and isinstance(network, StagedNetwork):
        parts = network.example_parts(samples)
        share = rough_percent(bubble(network.schedule, parts, staged.number))
        notes.append(
            f"a rank's samples go through the stages in {plural(parts, 'part')}, schedule {network.schedule}: stages "
            f"of equal work wait {share} of the time"
        )
    return text_of_placement(placement, memory, network.plan, network.captured, staged, notes)
