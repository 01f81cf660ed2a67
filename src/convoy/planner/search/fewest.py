"""Of all states whose sum of seconds is at most so much, those with the smallest count of something.

As `convoy.planner.search.elimination`, but every entry of a table is a vector: the least seconds for each count. Two
of them are combined by a min-plus convolution, so that the answer is exact, however counts and seconds trade.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from convoy.planner.search.elimination import Numbers, Scope, Table, aligned, open_tables, order_of


@dataclass
class _Bucket:
    """What is combined before a variable is eliminated; messages have one more dimension, the count."""

    variable: int
    scope: Scope
    seconds: list[Table] = field(default_factory=list)
    counts: list[Table] = field(default_factory=list)
    children: list[int] = field(default_factory=list)
    message: Table | None = None


def restricted(tables: Sequence[Table], kept: Mapping[int, Sequence[int]]) -> list[Table]:
    """Tables over some of the states of each variable."""
    return [Table(table.scope, table.numbers[np.ix_(*(kept[v] for v in table.scope))]) for table in tables]


def fewest(
    seconds: Sequence[Table], counts: Sequence[Table], sizes: Mapping[int, int], budget: float, most: int, limit: int
) -> dict[int, int] | None:
    """The states with the least count that keep the budget, and of these the ones with the least seconds; None where
    none does. `most` is the count of states that are known to keep it. A TooWideError where a table would have more
    entries than `limit`."""
    return _Counting(seconds, counts, sizes, most, limit).best(budget)


class _Counting:
    def __init__(
        self, seconds: Sequence[Table], counts: Sequence[Table], sizes: Mapping[int, int], most: int, limit: int
    ) -> None:
        self._sizes = sizes
        self._most = most
        seconds, counts = open_tables(seconds, sizes), open_tables(counts, sizes)
        order = order_of([table.scope for table in (*seconds, *counts)], sizes, limit // (most + 1))
        self._place = {variable: place for place, (variable, _) in enumerate(order)}
        self._buckets = [_Bucket(variable, scope) for variable, scope in order]
        self._roots: list[int] = []
        self._constant = self._none()
        for table in seconds:
            if table.scope:
                self._at(table.scope).seconds.append(table)
            else:
                self._constant = self._constant + table.numbers
        for table in counts:
            if table.scope:
                self._at(table.scope).counts.append(table)
            else:
                self._constant = _shifted(self._constant, table.numbers)
        for place, bucket in enumerate(self._buckets):
            axis = bucket.scope.index(bucket.variable)
            rest = bucket.scope[:axis] + bucket.scope[axis + 1 :]
            total = self._own(bucket, {})
            for child in bucket.children:
                total = _convolved(total, self._message(child, bucket, {}))
            shape = (*(self._sizes[v] for v in bucket.scope), self._most + 1)
            bucket.message = Table(rest, np.broadcast_to(total, shape).min(axis=axis))
            (self._at(rest).children if rest else self._roots).append(place)

    def _at(self, scope: Scope) -> _Bucket:
        return self._buckets[min(self._place[v] for v in scope)]

    def _none(self) -> Numbers:
        return np.where(np.arange(self._most + 1) == 0, 0.0, np.inf)

    def _own(self, bucket: _Bucket, fixed: Mapping[int, int]) -> Numbers:
        """The bucket's own tables, over all of its scope or, with all others fixed, over its variable alone."""
        total = np.broadcast_to(self._none(), [1] * (1 if fixed else len(bucket.scope)) + [self._most + 1])
        for table in bucket.seconds:
            total = total + self._view(table.numbers, table.scope, bucket, fixed)[..., None]
        for table in bucket.counts:
            total = _shifted(total, self._view(table.numbers, table.scope, bucket, fixed))
        return total

    def _message(self, place: int, bucket: _Bucket, fixed: Mapping[int, int]) -> Numbers:
        message = self._buckets[place].message
        assert message is not None
        return self._view(message.numbers, message.scope, bucket, fixed)

    @staticmethod
    def _view(numbers: Numbers, scope: Scope, bucket: _Bucket, fixed: Mapping[int, int]) -> Numbers:
        if fixed:
            at = tuple(slice(None) if v == bucket.variable else fixed[v] for v in scope)
            part: Numbers = numbers[at]
            return part
        if numbers.ndim == len(scope):
            return aligned(numbers, scope, bucket.scope)
        sizes = iter(numbers.shape)
        return numbers.reshape([*(next(sizes) if v in scope else 1 for v in bucket.scope), numbers.shape[-1]])

    def best(self, budget: float) -> dict[int, int] | None:
        roots = [self._buckets[place].message for place in self._roots]
        sums = [self._constant]
        for message in roots:
            assert message is not None
            sums.append(_convolved(sums[-1], message.numbers))
        within = np.flatnonzero(sums[-1] <= budget)
        if not len(within):
            return None
        counts: dict[int, int] = {}
        left = int(within[0])
        for place, message, before in zip(reversed(self._roots), reversed(roots), reversed(sums[:-1]), strict=True):
            assert message is not None
            counts[place] = _part(before, message.numbers, left)
            left -= counts[place]
        states: dict[int, int] = {}
        for place in reversed(range(len(self._buckets))):
            bucket, left = self._buckets[place], counts[place]
            fixed = {**states, bucket.variable: 0}
            sums = [self._own(bucket, fixed)]
            messages = [self._message(child, bucket, fixed) for child in bucket.children]
            for message_numbers in messages:
                sums.append(_convolved(sums[-1], message_numbers))
            last = np.broadcast_to(sums[-1], (self._sizes[bucket.variable], self._most + 1))
            state = states[bucket.variable] = int(np.argmin(last[:, left]))
            for child, numbers, before in zip(
                reversed(bucket.children), reversed(messages), reversed(sums[:-1]), strict=True
            ):
                counts[child] = _part(before[min(state, len(before) - 1)], numbers[state], left)
                left -= counts[child]
        return states


def _shifted(total: Numbers, counts: Numbers) -> Numbers:
    """Vectors by count, after so many more."""
    shifted = np.full(np.broadcast_shapes(total.shape, (*counts.shape, 1)), np.inf)
    length = total.shape[-1]
    for count in np.unique(counts).astype(int).tolist():
        if count < length:
            moved = np.full(total.shape, np.inf)
            moved[..., count:] = total[..., : length - count]
            shifted = np.where((counts == count)[..., None], moved, shifted)
    return shifted


def _convolved(first: Numbers, second: Numbers) -> Numbers:
    """Vectors by count of both together: the least sum over all ways to share a count."""
    finite = [np.flatnonzero(np.isfinite(part).reshape(-1, part.shape[-1]).any(axis=0)) for part in (first, second)]
    if len(finite[0]) < len(finite[1]):
        first, second, finite = second, first, finite[::-1]
    length = first.shape[-1]
    sums = np.full(np.broadcast_shapes(first.shape, second.shape), np.inf)
    for count in finite[1].tolist():
        part = first[..., : length - count] + second[..., count : count + 1]
        np.minimum(sums[..., count:], part, out=sums[..., count:])
    return sums


def _part(first: Numbers, second: Numbers, count: int) -> int:
    return int(np.argmin(first[count::-1][: count + 1] + second[: count + 1]))
