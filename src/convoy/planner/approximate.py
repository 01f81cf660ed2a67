"""What methods that change the result would take instead of the exact exchange of gradients, under the same plan."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from convoy.planner.cost.prediction import Scored
from convoy.planner.cost.program import weights_of
from convoy.planner.planner import Planned
from convoy.plans.compression import Compression, rounds_of

_METHODS = ("bf16", "powersgd:4", "topk:0.01")
WORTH = 1.1  # gain from which on an approximate method is worth naming: below it, exact is as fast


@dataclass(frozen=True)
class Approximate:
    """One method, as `convoy train` takes it."""

    method: str
    update_s: float
    rounds: float  # of sending, in an update
    sent_bytes: float  # of a device in a round
    compress_s: float  # in a round


def approximations(planned: Planned, scored: Scored) -> tuple[Approximate, ...]:
    """The fastest first; none where the plan has stages, or no axis that divides samples alone."""
    mesh, axes, graph = scored.placement.mesh, scored.placement.batch.axes, scored.placement.graph
    layouts = scored.placement.layouts
    weights = [name for name in weights_of(scored.placement) if layouts[name].copied >= set(axes)]
    if scored.staging is not None or not axes or mesh.size(axes) == 1 or not weights:
        return ()
    origin = (0,) * len(mesh.sizes)
    shapes = [layouts[name].local_shape(graph.values[name].shape, mesh, origin) for name in weights]
    num_bytes = sum(scored.placement.local_bytes(name, 0) for name in weights)
    itemsize = max(1, num_bytes // max(1, sum(map(prod, shapes))))
    link, ranks = planned.costs.link(mesh, axes), mesh.size(axes)
    # Without the exchange of gradients, and what it takes from the cores that compute; both are that of layers, too,
    # where the plan divides some: then this is too little, and the methods look faster than they are.
    alone_s = scored.seconds - scored.timeline.summary().gradients - scored.timeline.contention()

    def rows() -> Iterator[Approximate]:
        optimizer_s = planned.costs.update.seconds(num_bytes, len(weights))
        for text in _METHODS:
            how = Compression.parse(text)
            message = how.message_bytes(shapes, itemsize)
            sends_s = link.exchange((ranks - 1) * message) if how.kind == "topk" else link.all_reduce(message)
            compress_s = how.passes * optimizer_s
            sent = how.sent_bytes(shapes, itemsize, ranks)
            yield Approximate(f"--gradient-compression {text}", alone_s + sends_s + compress_s, 1.0, sent, compress_s)
        averages_s = link.all_reduce(num_bytes) + optimizer_s
        sent = 2 * (ranks - 1) / ranks * num_bytes
        for staleness, more in ((0, ""), (1, " --set parallel.averaging.staleness=1")):
            every = rounds_of(averages_s / alone_s, staleness)
            seconds = alone_s + (optimizer_s if staleness and link.overlap else averages_s) / every
            yield Approximate(f"--local-sgd {every}{more}", seconds, 1 / every, sent, 0.0)

    return tuple(sorted(rows(), key=lambda row: row.update_s))
