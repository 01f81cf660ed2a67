"""The colors of classes in pictures of masks."""

import numpy as np
from numpy.typing import NDArray


def palette() -> NDArray[np.uint8]:
    """Black for class 0, other classes by hues a golden angle apart, grey where nothing is known: [256, 3]."""
    hues = np.arange(256) * 0.618034 % 1
    colors = 255 * np.clip(np.abs((hues[:, None] * 6 + np.array([0, 4, 2])) % 6 - 3) - 1, 0, 1)
    colors[0], colors[255] = 0, 128
    shades: NDArray[np.uint8] = colors.astype(np.uint8)
    return shades
