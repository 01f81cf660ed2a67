import numpy as np
import pytest

from convoy.report.confusion import Confusion
from convoy.training.records import EvaluationFile


def made(table: list[list[int]] | np.ndarray) -> Confusion:
    names = [f"class {place}" for place in range(len(table))]
    return Confusion(EvaluationFile(classes=names, confusion=np.array(table).tolist()))


def test_rows_have_recall_and_shades() -> None:
    rows = made([[8, 2, 0], [0, 10, 0], [0, 0, 0]]).matrix()
    assert rows is not None
    assert [row.recall for row in rows] == [0.8, 1.0, None]
    assert [row.images for row in rows] == [10, 10, 0]
    assert rows[0].cells[0].shade == pytest.approx(0.8)
    assert rows[0].cells[1].shade == 1.0  # the largest mistake of all
    assert rows[0].cells[1].text == "class 0 taken for class 1: 2"


def test_every_class_has_recall_precision_and_f1() -> None:
    found = made([[8, 2, 0, 0], [1, 9, 0, 0], [0, 0, 0, 0], [3, 0, 0, 0]]).classes()
    assert [(one.images, one.recall, one.precision) for one in found] == [
        (10, 0.8, 8 / 12),
        (10, 0.9, 9 / 11),
        (0, None, None),
        (3, 0.0, None),
    ]
    assert found[0].f1 == pytest.approx(2 * 0.8 * (8 / 12) / (0.8 + 8 / 12))
    assert [one.f1 for one in found[2:]] == [None, None]
    assert [one.mostly for one in found] == ["class 1", "class 0", "", "class 0"]


def test_a_perfect_net_has_no_pairs() -> None:
    assert made(np.eye(3, dtype=int) * 5).pairs(8) == []
    assert made(np.eye(3, dtype=int) * 5).hardest(8) == []
    assert made(np.eye(3, dtype=int)).matrix() is not None


def test_pairs_come_in_order_of_count_with_the_share_of_the_true_class() -> None:
    pairs = made([[8, 2, 0], [5, 90, 5], [0, 9, 1]]).pairs(3)
    assert [(pair.true, pair.predicted, pair.count) for pair in pairs] == [
        ("class 2", "class 1", 9),
        ("class 1", "class 0", 5),
        ("class 1", "class 2", 5),
    ]
    assert pairs[0].share == pytest.approx(0.9)


def test_many_classes_give_pairs_and_hardest_classes_instead_of_a_matrix() -> None:
    table = np.eye(1000, dtype=int) * 50
    table[7, 7], table[7, 3] = 20, 30
    assert made(table).matrix() is None
    (hardest,) = made(table).hardest(12)
    assert (hardest.name, hardest.recall, hardest.mostly) == ("class 7", 0.4, "class 3")
