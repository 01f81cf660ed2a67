"""Classes that the network confuses: a matrix for few classes, the worst pairs and the hardest classes for many."""

from dataclasses import dataclass

import numpy as np

from convoy.training.records import EvaluationFile

LARGEST_MATRIX = 20  # more classes than this are not readable as a table on a page


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
    """A class in numbers."""

    name: str
    images: int
    recall: float | None  # share of its images that was recognized; None where there are none
    precision: float | None  # share of the images taken for it that are of it; None where none was
    f1: float | None  # harmonic mean of both; None where one of them is unknown
    mostly: str  # the class that it is taken for most often; empty where it never is for another


class Confusion:
    """The counts of an evaluation, int64 [true class, predicted class], ready to be shown."""

    def __init__(self, evaluation: EvaluationFile) -> None:
        self._names = evaluation.classes if evaluation.confusion else []
        self._counts = np.array(evaluation.confusion, dtype=np.int64).reshape(len(self._names), len(self._names))
        self._wrong = self._counts - np.diag(np.diag(self._counts))
        self._shares = self._counts / np.maximum(self._counts.sum(1, keepdims=True), 1)

    def matrix(self) -> list[ConfusionRow] | None:
        """The rows of the matrix, or None if there is none or it has too many classes for a table.

        Right answers are shaded by recall, mistakes by the square root of their share relative to the worst, so that
        rare ones are still seen.
        """
        if not 0 < len(self._names) <= LARGEST_MATRIX:
            return None
        right = np.diag(np.diag(self._shares))
        mistakes = self._shares - right
        shades = right + (np.sqrt(mistakes / mistakes.max()) if mistakes.max() > 0 else mistakes)
        return [
            ConfusionRow(
                one.name,
                [
                    Cell(
                        count=int(number),
                        right=true == predicted,
                        shade=round(float(shades[true, predicted]), 3),
                        text=f"{one.name}: {number} right"
                        if true == predicted
                        else f"{one.name} taken for {self._names[predicted]}: {number}",
                    )
                    for predicted, number in enumerate(self._counts[true])
                ],
                one.images,
                one.recall,
            )
            for true, one in enumerate(self.classes())
        ]

    def pairs(self, most: int) -> list[Pair]:
        """The `most` pairs of different classes that were confused most often, the most frequent first."""
        order = np.argsort(-self._wrong, axis=None, kind="stable")[:most]
        places = [divmod(int(place), len(self._names)) for place in order]
        return [
            Pair(self._names[true], self._names[other], int(self._wrong[true, other]), self._shares[true, other])
            for true, other in places
            if self._wrong[true, other] > 0
        ]

    def classes(self) -> list[Class]:
        """Every class in numbers, in the order of the data."""
        right, images, taken = np.diag(self._counts), self._counts.sum(1), self._counts.sum(0)
        return [
            Class(
                name=name,
                images=int(images[place]),
                recall=_share(right[place], images[place]),
                precision=_share(right[place], taken[place]),
                f1=_share(2 * right[place], images[place] + taken[place]) if images[place] and taken[place] else None,
                mostly=self._names[int(wrong.argmax())] if wrong.any() else "",
            )
            for place, (name, wrong) in enumerate(zip(self._names, self._wrong, strict=True))
        ]

    def hardest(self, most: int) -> list[Class]:
        """The `most` classes of lowest recall, the hardest first; classes without images or mistakes are left out."""
        mistaken = [one for one in self.classes() if one.recall is not None and one.recall < 1]
        return sorted(mistaken, key=lambda one: one.recall or 0.0)[:most]


def _share(part: int, whole: int) -> float | None:
    return float(part / whole) if whole else None
