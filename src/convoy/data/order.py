"""Random numbers that are a function of (seed, purpose, epoch, sample), and the order and split of samples by them.

The generator is SplitMix64 used as a counter-based one: a sample's numbers need no state, so any process can compute
them for any array of samples at once, in any order, and numpy's own generators (whose streams may change between
versions) are not involved.
"""

from enum import IntEnum
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from convoy.errors import ConvoyError
from convoy.splitmix64 import GOLDEN, mix, word


class Purpose(IntEnum):
    """The purpose of random numbers. Each has a stream of its own, so switching one on changes no other."""

    ORDER = 1
    SPLIT = 2
    CROP = 3
    FLIP = 4
    JITTER = 5
    PCA = 6
    RAND_AUGMENT = 7
    MIX = 8
    TRIVIAL_AUGMENT = 9
    ERASE = 10
    NOISE = 11
    DRAW = 12
    OWN = 13


def keys(seed: int, purpose: Purpose, epoch: int, samples: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One 64-bit number for each sample [n]; different samples always get different numbers."""
    state = np.zeros(1, np.uint64)
    for part in (seed, purpose, epoch):
        state = mix((state + GOLDEN) ^ word(int(part)))
    return mix((state + GOLDEN) ^ samples.astype(np.uint64))


def uniforms(seed: int, purpose: Purpose, epoch: int, samples: NDArray[np.int64], num: int) -> NDArray[np.float64]:
    """`num` numbers in [0, 1) for each sample: [n, num]."""
    counters = np.arange(1, num + 1, dtype=np.uint64) * GOLDEN
    bits = mix(keys(seed, purpose, epoch, samples)[:, None] + counters)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normals(uniform: NDArray[np.float64]) -> list[float]:
    """Standard normal numbers from a row of uniform ones [n], by inversion."""
    inverse = NormalDist().inv_cdf
    return [inverse(max(u, 2.0**-54)) for u in uniform.tolist()]


class Order:
    """The order of samples over a whole run. Every epoch is a new permutation of all samples, cut into global batches;
    the last incomplete batch is left out, and as the permutation changes, not always the same samples are.

    With `weights` an epoch has as many samples, drawn with replacement, each in proportion to the weight of its class.
    """

    def __init__(
        self,
        num_samples: int,
        batch: int,
        seed: int,
        repeats: int = 1,
        weights: NDArray[np.float64] | None = None,
        labels: NDArray[np.int64] | None = None,
    ) -> None:
        """Raises ConvoyError when a batch needs more samples than there are."""
        if batch < 1:
            raise ConvoyError(f"batch {batch} is not a number of samples: set --batch to at least 1")
        if batch > num_samples:
            raise ConvoyError(
                f"batch {batch} is larger than the {num_samples} training samples: set --batch to at most {num_samples}"
            )
        self.num_samples, self.batch, self.seed, self.repeats = num_samples, batch, seed, repeats
        self._weights, self._labels = weights, labels
        self.updates_per_epoch = num_samples // batch
        self._latest: tuple[int, NDArray[np.int64]] | None = None

    def samples(self, epoch: int) -> NDArray[np.int64]:
        """The samples [num_samples] of an epoch (0-based): a permutation of all, or those drawn, in their order."""
        if self._latest is None or self._latest[0] != epoch:
            order = np.argsort(keys(self.seed, Purpose.ORDER, epoch, np.arange(self.num_samples)), kind="stable")
            if self._weights is not None:
                order = self._drawn(epoch, self._weights)[order]
            self._latest = (epoch, order.astype(np.int64))
        return self._latest[1]

    def _drawn(self, epoch: int, weights: NDArray[np.float64]) -> NDArray[np.int64]:
        """As many samples as there are, by systematic sampling (Madow and Madow, 1944): equal steps along the samples,
        which lie class by class, shuffled within a class, so that each class has its share to within one sample.
        What is drawn again is a further view, which is augmented otherwise."""
        numbers = np.arange(self.num_samples)
        assert self._labels is not None
        line = np.lexsort((keys(self.seed, Purpose.DRAW, epoch, numbers), self._labels))
        ends = np.cumsum(weights[self._labels][line])
        start = uniforms(self.seed, Purpose.DRAW, epoch, numbers[:1], 1)[0, 0]
        steps = (numbers + start) * (ends[-1] / self.num_samples)
        places = np.searchsorted(ends, steps, side="right").clip(max=self.num_samples - 1)
        views = (numbers - np.searchsorted(places, places)) * self.repeats
        drawn: NDArray[np.int64] = line[places] + views * self.num_samples
        return drawn

    def update(self, k: int) -> tuple[int, NDArray[np.int64]]:
        """Epoch and samples [batch] of update `k`, counted from 0 over the whole run. View number v of sample s is the
        number s + v · num_samples.

        With `repeats` an epoch is of the first samples of its permutation, each as many times in a row (Touvron et al.,
        2021: DeiT). Views of a sample are moved apart within their batch: there they go to different devices, and the
        statistics of batch norm are of different samples.
        """
        epoch, place = divmod(k, self.updates_per_epoch)
        row = np.arange(place * self.batch, (place + 1) * self.batch)
        row = row[np.argsort(row % self.repeats, kind="stable")]
        return epoch, self.samples(epoch)[row // self.repeats] + row % self.repeats * self.num_samples


def stratified_split(
    labels: NDArray[np.int64], fraction: float, seed: int, fold: tuple[int, int] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices to train on and to hold out, both ascending; at least one sample in each. Samples are lined up class by
    class, shuffled within a class, and every (1/fraction)-th is held out: of n samples n·fraction, rounded up or
    down. With a fold of (k, n) it is every n-th from the k-th on, so that each sample is in one of n folds."""
    num = len(labels)
    num_test = min(max(round(num * fraction), 1), num - 1)
    line = np.lexsort((keys(seed, Purpose.SPLIT, 0, np.arange(num)), labels))
    place = np.arange(num, dtype=np.int64)
    every = (place + 1) * num_test // num > place * num_test // num
    held_out = every if fold is None else place % fold[1] == fold[0] - 1
    return np.sort(line[~held_out]), np.sort(line[held_out])
