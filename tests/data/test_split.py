import numpy as np
import pytest

from convoy.data.order import stratified_split


def test_every_class_gives_its_share():
    labels = np.repeat(np.arange(10), 50)
    train, test = stratified_split(labels, 0.2, seed=1)
    assert sorted([*train, *test]) == list(range(500))
    assert (np.bincount(labels[test]) == 10).all()
    assert (np.diff(test) > 0).all()
    assert (np.diff(train) > 0).all()


def test_uneven_classes_round_up_or_down():
    labels = np.repeat(np.arange(4), [3, 17, 100, 5])
    _, test = stratified_split(labels, 0.1, seed=0)
    held = np.bincount(labels[test], minlength=4)
    assert held.sum() == round(125 * 0.1)
    assert (np.abs(held - np.array([3, 17, 100, 5]) * 0.1) < 1).all()


def test_the_seed_decides():
    labels = np.arange(100) % 2
    first, again, other = (stratified_split(labels, 0.3, seed)[1].tolist() for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(("num", "fraction", "held"), [(2, 0.01, 1), (2, 0.99, 1), (10, 0.99, 9)])
def test_neither_side_is_ever_empty(num, fraction, held):
    train, test = stratified_split(np.zeros(num, np.int64), fraction, seed=0)
    assert (len(train), len(test)) == (num - held, held)
