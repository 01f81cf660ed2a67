"""What the net confuses with what: a matrix for few classes, the worst pairs and the hardest classes for many."""

from dataclasses import dataclass

import numpy as np

from convoy.report.run_directory import EvaluationOfRun

LARGEST_MATRIX = 20
"""More classes than this are not readable as a table on a page."""


@dataclass(frozen=True)
class Cell:
    """A count of the matrix; `shade` in 0..1 is its depth of color."""

    count: int
    right: bool
    shade: float
    text: str


@dataclass(frozen=True)
class ConfusionRow:
    """A true class: its cells by predicted class, its number of images and the share that was right (recall)."""

    name: str
    cells: list[Cell]
    images: int
    recall: float | None


@dataclass(frozen=True)
class Pair:
    """Images of class `true` taken for `predicted`, as a count and as a share of the images of `true`."""

    true: str
    predicted: str
    count: int
    share: float


@dataclass(frozen=True)
class Class:
    """A class in numbers.

    Attributes:
        images: of the class.
        recall: share of them that was recognized; None where there are none.
        precision: of the images taken for the class, the share that belongs to it; None where none was.
        f1: harmonic mean of both; None where one of them is unknown.
        mostly: the class that it is taken for most often; empty where it never is for another.
    """

    name: str
    images: int
    recall: float | None
    precision: float | None
    f1: float | None
    mostly: str


def matrix(evaluation: EvaluationOfRun) -> list[ConfusionRow] | None:
    """The rows of the confusion matrix, or None if there is none or it has too many classes for a table.

    Right answers are shaded by recall, mistakes by the square root of their share relative to the worst, so that rare
    ones are still seen.
    """
    table = evaluation.confusion
    if table is None or len(table) > LARGEST_MATRIX:
        return None
    shares = _shares(table)
    mistakes = shares - np.diag(np.diag(shares))
    depth = np.sqrt(mistakes / mistakes.max()) if mistakes.max() > 0 else mistakes
    rows = []
    for true, name in enumerate(evaluation.classes):
        cells = [
            Cell(
                count=int(number),
                right=true == predicted,
                shade=round(float(shares[true, true] if true == predicted else depth[true, predicted]), 3),
                text=_cell_text(int(number), name, evaluation.classes[predicted]),
            )
            for predicted, number in enumerate(table[true])
        ]
        images = int(table[true].sum())
        rows.append(ConfusionRow(name, cells, images, float(shares[true, true]) if images else None))
    return rows


def confused_pairs(evaluation: EvaluationOfRun, most: int) -> list[Pair]:
    """The `most` pairs of different classes that were confused most often, the most frequent first."""
    if evaluation.confusion is None:
        return []
    wrong = evaluation.confusion - np.diag(np.diag(evaluation.confusion))
    shares = _shares(evaluation.confusion)
    order = np.argsort(-wrong, axis=None, kind="stable")[:most]
    places = [divmod(int(place), len(wrong)) for place in order]
    return [
        Pair(
            evaluation.classes[true],
            evaluation.classes[predicted],
            int(wrong[true, predicted]),
            shares[true, predicted],
        )
        for true, predicted in places
        if wrong[true, predicted] > 0
    ]


def classes(evaluation: EvaluationOfRun) -> list[Class]:
    """Every class in numbers, in the order of the data; none without a confusion matrix."""
    table = evaluation.confusion
    if table is None:
        return []
    right, images, taken = np.diag(table), table.sum(1), table.sum(0)
    wrong = table - np.diag(right)
    return [
        Class(
            name=name,
            images=int(images[place]),
            recall=_share(right[place], images[place]),
            precision=_share(right[place], taken[place]),
            f1=_share(2 * right[place], images[place] + taken[place]) if images[place] and taken[place] else None,
            mostly=evaluation.classes[int(wrong[place].argmax())] if wrong[place].any() else "",
        )
        for place, name in enumerate(evaluation.classes)
    ]


def hardest_classes(evaluation: EvaluationOfRun, most: int) -> list[Class]:
    """The `most` classes of lowest recall, the hardest first; classes without images or mistakes are left out."""
    found = [one for one in classes(evaluation) if one.recall is not None and one.recall < 1]
    return sorted(found, key=lambda one: one.recall or 0.0)[:most]


def _share(part: int, whole: int) -> float | None:
    return float(part / whole) if whole else None


def _shares(table: np.ndarray) -> np.ndarray:
    return np.asarray(table / np.maximum(table.sum(1, keepdims=True), 1))


def _cell_text(number: int, true: str, predicted: str) -> str:
    return f"{true}: {number} right" if true == predicted else f"{true} taken for {predicted}: {number}"
