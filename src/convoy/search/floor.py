"""What plans take at least that divide the samples over fewer axes, from the tables of those that use more of them.

The two differ only in where the network's inputs lie, where its outputs have to be, and in what the layers may have.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convoy.graph.graph import Graph
from convoy.plans.mesh import Axes
from convoy.plans.rules import Batch
from convoy.search.elimination import Elimination, Table
from convoy.search.fewest import restricted
from convoy.search.placing import Choice

_LIMIT = 20_000_000


@dataclass(frozen=True)
class Floor:
    """A sum of tables that no plan falls below, without what is sent at the ends of the network.

    Attributes:
        graph: the network.
        batch: how its samples are divided where the tables hold.
        choices: what the layers may have there; what is left out takes more than `most` seconds.
        tables: seconds, inputs and outputs aside.
        sizes: number of states of every variable.
        most: seconds, beyond which nothing is known.
    """

    graph: Graph
    batch: Batch
    choices: Sequence[Choice]
    tables: Sequence[Table]
    sizes: Mapping[int, int]
    most: float

    def of(self, batch: Batch) -> float:
        """Seconds for another batch over some of the axes; 0 where nothing is known."""
        if not self._holds(batch):
            return 0.0
        left_out = set(self.batch.axes) - set(batch.axes)
        kept = {v: list(range(size)) for v, size in self.sizes.items()}
        for v, choice in enumerate(self.choices):
            kept[v] = [n for n, s in enumerate(choice.strategies) if all(s[axis] != "sample" for axis in left_out)]
            if not kept[v]:  # all that the layer may have there was left out
                return self.most
        sizes = {v: len(states) for v, states in kept.items()}
        return min(self.most, Elimination(restricted(self.tables, kept), sizes, _LIMIT).least)

    def _holds(self, batch: Batch) -> bool:
        """Whether each rank has as many samples, and where inputs lie matters to no more than sending them.

        Which samples a rank has is a matter of their order, and no cost knows of it.
        """
        inputs = set(self.graph.inputs)
        if any(call.op != "conv" for call in self.graph.calls if inputs.intersection(call.inputs)):
            return False
        axes = [sub for count in range(1, len(batch.axes) + 1) for sub in itertools.combinations(batch.axes, count)]
        return set(batch.axes) <= set(self.batch.axes) and all(_sizes(self.batch, a) == _sizes(batch, a) for a in axes)


def _sizes(batch: Batch, axes: Axes) -> list[int]:
    split = batch.split(axes)
    return [len(part) for part in split.parts] if split else []
