import numpy as np
import pytest
from PIL import Image

from convoy.data import AugmentConfig
from convoy.data.decode import open_picture
from convoy.data.transforms import Geometry
from data.made import encoded, picture


def geometry(image_size: int = 32, resize: int = 32, **augment) -> Geometry:
    return Geometry(image_size, resize, AugmentConfig(**augment))


def test_the_center_of_the_resized_picture():
    image = picture(120, 60)
    result = geometry(28, 30).center(image, "it")
    whole = image.resize((60, 30), Image.Resampling.BILINEAR)
    expected = whole.crop((16, 1, 44, 29))
    assert result.size == (28, 28)
    assert np.abs(np.asarray(result).astype(int) - np.asarray(expected)).mean() < 1


def test_a_picture_of_the_right_size_is_not_touched():
    image = picture(32, 32)
    assert geometry().center(image, "it").tobytes() == image.tobytes()


def test_tall_pictures_and_tiny_ones():
    for width, height in ((20, 300), (300, 20), (1, 1), (3, 50)):
        assert geometry(32, 36).center(picture(width, height), "it").size == (32, 32)
        for crop in ("pad", "random-resized"):
            draws = np.full(22 if crop != "pad" else 2, 0.999)
            assert geometry(32, 36, crop=crop).crop(picture(width, height), "it", draws).size == (32, 32)


def test_padding_is_black_and_reaches_every_corner():
    image = Image.new("RGB", (32, 32), "white")
    padded = geometry(crop="pad")
    for u, v in ((0.0, 0.0), (0.999, 0.0), (0.5, 0.999)):
        result = np.asarray(padded.crop(image, "it", np.array([u, v])))
        left, top = int(u * 9) - 4, int(v * 9) - 4
        expected = np.zeros_like(result)
        expected[max(-top, 0) : 32 - max(top, 0), max(-left, 0) : 32 - max(left, 0)] = 255
        np.testing.assert_array_equal(result, expected)
    draws = np.random.default_rng(0).random((2000, 2))
    assert set(padded.pad_offsets(32, 32, draws).ravel()) == set(range(9))


def test_the_crop_of_2012_takes_a_piece_of_the_resized_picture():
    image = picture(90, 60)
    result = geometry(20, 30, crop="pad", pad=0).crop(image, "it", np.array([0.5, 0.5]))
    whole = image.resize((45, 30), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(result, whole.crop((13, 5, 33, 25)))


def test_random_boxes_have_the_asked_area_and_shape():
    boxes = geometry(crop="random-resized", scale=(0.2, 0.5), ratio=(0.5, 2.0))
    random = np.random.default_rng(0)
    areas, shapes, corners = [], [], []
    for _ in range(2000):
        left, top, right, bottom = boxes._random_box(400, 300, random.random(22))
        assert 0 <= left < right <= 400
        assert 0 <= top < bottom <= 300
        areas.append((right - left) * (bottom - top) / 120_000)
        shapes.append((right - left) / (bottom - top))
        corners.append((left, top))
    assert min(areas) > 0.19
    assert max(areas) < 0.51
    assert np.mean(areas) == pytest.approx(0.35, abs=0.02)
    assert min(shapes) > 0.49
    assert max(shapes) < 2.05
    assert np.mean(np.log(shapes)) == pytest.approx(0, abs=0.08)
    assert np.min(corners) == 0


def test_a_box_that_never_fits_becomes_the_middle():
    boxes = geometry(crop="random-resized", scale=(1.0, 1.0), ratio=(1.0, 1.0))
    assert boxes._random_box(300, 100, np.zeros(22)) == (100, 0, 200, 100)
    assert boxes._random_box(100, 300, np.zeros(22)) == (0, 100, 100, 200)


def test_a_crop_of_a_large_jpeg_is_nearly_that_of_the_whole_picture():
    """Decoding at a part of the size must look at the same place."""
    data = encoded(picture(1600, 1200), "JPEG", quality=95)
    boxes = geometry(64, 64, crop="random-resized", scale=(0.3, 0.6))
    for seed in range(5):
        draws = np.random.default_rng(seed).random(22)
        small = boxes.crop(open_picture(data, "it"), "it", draws)
        whole = open_picture(data, "it")
        whole.load()
        box = boxes._random_box(1600, 1200, draws)
        expected = whole.resize((64, 64), Image.Resampling.BILINEAR, box=box)
        assert np.abs(np.asarray(small).astype(int) - np.asarray(expected)).mean() < 2


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_interpolation(interpolation):
    image = picture(64, 64)
    result = geometry(32, 32, interpolation=interpolation).center(image, "it")
    expected = image.resize((32, 32), Image.Resampling[interpolation.upper()], box=(0, 0, 64, 64))
    np.testing.assert_array_equal(result, expected)
