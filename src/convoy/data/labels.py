"""Checks of labels and classes that every format shares."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from convoy.data.files import shown
from convoy.data.sources import Source
from convoy.errors import ConvoyError

_MAX_CLASSES = 1_000_000


def check_classes(name: str, classes: list[str]) -> None:
    """Refuse what is no classification problem."""
    if len(classes) < 2:
        only = f" ({classes[0]})" if classes else ""
        raise ConvoyError(
            f"{name} has only {len(classes)} class{only}: a net needs at least two to tell apart, so set data.path to "
            "the folder or file that holds all of them"
        )


def relabel(sources: Iterable[Source], classes: Sequence[str], known: Sequence[str]) -> None:
    """Give freshly opened sources the labels that their classes have in another list.

    Args:
        sources: labelled by `classes`; one that comes twice is labelled once.
        classes: names, by the labels that there are.
        known: names, by the labels to come; it has all of `classes`.
    """
    table = np.array([known.index(name) for name in classes], np.int64)
    for source in {id(source): source for source in sources}.values():
        source.labels = table[source.labels]


def numbered_classes(path: Path, sources: Sequence[Source]) -> list[str]:
    """Names "0", "1", … for labels that have none, up to the largest label.

    Raises:
        ConvoyError: the largest label is too large to be one.
    """
    largest = max(int(source.labels.max()) for source in sources)
    if largest >= _MAX_CLASSES:
        raise ConvoyError(f"{shown(path)} has label {largest}, out of range: classes are numbered from 0")
    return [str(number) for number in range(largest + 1)]


def check_range(path: Path, sources: Sequence[Source], classes: list[str]) -> None:
    """Refuse labels that are no class.

    Raises:
        ConvoyError: naming the first sample with such a label.
    """
    for source in sources:
        wrong = np.flatnonzero((source.labels < 0) | (source.labels >= len(classes)))
        if len(wrong):
            sample = int(wrong[0])
            withheld = " (-1 marks a withheld label: use the validation split)" if source.labels[sample] == -1 else ""
            raise ConvoyError(
                f"{source.name(sample)} in {shown(path)} has label {source.labels[sample]}, out of range: "
                f"the classes are 0 to {len(classes) - 1}{withheld}"
            )
