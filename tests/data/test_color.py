import importlib.util

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from convoy.data import AugmentConfig
from convoy.data.transforms import ColorAugment, jitter, pca_noise, rand_augment
from convoy.errors import ConvoyError
from data.made import picture


def test_jitter_without_strength_changes_nothing():
    for mode in ("L", "RGB"):
        image = picture(mode=mode)
        assert jitter(image, 0.0, np.full(6, 0.9)).tobytes() == image.tobytes()


def test_jitter_multiplies_in_the_drawn_order():
    image = picture()
    draws = np.array([0.75, 0.25, 0.5, 0.9, 0.1, 0.5])  # brightness 1.2, contrast 0.8, saturation 1; contrast first
    expected = ImageEnhance.Contrast(image).enhance(0.8)
    expected = ImageEnhance.Color(expected).enhance(1.0)
    expected = ImageEnhance.Brightness(expected).enhance(1.2)
    assert jitter(image, 0.4, draws).tobytes() == expected.tobytes()


def test_pca_noise_adds_one_color_with_the_spread_of_the_paper():
    image = Image.new("RGB", (2, 2), (128, 128, 128))
    random = np.random.default_rng(0)
    shifts = []
    for _ in range(3000):
        pixels = np.asarray(pca_noise(image, 1.0, random.random(3))).astype(float) - 128
        assert (pixels == pixels[0, 0]).all()
        shifts.append(pixels[0, 0] / 255)
    vectors = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
    covariance = vectors @ np.diag(np.array([0.2175, 0.0188, 0.0045]) ** 2) @ vectors.T
    np.testing.assert_allclose(np.cov(np.array(shifts).T), covariance, atol=0.002)


def test_pca_noise_stays_within_the_bytes():
    image = Image.new("RGB", (1, 1), (255, 0, 255))
    for draws in (np.full(3, 0.9999), np.full(3, 0.0001)):
        pixel = pca_noise(image, 5.0, draws).getpixel((0, 0))
        assert all(0 <= value <= 255 for value in pixel)


def test_rand_augment_depends_on_its_key_alone():
    image = picture(40, 30)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = rand_augment(image, (2, 9), key=5)
    assert (torch.get_rng_state() == state).all()
    torch.manual_seed(2)
    np.random.seed(3)  # kornia could have used it
    assert rand_augment(image, (2, 9), key=5).tobytes() == first.tobytes()
    assert len({rand_augment(image, (2, 9), key).tobytes() for key in range(10)}) > 7
    assert first.size == image.size
    assert first.mode == "RGB"


def test_rand_augment_does_not_depend_on_the_number_of_threads():
    image = picture(300, 300)
    threads = torch.get_num_threads()
    try:
        results = []
        for num in (1, 2):
            torch.set_num_threads(num)
            results.append([rand_augment(image, (3, 12), key).tobytes() for key in range(12)])
            assert torch.get_num_threads() == num
    finally:
        torch.set_num_threads(threads)
    assert results[0] == results[1]


def test_rand_augment_without_kornia_names_the_extra(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("convoy.data.transforms.find_spec", lambda name: None if name == "kornia" else find(name))
    with pytest.raises(ConvoyError, match=r"pip install 'convoy-nn\[augment\]'"):
        ColorAugment(AugmentConfig(rand_augment="n2-m9"), seed=0)
    ColorAugment(AugmentConfig(color_jitter=0.4), seed=0)


def test_every_change_is_a_function_of_seed_epoch_and_sample():
    config = AugmentConfig(rand_augment="n1-m9", color_jitter=0.4, pca_noise=0.1)
    image = picture(24, 24)

    def change(seed: int, epoch: int, sample: int) -> bytes:
        return ColorAugment(config, seed)(image, epoch, sample).tobytes()

    base = change(0, 0, 0)
    assert change(0, 0, 0) == base
    assert base not in (change(1, 0, 0), change(0, 1, 0), change(0, 0, 1))


def test_switching_one_change_on_does_not_change_another():
    image = picture(24, 24)
    noise = AugmentConfig(pca_noise=0.5)
    both = AugmentConfig(pca_noise=0.5, color_jitter=1e-9)
    assert ColorAugment(noise, 3)(image, 0, 7).tobytes() == ColorAugment(both, 3)(image, 0, 7).tobytes()
