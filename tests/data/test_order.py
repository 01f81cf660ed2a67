import numpy as np
import pytest

from convoy.data import Order
from convoy.errors import ConvoyError


def test_every_epoch_is_another_permutation():
    order = Order(100, 10, seed=3)
    first, second = order.samples(0), order.samples(1)
    assert sorted(first) == sorted(second) == list(range(100))
    assert (first != second).any()
    assert (first == Order(100, 7, seed=3).samples(0)).all()
    assert (first != Order(100, 10, seed=4).samples(0)).any()


def test_updates_cut_the_epochs_into_batches_and_leave_the_incomplete_one_out():
    order = Order(10, 3, seed=0)
    assert order.updates_per_epoch == 3
    for k in range(9):
        epoch, samples = order.update(k)
        assert epoch == k // 3
        np.testing.assert_array_equal(samples, order.samples(epoch)[k % 3 * 3 :][:3])
    seen = {int(s) for k in range(60) for s in order.update(k)[1]}
    assert seen == set(range(10))


def test_the_order_is_frozen_for_good():
    """A run that is resumed with a newer Convoy, numpy or Python must see the same order."""
    assert Order(12, 4, seed=1).samples(0).tolist() == [4, 5, 1, 8, 11, 9, 3, 2, 10, 7, 0, 6]


@pytest.mark.parametrize(
    ("num", "batch", "word"), [(10, 11, "larger than the 10 training samples"), (10, 0, "batch 0")]
)
def test_impossible_batches_are_refused(num, batch, word):
    with pytest.raises(ConvoyError, match=word) as error:
        Order(num, batch, seed=0)
    assert "--batch" in str(error.value)
