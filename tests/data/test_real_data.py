"""The real data sets, where they lie beside the checkout."""

import numpy as np
import pytest
import torch

from convoy.data import AugmentConfig, DataConfig, Order, evaluation_batches, open_data, training_batches
from convoy.data.dataset import CIFAR10, MNIST
from convoy.data.parquet import open_parquet
from convoy.data.sources import common_format
from shared_data import shared

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.mark.slow
def test_mnist():
    data = open_data(DataConfig(path=str(shared("mnist"))))
    assert (len(data.train), len(data.test), data.image_size, data.channels) == (60_000, 10_000, 28, 1)
    assert np.bincount(data.train.labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    values = data.train.pixels / 255
    assert (round(values.mean(), 4), round(values.std(), 4)) == (MNIST[0][0], MNIST[1][0])


@pytest.mark.slow
def test_cifar10_parquet():
    """Only the test file is decoded here; the statistics are close to those of the training pictures."""
    opened = open_parquet(shared("cifar10"), DataConfig())
    assert (opened.classes, len(opened.train), len(opened.test)) == (CLASSES, 50_000, 10_000)
    assert np.bincount(opened.train.labels).tolist() == [5000] * 10
    assert common_format(opened.train, opened.test) == (32, 32, 3)
    image = opened.test.load(17)
    assert (image.mode, image.size) == ("RGB", (32, 32))
    data = open_data(DataConfig(path=str(shared("cifar10/test.parquet"))))
    assert (data.mean, data.std) == CIFAR10
    values = data.train.pixels / 255
    np.testing.assert_allclose(values.mean((0, 1, 2)), CIFAR10[0], atol=0.01)
    np.testing.assert_allclose(values.std((0, 1, 2)), CIFAR10[1], atol=0.01)


@pytest.mark.slow
def test_all_photographs_load():
    section = DataConfig(
        path=str(shared("imagenet-sample")),
        workers=0,
        augment=AugmentConfig(crop="random-resized", flip=True, color_jitter=0.4, pca_noise=0.1),
    )
    data = open_data(section)
    assert (len(data.classes), len(data.train) + len(data.test)) == (256, 256)
    modes = [source.load(i).mode for source in (data.train, data.test) for i in range(len(source))]
    assert (modes.count("L"), modes.count("RGB")) == (5, 251)
    order = Order(len(data.train), 46, seed=0)
    batches = list(training_batches(data, section, order, first_update=0, num_updates=5, seed=0))
    assert sorted(torch.cat([batch.samples for batch in batches]).tolist()) == list(range(len(data.train)))
    assert all(batch.images.shape == (46, 3, 224, 224) and not batch.bad for batch in batches)
    assert sum(len(batch) for batch in evaluation_batches(data, section, batch=10)) == len(data.test)
