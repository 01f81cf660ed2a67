"""How much classes of unequal sizes count: in the loss, or by how often their samples are drawn."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from convoy.errors import ConvoyError
from convoy.terminal import brief, did_you_mean

ByClass = Literal["balanced", "effective"] | Mapping[str, float]
_BETA = 0.999  # of the effective number of samples


def class_weights(
    by_class: ByClass, labels: NDArray[np.int64] | None, classes: Sequence[str], key: str
) -> NDArray[np.float64]:
    """Weights [classes] whose mean over samples with these labels is one; `key` asks for them.

    `balanced` weighs a class by one over its number of samples n, `effective` by one over their effective number,
    (1 - β^n) / (1 - β) (Cui et al., 2019); a class that a mapping does not name has 1. Where samples
    are not of one class each there are no labels: then only a mapping will do, and the mean is that over classes.
    """
    counts = np.ones(len(classes))
    if labels is not None:
        counts = np.bincount(labels, minlength=len(classes)).astype(np.float64)
    elif not isinstance(by_class, Mapping):
        raise ConvoyError(f"{key}={by_class} needs samples of one class each: give numbers, as {{{classes[0]}: 3}}")
    if isinstance(by_class, Mapping):
        if unknown := [name for name in by_class if name not in classes]:
            hint = did_you_mean(unknown[0], classes, otherwise=f"there are {brief(', '.join(classes), 200)}")
            raise ConvoyError(f"{key} names the class {brief(unknown[0])}, which the data does not have{hint}")
        weights = np.array([by_class.get(name, 1.0) for name in classes])
    else:
        numbers = counts if by_class == "balanced" else (1 - _BETA**counts) / (1 - _BETA)
        weights = np.where(counts > 0, 1 / np.maximum(numbers, 1), 0.0)
    total = float(weights @ counts)
    if total <= 0:
        raise ConvoyError(f"{key} leaves no training sample any weight: give one of its classes more than 0")
    scaled: NDArray[np.float64] = weights * (counts.sum() / total)
    return scaled
