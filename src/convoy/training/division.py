"""Which microbatches of a global batch each sample rank computes, in which passes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from convoy.engine.coupling import microbatch_sizes
from convoy.errors import ConvoyError
from convoy.plans.layout import proportional


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass, of all sample ranks at once.

    Attributes:
        microbatches: sizes of those of each sample rank.
        parts: positions in the global batch of each rank's samples, the microbatches' one after another.
    """

    microbatches: tuple[tuple[int, ...], ...]
    parts: tuple[range, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of all ranks' microbatches, in the order of the ranks."""
        return tuple(size for own in self.microbatches for size in own)

    @property
    def positions(self) -> list[int]:
        """Positions in the global batch of all ranks' samples, in the same order."""
        return [position for part in self.parts for position in part]


@dataclass(frozen=True)
class Division:
    """A global batch over sample ranks: each takes consecutive microbatches.

    Attributes:
        sizes: samples of every microbatch.
        counts: how many microbatches each rank takes.
    """

    sizes: tuple[int, ...]
    counts: tuple[int, ...]

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate(self.sizes, initial=0))

    def microbatches(self, rank: int) -> range:
        """The numbers of a rank's microbatches."""
        start = sum(self.counts[:rank])
        return range(start, start + self.counts[rank])

    def positions(self, rank: int) -> range:
        """A rank's positions in the global batch."""
        own = self.microbatches(rank)
        return range(self._starts[own.start], self._starts[own.stop])

    def passes(self, merge: int, late: bool = False) -> list[Pass]:
        """The passes of an update, as many for every rank; a rank with too few microbatches has none in the last.

        Args:
            merge: microbatches that may run together.
            late: it has none in the first instead, so that all have something in the last, which exchanges gradients.
        """
        num = max(-(-count // merge) for count in self.counts)
        return [self._pass(number, num, late) for number in range(num)]

    def _pass(self, number: int, num: int, late: bool) -> Pass:
        sizes, parts = [], []
        for rank in range(len(self.counts)):
            own = self.microbatches(rank)
            size, larger = divmod(len(own), num)
            first = num - larger if late else 0  # of the passes with one more
            start = own.start + number * size + min(max(0, number - first), larger)
            end = start + size + (first <= number < first + larger)
            sizes.append(self.sizes[start:end])
            parts.append(range(self._starts[start], self._starts[end]))
        return Pass(tuple(sizes), tuple(parts))


def divide(sizes: tuple[int, ...], num_ranks: int, shares: Sequence[float] | None = None) -> Division:
    """Give each rank its microbatches: as even as can be, or in proportion to `shares`.

    >>> division = divide((32,) * 8, 3, shares=(3, 3, 2))  # eight microbatches of 32 samples
    >>> division.counts, division.positions(2)
    ((3, 3, 2), range(192, 256))
    >>> divide((32,) * 8, 3).counts
    (3, 3, 2)

    Args:
        sizes: samples of every microbatch.
        num_ranks: number of sample ranks.
        shares: relative shares of the ranks; even by default.

    Raises:
        ConvoyError: there are fewer microbatches than ranks, or not as many shares as ranks.
    """
    if len(sizes) < num_ranks:
        batch = sum(sizes)
        raise ConvoyError(
            f"{len(sizes)} microbatch{'es' if len(sizes) > 1 else ''} of a batch of {batch} cannot be divided over "
            f"{num_ranks} devices: "
            + (
                f"set microbatch={batch // num_ranks} or less (--set microbatch=…), or use fewer devices"
                if batch >= num_ranks
                else f"raise --batch to at least {num_ranks}, or use fewer devices"
            )
        )
    if shares is None:
        return Division(sizes, microbatch_sizes(len(sizes), num_ranks))
    if len(shares) != num_ranks:
        raise ConvoyError(
            f"--shares names {len(shares)} parts, but the plan divides the batch into {num_ranks}: give {num_ranks} "
            "numbers"
        )
    return Division(sizes, proportional(len(sizes), shares))


def soonest(total: int, times: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers that add up to `total`, none zero, so that the last rank to end ends as soon as can be.

    Args:
        total: microbatches.
        times: that one takes each rank.
    """
    assert total >= len(times) and min(times) > 0
    counts = [1] * len(times)
    for _ in range(total - len(times)):
        rank = min(range(len(times)), key=lambda i: ((counts[i] + 1) * times[i], i))
        counts[rank] += 1
    return tuple(counts)


def text(counts: Sequence[int]) -> str:
    """Shares as `--shares` writes them."""
    return ",".join(map(str, counts))
