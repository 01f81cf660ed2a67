"""Pictures that are made up, where only the speed of training counts: they lie in memory, so that no rank waits."""

import numpy as np

from convoy.data import DataSet
from convoy.data.sources import PixelSource

NAME = "made-up pictures in memory"


def made_data(shape: tuple[int, int, int], num_classes: int, num_images: int) -> DataSet:
    """Random pictures with random labels, the same in every process.

    Args:
        shape: channels, height and width; height and width are equal.
        num_classes: labels are below it.
        num_images: for training; nothing is evaluated.
    """
    channels, size, _ = shape
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (num_images, size, size, channels), dtype=np.uint8)
    labels = random.integers(0, num_classes, num_images)
    train = PixelSource(pixels, labels, NAME)
    return DataSet(
        name=NAME,
        classes=[str(number) for number in range(num_classes)],
        train=train,
        test=PixelSource(pixels[:1], labels[:1], NAME),
        image_size=size,
        channels=channels,
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
        resize=size,
    )
