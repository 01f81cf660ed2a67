"""Strategies that are left out before a wide network is searched, as whole plans with them take too long by proof.

First by what the layers cost at least (`convoy.search.bounds`), then by tables of whole plans that are nowhere above
the true ones: the least sum with a strategy is a bound for every plan that has it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from convoy.plans.place import COMPUTE
from convoy.plans.rules import Batch
from convoy.search.bounds import kept, least_of_layers, possible, relaxed
from convoy.search.elimination import Elimination, TooWideError
from convoy.search.floor import Floor
from convoy.search.placing import Choice, Shared
from convoy.search.problem import Sent, assigned, build
from convoy.search.space import Strategy, used_axes
from convoy.search.ties import Groups, common

INTERESTING = 1.1
"""Where a mesh is too wide to be searched in full, plans are left out that take this much longer than one known."""

_RELAXED = 50_000


class UninterestingError(Exception):
    """No plan takes as little as `enough` seconds."""


@dataclass(frozen=True)
class Left:
    """What is left to choose from.

    Attributes:
        strategies: of every layer.
        floor: what plans take at least that divide the samples over fewer axes; None where that was too much to ask.
    """

    strategies: Mapping[str, Sequence[Strategy]]
    floor: Floor | None = None


@dataclass(frozen=True)
class Pruning:
    """Leaves strategies out, on one mesh and for one way to divide the samples.

    Attributes:
        shared: what is known of the graph on the mesh.
        batch: how the samples are divided.
        allowed: for every layer its strategies.
        outputs: names of the values that the network returns.
        groups: layers to be given one strategy together.
        enough: seconds beyond which a plan is of no interest.
        tolerance: by this share plans may take longer than the fastest and are kept all the same.
        limit: the most entries of a table.
        price: seconds of one plan.
    """

    shared: Shared
    batch: Batch
    allowed: Mapping[str, Sequence[Strategy]]
    outputs: Sequence[str]
    groups: Groups
    enough: float
    tolerance: float
    limit: int
    price: Callable[[Mapping[str, Strategy]], float]

    def left(self) -> Left:
        """What may be in a best plan.

        Raises:
            UninterestingError: nothing.
        """
        enough = self.enough
        if not np.isfinite(enough):
            enough = self.price({layer: self._plain(given) for layer, given in self.allowed.items()})
        least = least_of_layers(self.shared.prices, self.batch, self.allowed)
        most = enough * INTERESTING
        found = possible(least, self.allowed, self.groups, most)
        choices = [Choice(group, common(group, found)) for group in self.groups]
        # where many layers have one strategy together, the work alone says much, and asking what is sent takes long
        tied = any(len(group) > 1 for group in self.groups)
        rounds: Sequence[Sent] = (
            ("nothing",) if tied else ("nothing", "at least") if self.enough < np.inf else ("at least",)
        )
        try:
            for sent in rounds:
                problem = build(self.shared, self.batch, choices, self.outputs, sent=sent)
                inner = relaxed(problem.seconds, _RELAXED)
                elimination = Elimination([*inner, *relaxed(problem.ends, _RELAXED)], problem.sizes, self.limit)
                if elimination.least > self.enough:
                    raise UninterestingError(elimination.least)
        except TooWideError:
            return Left(found)
        floor = Floor(self.shared.prices.graph, self.batch, choices, inner, problem.sizes, most)
        layers = assigned(choices, elimination.assignment())
        if self._uses_all_axes(layers):
            enough = min(enough, self.price(layers))
        bounds = elimination.min_marginals()
        for v, choice in enumerate(choices):
            near = kept(choice.strategies, list(bounds[v]), enough * (1 + self.tolerance))
            found |= dict.fromkeys(choice.layers, near)
        return Left(found, floor)

    def _uses_all_axes(self, layers: Mapping[str, Strategy]) -> bool:
        ops = {call.layer: call.op for call in self.shared.prices.graph.calls if call.op in COMPUTE}
        return used_axes({layer: s for layer, s in layers.items() if layer in ops}, ops) == self.batch.axes

    def _plain(self, given: Sequence[Strategy]) -> Strategy:
        """Samples on all axes that may divide them, filters or rows on the others, as far as a layer can."""
        axes = self.batch.axes

        def rank(strategy: Strategy) -> tuple[int, int, int]:
            others = [each for axis, each in enumerate(strategy) if axis not in axes]
            return (
                sum(strategy[axis] != "sample" for axis in axes),
                sum(each not in ("filter", "height") for each in others),
                sum(each == "height" for each in others),
            )

        return min(given, key=rank)
