"""The order of samples and their random numbers: functions of seed, epoch and sample; and what is held out."""

import numpy as np
import pytest

from convoy.data.imbalance import class_weights
from convoy.data.order import Order, stratified_split
from convoy.errors import ConvoyError


def test_every_epoch_is_another_permutation_cut_into_whole_batches() -> None:
    order = Order(100, 10, seed=3)
    first, second = order.samples(0), order.samples(1)
    assert sorted(first) == sorted(second) == list(range(100)) and (first != second).any()
    assert (first == Order(100, 7, seed=3).samples(0)).all() and (first != Order(100, 10, seed=4).samples(0)).any()
    # A run that is resumed with a newer Convoy, numpy or Python must see the same order.
    assert Order(12, 4, seed=1).samples(0).tolist() == [4, 5, 1, 8, 11, 9, 3, 2, 10, 7, 0, 6]
    order = Order(10, 3, seed=0)
    updates = [order.update(k) for k in range(60)]
    assert order.updates_per_epoch == 3 and [epoch for epoch, _ in updates] == [k // 3 for k in range(60)]
    for k, (epoch, samples) in enumerate(updates):
        np.testing.assert_array_equal(samples, order.samples(epoch)[k % 3 * 3 :][:3])
    assert {int(sample) for _, samples in updates for sample in samples} == set(range(10))
    for batch, words in ((11, "larger than the 10 training samples.*--batch"), (0, "batch 0.*--batch")):
        with pytest.raises(ConvoyError, match=words):
            Order(10, batch, seed=0)


def test_views_of_a_sample_are_in_one_batch_apart_and_an_epoch_is_of_fewer_samples() -> None:
    """Berman et al., 2019; Touvron et al., 2021."""
    order, plain = Order(100, 12, seed=3, repeats=3), Order(100, 12, seed=3)
    for k in range(16):
        epoch, numbers = order.update(k)
        samples, views = numbers % 100, numbers // 100
        assert epoch == plain.update(k)[0] and views.tolist() == [0] * 4 + [1] * 4 + [2] * 4
        first = plain.samples(epoch)[k % 8 * 4 :][:4]
        assert samples.tolist() == [*first] * 3
    views_of_two = [number for k in range(2) for number in Order(10, 4, seed=0, repeats=3).update(k)[1].tolist()]
    assert len(set(views_of_two)) == 8  # a batch may end between views of a sample: the others come in the next one


def test_classes_are_drawn_by_weight_each_epoch_otherwise_and_what_is_drawn_again_is_another_view() -> None:
    sizes = np.array([90, 9, 21])
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(3), sizes))
    for weights, expected in ((1 / sizes, [40, 40, 40]), (np.array([1.0, 10, 0]), [60, 60, 0])):
        order = Order(120, 40, seed=3, weights=weights, labels=labels)
        epochs = [np.concatenate([order.update(3 * epoch + k)[1] for k in range(3)]) for epoch in range(2)]
        for numbers in epochs:
            assert np.abs(np.bincount(labels[numbers % 120], minlength=3) - expected).max() <= 1
            assert len(set(numbers.tolist())) == 120
        assert (np.sort(epochs[0]) != np.sort(epochs[1])).any()
        again = Order(120, 40, seed=3, weights=weights, labels=labels)
        np.testing.assert_array_equal(again.update(4)[1], order.update(4)[1])


def test_class_weights_are_one_in_the_mean_over_the_samples() -> None:
    labels, classes = np.repeat(np.arange(3), [900, 90, 10]), ["a", "b", "c"]
    balanced = class_weights("balanced", labels, classes, "key")
    np.testing.assert_allclose(balanced, 1000 / 3 / np.array([900, 90, 10]))
    effective = class_weights("effective", labels, classes, "key")
    np.testing.assert_allclose(effective[1] / effective[0], (1 - 0.999**900) / (1 - 0.999**90))  # Cui et al., 2019
    given = class_weights({"c": 5}, labels, classes, "key")
    assert given[2] == pytest.approx(5 * given[0]) and given[1] == given[0]
    for weights in (balanced, effective, given):
        assert weights[labels].mean() == pytest.approx(1)
    for by_class, words in (({"kat": 1}, "key names the class kat"), ({"a": 0, "b": 0, "c": 0}, "no training sample")):
        with pytest.raises(ConvoyError, match=words):
            class_weights(by_class, labels, classes, "key")


def test_every_class_gives_its_share_to_what_is_held_out() -> None:
    sizes = np.array([3, 17, 100, 5])  # rounded up or down
    labels = np.repeat(np.arange(4), sizes)
    train, test = stratified_split(labels, 0.1, seed=0)
    assert sorted([*train, *test]) == list(range(125)) and (np.diff(test) > 0).all() and (np.diff(train) > 0).all()
    held = np.bincount(labels[test], minlength=4)
    assert held.sum() == round(125 * 0.1) and (np.abs(held - sizes * 0.1) < 1).all()
    first, again, other = (stratified_split(labels, 0.3, seed)[1].tolist() for seed in (1, 1, 2))
    assert first == again != other
    parts = [stratified_split(labels, 0.1, 1, (part, 4)) for part in (1, 2, 3, 4)]
    assert sorted(np.concatenate([test for _, test in parts])) == list(range(125))
    for train, test in parts:
        assert sorted([*train, *test]) == list(range(125))
        assert (np.abs(np.bincount(labels[test], minlength=4) - sizes / 4) < 1).all()
