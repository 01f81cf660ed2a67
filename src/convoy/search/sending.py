"""What it takes to bring tensors to those who use them, and to keep them for the backward pass, for every state."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from convoy.graph.graph import Value
from convoy.search.elimination import Scope, aligned
from convoy.search.placing import Shared, check_grid
from convoy.search.prices import NOWHERE
from convoy.search.states import Ids, Known, relabelled


@dataclass(frozen=True)
class Sending:
    """What some uses of a value take, over the variables that they depend on.

    Attributes:
        seconds: of what is sent.
        count: of redistributions: layouts, other than the one in which it lies, in which the value is wanted.
    """

    scope: Scope
    seconds: NDArray[np.float64]
    count: NDArray[np.float64]


class Tensors:
    """The uses of tensors, as tables.

    Args:
        shared: of the graph and mesh.
        sizes: number of states of every variable.
    """

    def __init__(self, shared: Shared, sizes: dict[int, int]) -> None:
        self._shared = shared
        self._prices = shared.prices
        self._sizes = sizes

    def sent(self, value: Value, here: Known, uses: Sequence[Known], apart: bool = False) -> list[Sending]:
        """What it takes to bring a value to all who use it: once for those that want it in the same layout.

        Args:
            value: the tensor.
            here: where it lies.
            uses: where it is wanted.
            apart: each of those that may want the same by itself, with its part of it: a lower bound over fewer
                variables.
        """
        found = []
        for group in _that_share(uses, here):
            for members in [[use] for use in group] if apart else [group]:
                scope = tuple(sorted({*here.scope, *(v for use in members for v in use.scope)}))
                key = (
                    (value.shape, value.dtype.itemsize, value.name in self._prices.differentiable),
                    tuple((known.key, *map(scope.index, known.scope)) for known in (here, *members)),
                )
                if key not in self._shared.tables:
                    self._shared.tables[key] = self._distinct(value, here, members, scope)
                seconds, count = self._shared.tables[key]
                share = len(group) if apart else 1
                found.append(Sending(scope, seconds / share if share > 1 else seconds, count))
        return found

    def _distinct(
        self, value: Value, here: Known, uses: Sequence[Known], scope: Scope
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        shape = self._grid(scope)
        total, count = np.zeros(shape), np.zeros(shape)
        source = aligned(here.ids, here.scope, scope)
        wanted = [aligned(use.ids, use.scope, scope) for use in uses]
        for place, target in enumerate(wanted):
            once = (source != target) & (source != NOWHERE) & (target != NOWHERE)
            for other in wanted[:place]:
                once = once & (other != target)
            if once.any():
                total += np.where(once, self._seconds(value, source, target), 0.0)
                count += once
        return total, count

    def _seconds(self, value: Value, source: Ids, target: Ids) -> NDArray[np.float64]:
        """Of each pair of layouts, as arrays that broadcast."""
        (left, left_at), (right, right_at) = relabelled(source), relabelled(target)
        present = np.zeros((len(left), len(right)), bool)
        present[left_at, right_at] = True
        table = np.zeros(present.shape)
        sources, targets = left.tolist(), right.tolist()
        for a, b in np.argwhere(present).tolist():
            table[a, b] = self._prices.transfer(sources[a], targets[b], value)
        return table[left_at, right_at]

    def kept(self, value: Value, keeps: Sequence[Known]) -> list[tuple[Scope, NDArray[np.float64]]]:
        """Bytes for what several calls keep of a value: once for each layout."""
        uses = list({(use.scope, use.key): use for use in keeps}.values())
        nowhere = Known((), np.array(NOWHERE - 1), -1)
        found = []
        for group in _that_share(uses, nowhere):
            scope = tuple(sorted({v for use in group for v in use.scope}))
            total = np.zeros(self._grid(scope))
            places = [aligned(self._places(value, use.ids), use.scope, scope) for use in group]
            for at, (use, place) in enumerate(zip(group, places, strict=True)):
                numbers = [0 if n == NOWHERE else self._prices.kept(int(n), value)[1] for n in use.ids.ravel()]
                held = np.array(numbers, float).reshape(use.ids.shape)
                again = np.zeros((), bool)
                for other in places[:at]:
                    again = again | (other == place)
                total += np.where(again, 0.0, aligned(held, use.scope, scope))
            found.append((scope, total))
        return found

    def _places(self, value: Value, ids: Ids) -> Ids:
        numbers = [NOWHERE if n == NOWHERE else self._prices.kept(int(n), value)[0] for n in ids.ravel()]
        return np.array(numbers, np.int64).reshape(ids.shape)

    def _grid(self, scope: Scope) -> tuple[int, ...]:
        return check_grid(scope, [self._sizes[v] for v in scope])


def _that_share(uses: Sequence[Known], here: Known) -> list[list[Known]]:
    """Uses that may want a value in the same layout, other than where it is, together; the same use but once."""
    groups: list[tuple[set[int], list[Known]]] = []
    alone = {int(here.ids)} if not here.scope else set()
    for known in {(use.scope, use.key): use for use in uses}.values():
        wanted = set(relabelled(known.ids)[0].tolist()) - alone - {NOWHERE}
        if not wanted:
            continue
        joined = [group for group in groups if group[0] & wanted]
        groups = [group for group in groups if not group[0] & wanted]
        members = [other for group in joined for other in group[1]] + [known]
        groups.append((wanted.union(*(group[0] for group in joined)), members))
    return [members for _, members in groups]
