"""The least sum of tables that share variables, by eliminating one variable after the other (min-plus algebra).

Dechter, "Bucket Elimination: A Unifying Framework for Reasoning" (1999). What a chain, a residual block or a branch has
inside is eliminated by itself, so that a join costs the product of what meets there, not of all that lies before.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Scope = tuple[int, ...]  # variables, ascending

Numbers = NDArray[np.float64]


class TooWideError(Exception):
    """A table would be larger than allowed; `scope` are its variables."""

    def __init__(self, scope: Iterable[int]) -> None:
        super().__init__(f"a table over {sorted(scope)} is too large")
        self.scope = tuple(sorted(scope))


@dataclass(frozen=True)
class Table:
    """Numbers for every state of some variables, one dimension each; infinite where a state cannot be."""

    scope: Scope
    numbers: Numbers


@dataclass
class _Bucket:
    """What is added up before a variable is eliminated: tables and messages of earlier buckets."""

    variable: int
    scope: Scope
    tables: list[Table]
    children: list[int]
    message: Table | None = None


class Elimination:
    """Eliminates the variables of a sum of tables. A TooWideError where, in the best order found, a table has more
    entries than `limit`."""

    def __init__(self, tables: Sequence[Table], sizes: Mapping[int, int], limit: int) -> None:
        self._sizes = dict(sizes)
        self._buckets: list[_Bucket] = []
        merged = merged_by_scope(open_tables(tables, sizes))
        self._constant = float(sum(float(table.numbers) for table in merged if not table.scope))
        order = order_of([table.scope for table in merged], self._sizes, limit)
        self._place = {variable: place for place, (variable, _) in enumerate(order)}
        for variable, scope in order:
            self._buckets.append(_Bucket(variable, scope, [], []))
        for table in merged:
            if table.scope:
                self._buckets[min(self._place[v] for v in table.scope)].tables.append(table)
        self.least = self._constant
        for place, bucket in enumerate(self._buckets):
            self._collect(place, bucket)

    def _collect(self, place: int, bucket: _Bucket) -> None:
        axis = bucket.scope.index(bucket.variable)
        rest = bucket.scope[:axis] + bucket.scope[axis + 1 :]
        bucket.message = Table(rest, np.asarray(self._sum(bucket).min(axis=axis)))
        if rest:
            self._buckets[min(self._place[v] for v in rest)].children.append(place)
        else:
            self.least += float(bucket.message.numbers)

    def _sum(self, bucket: _Bucket) -> Numbers:
        parts = [*bucket.tables, *(self._message(child) for child in bucket.children)]
        # the small ones first: what broadcasts together is added before it grows
        parts.sort(key=lambda part: part.numbers.size)
        total = np.zeros([1] * len(bucket.scope))
        for part in parts:
            total = total + aligned(part.numbers, part.scope, bucket.scope)
        return np.array(np.broadcast_to(total, [self._sizes[v] for v in bucket.scope]))

    def _message(self, place: int) -> Table:
        message = self._buckets[place].message
        assert message is not None
        return message

    def assignment(self) -> dict[int, int]:
        """The states of a least sum, by variable; of equal ones the first."""
        states: dict[int, int] = {}
        for bucket in reversed(self._buckets):
            numbers = np.zeros(self._sizes[bucket.variable])
            for part in [*bucket.tables, *(self._message(child) for child in bucket.children)]:
                at = tuple(slice(None) if v == bucket.variable else states[v] for v in part.scope)
                numbers = numbers + part.numbers[at]
            states[bucket.variable] = int(np.argmin(numbers))
        return states

    def min_marginals(self) -> dict[int, Numbers]:
        """For every variable and each of its states the least sum with that state, all else as good as can be."""
        outside: list[Table | None] = [None] * len(self._buckets)
        elsewhere = {
            place: self.least - float(bucket.message.numbers)
            for place, bucket in enumerate(self._buckets)
            if bucket.message is not None and not bucket.message.scope
        }
        marginals: dict[int, Numbers] = {}
        for place in reversed(range(len(self._buckets))):
            bucket = self._buckets[place]
            above = outside[place]
            numbers = self._sum(bucket)
            if above is not None:
                numbers += aligned(above.numbers, above.scope, bucket.scope)
            else:
                numbers += elsewhere[place]
            axis = bucket.scope.index(bucket.variable)
            marginals[bucket.variable] = numbers.min(axis=tuple(a for a in range(numbers.ndim) if a != axis))
            for child in bucket.children:
                message = self._message(child)
                with np.errstate(invalid="ignore"):
                    left = numbers - aligned(message.numbers, message.scope, bucket.scope)
                left[np.isnan(left)] = np.inf  # what cannot be, with or without the message
                gone = tuple(a for a, v in enumerate(bucket.scope) if v not in message.scope)
                outside[child] = Table(message.scope, left.min(axis=gone) if gone else left)
        return marginals


def aligned(numbers: NDArray, scope: Scope, target: Scope) -> NDArray:
    """A view of an array over `scope` that broadcasts over `target`, which has all of its variables."""
    if scope == target:
        return numbers
    sizes = iter(numbers.shape)
    members = set(scope)
    return numbers.reshape([next(sizes) if v in members else 1 for v in target])


def open_tables(tables: Sequence[Table], sizes: Mapping[int, int]) -> list[Table]:
    """Tables without the variables that have only one state. Those decide nothing, but each would be a dimension, of
    which numpy broadcasts no more than 32."""
    opened = []
    for table in tables:
        closed = tuple(axis for axis, v in enumerate(table.scope) if sizes[v] == 1)
        scope = tuple(v for v in table.scope if sizes[v] != 1)
        opened.append(Table(scope, table.numbers.squeeze(axis=closed)) if closed else table)
    return opened


def merged_by_scope(tables: Sequence[Table]) -> list[Table]:
    """Tables of one scope added up."""
    by_scope: dict[Scope, list[Numbers]] = {}
    for table in tables:
        by_scope.setdefault(table.scope, []).append(table.numbers)
    return [Table(scope, np.asarray(sum(numbers[1:], start=numbers[0]))) for scope, numbers in by_scope.items()]


def order_of(scopes: Sequence[Scope], sizes: Mapping[int, int], limit: int) -> list[tuple[int, Scope]]:
    """Variables in the order in which they go, always the one with the smallest table next, each with that table's
    scope."""
    neighbours: dict[int, set[int]] = {v: {v} for v in sizes}
    for scope in scopes:
        for v in scope:
            neighbours[v].update(scope)

    def size(v: int) -> int:
        return math.prod(sizes[other] for other in neighbours[v])

    current = {v: size(v) for v in sizes}
    heap = [(number, v) for v, number in current.items()]
    heapq.heapify(heap)
    order = []
    while heap:
        number, v = heapq.heappop(heap)
        if current.get(v) != number:
            continue
        del current[v]
        members = neighbours.pop(v)
        if number > limit:
            raise TooWideError(members)
        order.append((v, tuple(sorted(members))))
        rest = members - {v}
        for other in rest:
            neighbours[other] |= rest
            neighbours[other].discard(v)
        for other in rest:
            current[other] = size(other)
            heapq.heappush(heap, (current[other], other))
    return order
