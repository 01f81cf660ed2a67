"""Which samples belong to which update: a function of the seed and the update's number alone."""

import numpy as np
from numpy.typing import NDArray

from convoy.data.randomness import Purpose, keys
from convoy.errors import ConvoyError


class Order:
    """The order of samples over a whole run.

    Every epoch is a new permutation of all samples, cut into global batches; the last incomplete batch is left out,
    and as the permutation changes, not always the same samples are.
    """

    def __init__(self, num_samples: int, batch: int, seed: int) -> None:
        """Raises ConvoyError when a batch needs more samples than there are."""
        if batch < 1:
            raise ConvoyError(f"batch {batch} is not a number of samples: set --batch to at least 1")
        if batch > num_samples:
            raise ConvoyError(
                f"batch {batch} is larger than the {num_samples} training samples: set --batch to at most {num_samples}"
            )
        self.num_samples = num_samples
        self.batch = batch
        self.seed = seed
        self.updates_per_epoch = num_samples // batch
        self._latest: tuple[int, NDArray[np.int64]] | None = None

    def samples(self, epoch: int) -> NDArray[np.int64]:
        """The permutation of all samples [num_samples] in an epoch (0-based)."""
        if self._latest is None or self._latest[0] != epoch:
            order = np.argsort(keys(self.seed, Purpose.ORDER, epoch, np.arange(self.num_samples)), kind="stable")
            self._latest = (epoch, order.astype(np.int64))
        return self._latest[1]

    def update(self, k: int) -> tuple[int, NDArray[np.int64]]:
        """Epoch and samples [batch] of update `k`, counted from 0 over the whole run."""
        epoch, place = divmod(k, self.updates_per_epoch)
        return epoch, self.samples(epoch)[place * self.batch : (place + 1) * self.batch]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_latest": None}
