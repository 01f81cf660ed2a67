"""The least sum of tables that share variables, by eliminating one variable after the other (min-plus algebra).

Dechter, "Bucket Elimination: A Unifying Framework for Reasoning" (1999). What a chain, a residual block or a branch has
inside is eliminated by itself, so that a join costs the product of what meets there, not of all that lies before.

Entries are vectors: the least sum for each number of times that something happens. Two of them are combined by a
min-plus convolution, so that of all states within a budget those with the smallest count are exact, however counts and
sums trade. A price for each count would find only states on the convex hull of sums and counts: two of the golden plans
changed so, ResNet-50 on 2×2 to one that is predicted to take 2.7 % longer. Where nothing is counted the vectors have
one element.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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
    """Numbers for every state of some variables, one dimension each; infinite where a state cannot be. In buckets they
    have one more dimension, the count."""

    scope: Scope
    numbers: Numbers


@dataclass
class _Bucket:
    """What is combined before a variable is eliminated: tables, and messages of earlier buckets (`children`)."""

    scope: Scope
    variable: int
    tables: list[Table] = field(default_factory=list)
    children: list[int] = field(default_factory=list)
    message: Table = field(default_factory=lambda: Table((), np.zeros(1)))

    @property
    def axis(self) -> int:
        return self.scope.index(self.variable)


class Elimination:
    """Eliminates the variables of a sum of tables. `counts` are tables of whole numbers, and up to `most` of them
    together are told apart. A TooWideError where, in the best order found, a table has more entries than `limit`."""

    def __init__(
        self, tables: Sequence[Table], sizes: Mapping[int, int], limit: int, counts: Sequence[Table] = (), most: int = 0
    ) -> None:
        self._sizes, self._length = dict(sizes), most + 1
        parts = [Table(table.scope, table.numbers[..., None]) for table in _merged(tables, sizes)]
        parts += [Table(table.scope, _by_count(table.numbers)) for table in _merged(counts, sizes)]
        order = order_of([part.scope for part in parts], self._sizes, limit // self._length)
        place = {variable: number for number, (variable, _) in enumerate(order)}
        # the last bucket has no variable: there is what depends on none
        self._buckets = [*(_Bucket(scope, variable) for variable, scope in order), _Bucket((), -1)]
        for part in parts:
            self._buckets[min((place[v] for v in part.scope), default=-1)].tables.append(part)
        for number, bucket in enumerate(self._buckets[:-1]):
            rest = tuple(v for v in bucket.scope if v != bucket.variable)
            bucket.message = Table(rest, self._sum(bucket).min(axis=bucket.axis))
            self._buckets[min((place[v] for v in rest), default=-1)].children.append(number)
        self._totals = self._sum(self._buckets[-1])
        self.least = float(self._totals.min())

    def _parts(self, bucket: _Bucket) -> list[Table]:
        return [*bucket.tables, *(self._buckets[child].message for child in bucket.children)]

    def _sum(self, bucket: _Bucket) -> Numbers:
        total = np.zeros([1] * (len(bucket.scope) + 1))
        # the small ones first: what broadcasts together is added before it grows
        for part in sorted(self._parts(bucket), key=lambda part: part.numbers.size):
            total = _plus(total, aligned(part.numbers, part.scope, bucket.scope), self._length)
        return np.broadcast_to(total, [*(self._sizes[v] for v in bucket.scope), total.shape[-1]])

    def assignment(self, budget: float = math.inf) -> dict[int, int] | None:
        """The states with the smallest count whose sum keeps a budget, and of these those with the least sum; of equal
        ones the first. None where none keep it."""
        within = np.flatnonzero(self._totals <= budget)
        if not len(within):
            return None
        states: dict[int, int] = {}
        counts = {len(self._buckets) - 1: int(within[0])}
        for place in reversed(range(len(self._buckets))):
            bucket, count = self._buckets[place], counts[place]
            parts = [
                part.numbers[tuple(slice(None) if v == bucket.variable else states[v] for v in part.scope)]
                for part in self._parts(bucket)
            ]
            sums = [np.zeros((self._sizes.get(bucket.variable, 1), 1))]
            for part in parts:
                sums.append(_plus(sums[-1], part, self._length))
            state = int(np.argmin(sums[-1][:, count]))
            if bucket.scope:
                states[bucket.variable] = state
            owners = [*(-1 for _ in bucket.tables), *bucket.children]
            for owner, part, before in zip(reversed(owners), reversed(parts), reversed(sums[:-1]), strict=True):
                vector = np.broadcast_to(part, (len(before), part.shape[-1]))[state]
                shares = range(max(0, count - before.shape[-1] + 1), min(count + 1, len(vector)))
                counts[owner] = min(shares, key=lambda share: before[state, count - share] + vector[share])
                count -= counts[owner]
        return states

    def min_marginals(self) -> dict[int, Numbers]:
        """For every variable and each of its states the least sum with that state, all else as good as can be, where
        nothing is counted."""
        outside: dict[int, Table] = {
            child: Table((), self._totals - self._buckets[child].message.numbers)
            for child in self._buckets[-1].children
        }
        marginals: dict[int, Numbers] = {}
        for place in reversed(range(len(self._buckets) - 1)):
            bucket = self._buckets[place]
            numbers = self._sum(bucket) + aligned(outside[place].numbers, outside[place].scope, bucket.scope)
            marginals[bucket.variable] = _least(numbers, bucket.scope, (bucket.variable,))[:, 0]
            for child in bucket.children:
                message = self._buckets[child].message
                with np.errstate(invalid="ignore"):
                    left = numbers - aligned(message.numbers, message.scope, bucket.scope)
                left[np.isnan(left)] = np.inf  # what cannot be, with or without the message
                outside[child] = Table(message.scope, _least(left, bucket.scope, message.scope))
        return marginals


def _plus(first: Numbers, second: Numbers, length: int) -> Numbers:
    """Vectors by count of both together, up to a length: the least sum over all ways to share a count."""
    if first.shape[-1] < second.shape[-1]:
        first, second = second, first
    if second.shape[-1] == 1:
        return first + second
    length = min(length, first.shape[-1] + second.shape[-1] - 1)
    sums = np.full((*np.broadcast_shapes(first.shape[:-1], second.shape[:-1]), length), np.inf)
    for count in range(min(length, second.shape[-1])):
        column = second[..., count : count + 1]
        if np.isfinite(column).any():
            part = first[..., : length - count] + column
            end = count + part.shape[-1]
            np.minimum(sums[..., count:end], part, out=sums[..., count:end])
    return sums


def _by_count(counts: Numbers) -> Numbers:
    """Vectors by count for states that each have one."""
    vectors: Numbers = np.where(counts[..., None] == np.arange(counts.max(initial=0) + 1), 0.0, np.inf)
    return vectors


def _least(numbers: Numbers, scope: Scope, kept: Scope) -> Numbers:
    """The least over all variables but some."""
    least: Numbers = numbers.min(axis=tuple(axis for axis, v in enumerate(scope) if v not in kept))
    return least


def aligned(numbers: NDArray, scope: Scope, target: Scope) -> NDArray:
    """A view of an array over `scope`, and perhaps more dimensions, that broadcasts over `target`, which has all of its
    variables."""
    if scope == target:
        return numbers
    sizes = iter(numbers.shape)
    members = set(scope)
    return numbers.reshape([*[next(sizes) if v in members else 1 for v in target], *sizes])


def restricted(tables: Sequence[Table], kept: Mapping[int, Sequence[int]]) -> list[Table]:
    """Tables over some of the states of each variable."""
    return [Table(table.scope, table.numbers[np.ix_(*(kept[v] for v in table.scope))]) for table in tables]


def _merged(tables: Sequence[Table], sizes: Mapping[int, int]) -> Iterator[Table]:
    """Tables of one scope added up, without the variables that have only one state. Those decide nothing, but each
    would be a dimension, of which numpy broadcasts no more than 32."""
    by_scope: dict[Scope, list[Numbers]] = {}
    for table in tables:
        closed = tuple(axis for axis, v in enumerate(table.scope) if sizes[v] == 1)
        scope = tuple(v for v in table.scope if sizes[v] != 1)
        by_scope.setdefault(scope, []).append(table.numbers.squeeze(axis=closed) if closed else table.numbers)
    return (Table(scope, np.asarray(sum(numbers[1:], start=numbers[0]))) for scope, numbers in by_scope.items())


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
