"""Classes that the network confuses: a matrix for few classes, the worst pairs and the hardest classes for many."""

from typing import Any

import numpy as np

from convoy.training.records import EvaluationFile

LARGEST_MATRIX = 20  # more classes than this are not readable as a table on a page


class Confusion:
    """The counts of an evaluation, int64 [true class, predicted class], ready to be shown."""

    def __init__(self, evaluation: EvaluationFile) -> None:
        self._names = evaluation.classes if evaluation.confusion else []
        self._counts = np.array(evaluation.confusion, dtype=np.int64).reshape(len(self._names), len(self._names))
        self._wrong = self._counts - np.diag(np.diag(self._counts))
        self._shares = self._counts / np.maximum(self._counts.sum(1, keepdims=True), 1)

    def matrix(self) -> list[dict[str, Any]] | None:
        """For each true class its cells by predicted class, or None if there is none or too many for a table.

        Right answers are shaded by recall, mistakes by the square root of their share relative to the worst, so that
        rare ones are still seen.
        """
        if not 0 < len(self._names) <= LARGEST_MATRIX:
            return None
        right = np.diag(np.diag(self._shares))
        mistakes = self._shares - right
        shades = right + (np.sqrt(mistakes / mistakes.max()) if mistakes.max() > 0 else mistakes)

        def cell(true: int, predicted: int) -> dict[str, Any]:
            count, name, other = int(self._counts[true, predicted]), self._names[true], self._names[predicted]
            text = f"{name}: {count} right" if true == predicted else f"{name} taken for {other}: {count}"
            shade = round(float(shades[true, predicted]), 3)
            return {"count": count, "right": true == predicted, "shade": shade, "text": text}

        places = range(len(self._names))
        return [{**one, "cells": [cell(true, place) for place in places]} for true, one in enumerate(self.classes())]

    def pairs(self, most: int) -> list[dict[str, Any]]:
        """The `most` pairs of different classes that were confused most often, the most frequent first."""
        order = np.argsort(-self._wrong, axis=None, kind="stable")[:most]
        return [
            {
                "true": self._names[true],
                "predicted": self._names[other],
                "count": int(self._wrong[true, other]),
                "share": self._shares[true, other],  # of the images of the true class
            }
            for true, other in (divmod(int(place), len(self._names)) for place in order)
            if self._wrong[true, other] > 0
        ]

    def classes(self) -> list[dict[str, Any]]:
        """Every class in numbers, in the order of the data; a share is None where there is nothing that it is of."""
        right, images, taken = np.diag(self._counts), self._counts.sum(1), self._counts.sum(0)
        return [
            {
                "name": name,
                "images": int(images[place]),
                "recall": _share(right[place], images[place]),  # of its images
                "precision": _share(right[place], taken[place]),  # of the images taken for it
                # harmonic mean of both
                "f1": _share(2 * right[place], images[place] + taken[place] if images[place] and taken[place] else 0),
                "mostly": self._names[int(wrong.argmax())] if wrong.any() else "",  # what it is taken for most often
            }
            for place, (name, wrong) in enumerate(zip(self._names, self._wrong, strict=True))
        ]

    def hardest(self, most: int) -> list[dict[str, Any]]:
        """The `most` classes of lowest recall, the hardest first; classes without images or mistakes are left out."""
        mistaken = [one for one in self.classes() if one["recall"] is not None and one["recall"] < 1]
        return sorted(mistaken, key=lambda one: float(one["recall"]))[:most]


def _share(part: int, whole: int) -> float | None:
    return float(part / whole) if whole else None
