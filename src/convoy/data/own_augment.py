"""A change of training pictures by a function of the user's, which draws its random numbers from what it is given."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convoy.data.order import Purpose, keys
from convoy.errors import ConvoyError, reason
from convoy.own import absolute, function_of


class OwnAugment:
    """`function(picture, rng)` for pictures uint8 [height, width, channels], after crop, flip and colors; it gives one
    of the same shape. `rng` is a `numpy.random.Generator`, a function of (seed, epoch, sample)."""

    def __init__(self, name: str, seed: int) -> None:
        self._name, self._seed = absolute(name), seed

    @cached_property
    def _function(self) -> Callable[..., Any]:
        return function_of(self._name)

    def __getstate__(self) -> dict[str, Any]:
        return {"_name": self._name, "_seed": self._seed}  # a worker imports it by itself

    def __call__(self, planes: NDArray[np.uint8], epoch: int, sample: int) -> None:
        """Change the picture of a sample, [channels, height, width], in place."""
        key = keys(self._seed, Purpose.OWN, epoch, np.array([sample], np.int64))[0]
        picture = np.ascontiguousarray(planes.transpose(1, 2, 0))
        try:
            result = np.asarray(self._function(picture.copy(), np.random.Generator(np.random.Philox(int(key)))))
        except Exception as error:
            raise ConvoyError(
                f"the augmentation {self._name} failed with {reason(error)}: it is called with a picture, "
                f"uint8 {list(picture.shape)}, and a numpy.random.Generator"
            ) from error
        if (result.shape, result.dtype) != (picture.shape, picture.dtype):
            raise ConvoyError(
                f"the augmentation {self._name} gave {result.dtype} {list(result.shape)} for a picture, uint8 "
                f"{list(picture.shape)}: let it give the same shape and type"
            )
        planes[:] = result.transpose(2, 0, 1)
