"""The order of samples and their random numbers: functions of seed, epoch and sample; and what is held out."""

import numpy as np
import pytest

from convoy.data import Order
from convoy.data.order import Purpose, keys, normals, stratified_split, uniforms
from convoy.errors import ConvoyError

SAMPLES = np.arange(20_000)


def test_every_epoch_is_another_permutation() -> None:
    order = Order(100, 10, seed=3)
    first, second = order.samples(0), order.samples(1)
    assert sorted(first) == sorted(second) == list(range(100))
    assert (first != second).any()
    assert (first == Order(100, 7, seed=3).samples(0)).all()
    assert (first != Order(100, 10, seed=4).samples(0)).any()
    # A run that is resumed with a newer Convoy, numpy or Python must see the same order.
    assert Order(12, 4, seed=1).samples(0).tolist() == [4, 5, 1, 8, 11, 9, 3, 2, 10, 7, 0, 6]


def test_updates_cut_the_epochs_into_batches_and_leave_the_incomplete_one_out() -> None:
    order = Order(10, 3, seed=0)
    assert order.updates_per_epoch == 3
    for k in range(9):
        epoch, samples = order.update(k)
        assert epoch == k // 3
        np.testing.assert_array_equal(samples, order.samples(epoch)[k % 3 * 3 :][:3])
    assert {int(s) for k in range(60) for s in order.update(k)[1]} == set(range(10))
    for batch, words in ((11, "larger than the 10 training samples"), (0, "batch 0")):
        with pytest.raises(ConvoyError, match=words) as error:
            Order(10, batch, seed=0)
        assert "--batch" in str(error.value)


def test_seed_purpose_epoch_and_sample_all_matter_and_nothing_else() -> None:
    base = uniforms(1, Purpose.CROP, 2, SAMPLES[:3], 2)
    for other in (
        uniforms(2, Purpose.CROP, 2, SAMPLES[:3], 2),
        uniforms(1, Purpose.FLIP, 2, SAMPLES[:3], 2),
        uniforms(1, Purpose.CROP, 3, SAMPLES[:3], 2),
        uniforms(1, Purpose.CROP, 2, SAMPLES[3:6], 2),
        uniforms(2, Purpose.CROP, 1, SAMPLES[:3], 2),  # what a sum of the parts would not tell apart
    ):
        assert not np.isin(base, other).any()
    together = uniforms(7, Purpose.CROP, 3, SAMPLES, 4)
    np.testing.assert_array_equal(together[123, :2], uniforms(7, Purpose.CROP, 3, np.array([123]), 2)[0])
    for seed in (0, 2**63, 2**64 - 1, -1):
        assert 0 <= uniforms(seed, Purpose.CROP, 0, np.array([2**40]), 1)[0, 0] < 1
    assert len(np.unique(keys(5, Purpose.ORDER, 0, np.arange(1_000_000)))) == 1_000_000


def test_the_numbers_are_uniform_and_independent() -> None:
    numbers = uniforms(0, Purpose.CROP, 0, SAMPLES, 4)
    assert numbers.min() >= 0 and numbers.max() < 1
    for column in numbers.T:
        counts = np.histogram(column, 50, (0, 1))[0]
        assert 20 < ((counts - 400) ** 2 / 400).sum() < 95  # 49 degrees of freedom
    more = [uniforms(0, Purpose.FLIP, 0, SAMPLES, 1), uniforms(0, Purpose.CROP, 1, SAMPLES, 1)]
    assert np.abs(np.corrcoef(np.hstack([numbers, *more]).T) - np.eye(6)).max() < 0.03
    assert abs(np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]) < 0.03
    normal = np.array(normals(uniforms(0, Purpose.PCA, 0, SAMPLES, 1)[:, 0]))
    assert abs(normal.mean()) < 0.03 and abs(normal.std() - 1) < 0.03
    assert np.isfinite(normals(np.array([0.0, 1 - 2**-53]))).all()


def test_every_class_gives_its_share_to_what_is_held_out() -> None:
    labels = np.repeat(np.arange(10), 50)
    train, test = stratified_split(labels, 0.2, seed=1)
    assert sorted([*train, *test]) == list(range(500))
    assert (np.bincount(labels[test]) == 10).all()
    assert (np.diff(test) > 0).all() and (np.diff(train) > 0).all()
    first, again, other = (stratified_split(labels, 0.3, seed)[1].tolist() for seed in (1, 1, 2))
    assert first == again != other
    sizes = np.array([3, 17, 100, 5])  # rounded up or down
    labels = np.repeat(np.arange(4), sizes)
    held = np.bincount(labels[stratified_split(labels, 0.1, seed=0)[1]], minlength=4)
    assert held.sum() == round(125 * 0.1) and (np.abs(held - sizes * 0.1) < 1).all()
    for num, fraction, held in ((2, 0.01, 1), (2, 0.99, 1), (10, 0.99, 9)):  # neither side is ever empty
        train, test = stratified_split(np.zeros(num, np.int64), fraction, seed=0)
        assert (len(train), len(test)) == (num - held, held)
