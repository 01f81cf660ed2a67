"""The fixed binary tree in which the microbatches of an update are added, whoever has computed them.

The tree of n leaves has the tree of the first 2^m leaves on the left, 2^m being the largest power of two below n, and
that of the others on the right. Adding neighbours as one carries in binary counting (`GradientTree`) gives the same
sums.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

Span = tuple[int, int]
T = TypeVar("T")


def middle(span: Span) -> int:
    """Where the tree over the leaves `span[0]` to `span[1]` divides."""
    first, last = span
    return first + (1 << (last - first - 1).bit_length() - 1)


def subtrees(leaves: range, total: int) -> list[Span]:
    """The largest parts of the tree over `total` leaves that consist of the given consecutive leaves, in order."""

    def within(span: Span) -> list[Span]:
        first, last = max(span[0], leaves.start), min(span[1], leaves.stop)
        if first >= last:
            return []
        if (first, last) == span:
            return [span]
        half = middle(span)
        return within((span[0], half)) + within((half, span[1]))

    return within((0, total))


class TreeSum(Generic[T]):
    """Adds parts of the tree that come from left to right, as soon as neighbours belong together.

    Args:
        total: number of leaves.
        add: gives the sum of a left and a right part.
    """

    def __init__(self, total: int, add: Callable[[T, T], T]) -> None:
        self._total = total
        self._add = add
        self._parts: list[tuple[Span, T]] = []

    def put(self, span: Span, value: T) -> None:
        """The next part."""
        while self._parts and self._siblings(self._parts[-1][0], span):
            left, partial = self._parts.pop()
            span, value = (left[0], span[1]), self._add(partial, value)
        self._parts.append((span, value))

    def take(self) -> list[tuple[Span, T]]:
        """The sums that could be made, from left to right: one where all leaves are there. Begins anew."""
        parts, self._parts = self._parts, []
        return parts

    def _siblings(self, left: Span, right: Span) -> bool:
        """Whether two adjacent parts are the two halves of one part of the tree."""
        if left[1] != right[0]:
            return False
        span = (0, self._total)
        while span[0] < span[1]:
            half = middle(span)
            if half == left[1]:
                return span == (left[0], right[1])
            span = (span[0], half) if left[1] < half else (half, span[1])
        return False
