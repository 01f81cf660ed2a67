"""What if: the same plan, predicted again with one thing other than it is."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from convoy.errors import ConvoyError
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.link import Curve, Link, Links, Ranks
from convoy.planner.cost.local_op import Piece
from convoy.planner.cost.step import predict
from convoy.planner.cost.times import LayerTimes, Times
from convoy.planner.layers import Layer, alternatives
from convoy.planner.planner import Planned, Scored

Kind = Literal["links", "batch", "strategy", "compute", "optimizer", "input"]
_LAYERS = 3
"""Layers that are tried with other strategies: those that keep others waiting longest."""


@dataclass(frozen=True)
class Change:
    """One thing that could be other than it is.

    Attributes:
        text: what, as a noun.
        gain: how many times as many samples a second there would be.
        seconds: of an update.
    """

    kind: Kind
    text: str
    gain: float
    seconds: float


def changes(planned: Planned, scored: Scored, layers: tuple[Layer, ...]) -> tuple[Change, ...]:
    """What would make the plan faster, the most helpful first; what would not is left out."""
    found = [change for change in _all(planned, scored, layers) if change.gain > 1.005]
    return tuple(sorted(found, key=lambda change: -change.gain))


def _all(planned: Planned, scored: Scored, layers: tuple[Layer, ...]) -> Iterator[Change]:
    workload, costs, total = planned.workload, planned.costs, scored.seconds

    def again(kind: Kind, text: str, other: Costs) -> Change:
        seconds = predict(scored.placement, other, workload.passes).total
        return Change(kind, text, total / seconds if seconds else 1.0, seconds)

    if any(span.task.stream != "compute" for span in scored.timeline.spans):
        yield again("links", "links twice as fast", replace(costs, links=faster(costs.links, 2.0)))
    yield from _batch(planned, scored)
    waiting = sorted((layer for layer in layers if layer.exposed > 0), key=lambda layer: -layer.exposed)
    for name, other in alternatives(planned, scored, [layer.name for layer in waiting[:_LAYERS]]).items():
        seconds = total + other.seconds
        yield Change("strategy", f"{name or 'the network'} by {','.join(other.strategy)}", total / seconds, seconds)
    yield again("compute", "devices that compute the layers twice as fast", replace(costs, times=_Faster(costs.times)))
    updating = min(one.timeline.by_kind().get("update", 0.0) for one in (scored, planned.serial))
    update = replace(costs.update, fixed=costs.update.fixed - updating / 2)
    yield again("optimizer", "an optimizer that is twice as fast", replace(costs, update=update))
    given = costs.input
    if given.per_pass or given.per_sample:
        given = replace(given, per_pass=given.per_pass / 2, per_sample=given.per_sample / 2)
        yield again("input", "input that is ready twice as fast", replace(costs, input=given))


def _batch(planned: Planned, scored: Scored) -> Iterator[Change]:
    """Twice the batch: in twice as many passes where there are several, in a larger pass where there is one."""
    workload, costs = planned.workload, planned.costs
    if workload.passes > 1:
        seconds = predict(scored.placement, costs, 2 * workload.passes).total
    elif workload.resized is not None:
        try:
            seconds = predict(workload.resized(2 * workload.samples).place(scored.plan), costs).total
        except ConvoyError:
            return
    else:
        return
    batch = 2 * workload.samples * workload.passes
    yield Change("batch", f"a batch of {batch} (another training)", 2 * scored.seconds / seconds, seconds)


def faster(links: Links, factor: float) -> Links:
    """Links that carry every message in 1/`factor` of the time."""
    otherwise = links.otherwise
    return Links(
        {ranks: _faster_link(link, factor) for ranks, link in links.measured.items()},
        None if otherwise is None else lambda ranks: _faster_link(_ask(otherwise, ranks), factor),
    )


def _ask(otherwise: object, ranks: Ranks) -> Link:
    found = otherwise(ranks)  # type: ignore[operator]
    assert isinstance(found, Link)
    return found


def _faster_link(link: Link, factor: float) -> Link:
    def faster(curve: Curve) -> Curve:
        return Curve(tuple((size, seconds / factor) for size, seconds in curve.points))

    return replace(
        link,
        all_reduce=faster(link.all_reduce),
        exchange=faster(link.exchange),
        reduce_scatter=link.reduce_scatter and faster(link.reduce_scatter),
        gather=link.gather and faster(link.gather),
    )


@dataclass(frozen=True)
class _Faster:
    """Times of a device twice as fast."""

    times: LayerTimes

    def __call__(self, piece: Piece, /) -> Times:
        return self.times(piece) * 0.5
