"""Which microbatches of a global batch each sample rank computes, in which passes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from convoy.engine.coupling import microbatch_sizes
from convoy.errors import ConvoyError
from convoy.plans.layout import proportional
from convoy.units import plural


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass, of all sample ranks at once."""

    microbatches: tuple[tuple[int, ...], ...]  # sizes, by sample rank
    parts: tuple[range, ...]  # positions in the global batch of each rank's samples, one microbatch after another

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of all ranks' microbatches, in the order of the ranks."""
        return tuple(size for sizes in self.microbatches for size in sizes)

    @cached_property
    def positions(self) -> list[int]:
        """Positions in the global batch of all ranks' samples, in the same order."""
        return [position for part in self.parts for position in part]


@dataclass(frozen=True)
class Division:
    """A global batch over sample ranks: each takes consecutive microbatches."""

    sizes: tuple[int, ...]  # samples of every microbatch
    counts: tuple[int, ...]  # microbatches of each rank

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate(self.sizes, initial=0))

    def microbatches(self, rank: int) -> range:
        start = sum(self.counts[:rank])
        return range(start, start + self.counts[rank])

    def positions(self, rank: int) -> range:
        """In the global batch."""
        numbers = self.microbatches(rank)
        return range(self._starts[numbers.start], self._starts[numbers.stop])

    def passes(self, merge: int, late: bool = False) -> list[Pass]:
        """The passes of an update, of at most `merge` microbatches each, as many for every rank. A rank with too few
        microbatches has none in the last; with `late`, none in the first instead, so that all have something in the
        last, which exchanges gradients.
        """
        num = max(-(-count // merge) for count in self.counts)
        return [self._pass(number, num, late) for number in range(num)]

    def _pass(self, number: int, num: int, late: bool) -> Pass:
        sizes, parts = [], []
        for rank in range(len(self.counts)):
            numbers = self.microbatches(rank)
            size, larger = divmod(len(numbers), num)
            first = num - larger if late else 0  # of the passes with one more
            start = numbers.start + number * size + min(max(0, number - first), larger)
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
    """
    if len(sizes) < num_ranks:
        batch = sum(sizes)
        if batch < num_ranks:
            raise ConvoyError(
                f"a batch of {batch} cannot be divided over {num_ranks} devices: raise --batch to at least "
                f"{num_ranks}, or use fewer devices"
            )
        raise ConvoyError(
            f"a batch of {batch} is {plural(len(sizes), 'microbatch', 'microbatches')}, which batch norm, mixup and "
            f"--reproducible see whole, whatever the number of devices, and {num_ranks} devices need {num_ranks}: add "
            f"--microbatches {num_ranks} (another result) or --batch-norm sync, or use fewer devices"
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
    """Divide `total` microbatches into positive whole numbers so that the last rank ends as soon as can be, where one
    microbatch takes rank r `times[r]`.
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
