"""The decoder `turbo` beside Pillow, the reference: the same parts of the same pictures."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from convoy.data import AugmentConfig, DataConfig, Order, evaluation_batches, open_data, training_batches, turbo
from convoy.data.batch import BatchMaker
from convoy.data.decode import oriented
from convoy.data.transforms import Geometry
from convoy.errors import ConvoyError
from data.made import encoded, picture, write_folder
from data.test_batch import Listed
from shared_data import shared

installed = pytest.mark.skipif(bool(turbo.missing()), reason="needs simplejpeg and OpenCV (extra `fast`)")
CROP = {"crop": "random-resized", "flip": True}


def made(files, decoder: str, channels: int = 3, side: int = 48, **augment) -> np.ndarray:
    geometry = Geometry(side, side + 8, AugmentConfig(**augment))
    maker = BatchMaker(Listed(files), geometry, channels, seed=3, skip_bad=False, decoder=decoder)
    samples = np.arange(len(files))
    both = maker.training(samples, epoch=1), maker.evaluation(samples)
    return np.concatenate([batch.images.numpy() for batch in both]).astype(int)


def difference(files, **options) -> float:
    """Mean absolute difference of a pixel between the two decoders, of 255."""
    return float(np.abs(made(files, "turbo", **options) - made(files, "pillow", **options)).mean())


KINDS = {
    "JPEG": [encoded(picture(seed=i, width=160, height=120), "JPEG", quality=95) for i in range(6)],
    "large JPEG": [encoded(picture(seed=i, width=900, height=700), "JPEG", quality=95) for i in range(6)],
    "small JPEG": [encoded(picture(seed=i, width=40, height=30), "JPEG", quality=95) for i in range(6)],
    "grey JPEG": [encoded(picture(seed=i, mode="L", width=160, height=120), "JPEG", quality=95) for i in range(6)],
    "CMYK JPEG": [encoded(picture(seed=i, mode="CMYK", width=160, height=120), "JPEG") for i in range(6)],
    "PNG": [encoded(picture(seed=i, width=160, height=120)) for i in range(6)],
    "PPM": [encoded(picture(seed=i, width=160, height=120), "PPM") for i in range(6)],
    "PGM": [encoded(picture(seed=i, mode="L", width=160, height=120), "PPM") for i in range(6)],
}


@installed
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_those_of_pillow_but_for_the_last_bits(kind, channels):
    assert difference(KINDS[kind], channels=channels, **CROP) < 1.5


@installed
def test_the_comparison_notices_another_part_of_the_picture(monkeypatch):
    """The negative control: two pixels beside it."""
    files = KINDS["JPEG"]
    own = Geometry.training_box
    near = difference(files, **CROP)
    shifted = lambda self, *of: tuple(end + 2 * (place % 2 == 0) for place, end in enumerate(own(self, *of)))  # noqa: E731
    monkeypatch.setattr(Geometry, "training_box", shifted)
    assert difference(files, **CROP) > 2 * near


@installed
@pytest.mark.parametrize("augment", [{"crop": "pad"}, {"crop": "none"}, CROP | {"color_jitter": 0.4, "pca_noise": 0.1}])
def test_every_augmentation_is_that_of_pillow(augment):
    assert difference(KINDS["JPEG"], **augment) < 2


@installed
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_upright(orientation):
    exif = Image.Exif()
    exif[0x112] = orientation
    files = [encoded(picture(width=160, height=120), "JPEG", quality=95, exif=exif)]
    assert oriented(files[0]) == (orientation != 1)
    assert difference(files, crop="none") < 1.5


@pytest.mark.parametrize("data", [b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd8" + b"\xff\xe1\x00\x00" * 3, b"\xff\xd8abc"])
def test_a_header_that_cannot_be_read_is_left_to_pillow(data):
    assert oriented(data)


@installed
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: b"", "is an empty file"),
        (lambda data: data[: len(data) // 2], "cannot be decoded"),
        (lambda data: b"nothing", "is no picture in a known format"),
        (lambda data: data[:300] + bytes(200) + data[500:], ""),
        (lambda data: b"P6\n900000 900000\n255\n", "million pixels"),
        (lambda data: b"P6\n90 90\n255\nabc", "cannot be decoded"),
    ],
)
def test_broken_files_are_refused_in_pillows_words(damage, words):
    files = [damage(KINDS["JPEG"][0])]
    sentences = []
    for decoder in ("turbo", "pillow"):
        try:
            sentences.append(made(files, decoder, crop="none").shape)
        except ConvoyError as error:
            sentences.append(str(error))
    assert sentences[0] == sentences[1] and words in str(sentences[0])


@installed
def test_threads_have_buffers_of_their_own():
    files = KINDS["JPEG"] * 4
    alone = [made([file], "turbo", **CROP) for file in files]
    geometry = Geometry(48, 56, AugmentConfig(**CROP))
    maker = BatchMaker(Listed(files), geometry, 3, seed=3, skip_bad=False, decoder="turbo")

    def one(sample: int) -> np.ndarray:
        return maker.evaluation(np.array([sample])).images.numpy().astype(int)

    with ThreadPoolExecutor(4) as pool:
        for found, expected in zip(pool.map(one, range(len(files))), alone, strict=True):
            assert np.array_equal(found[0], expected[1])


@installed
def test_pixels_are_a_function_of_seed_epoch_and_sample(tmp_path):
    """Whatever makes them: this process, in which OpenCV has threads, workers, or several ranks."""
    write_folder(tmp_path / "train", num=8, width=500, height=400)
    write_folder(tmp_path / "val", num=1)
    section = DataConfig(path=str(tmp_path), decoder="turbo", augment=AugmentConfig(**CROP))

    def made(workers: int, positions: range | None = None) -> torch.Tensor:
        own = section.model_copy(update={"workers": workers})
        data = open_data(own)
        order = Order(len(data.train), 8, seed=5)
        made = training_batches(data, own, order, first_update=1, num_updates=3, seed=5, positions=positions)
        return torch.stack([batch.images for batch in made])

    plain = made(0)
    assert torch.equal(made(2), plain)
    assert torch.equal(torch.cat([made(1, range(3)), made(0, range(3, 8))], dim=1), plain)


@installed
def test_raw_pixels_are_not_changed_by_their_file():
    image = picture(width=64, height=64)
    (found,) = made([encoded(image, "PPM")], "turbo", side=56, crop="none")[:1]
    expected = np.asarray(image.crop((0, 0, 64, 64)).resize((56, 56), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    assert found.shape == expected.shape
    whole = Geometry(64, 64, AugmentConfig())
    maker = BatchMaker(Listed([encoded(image, "PPM")]), whole, 3, seed=0, skip_bad=False, decoder="turbo")
    assert np.array_equal(maker.evaluation(np.array([0])).images[0].permute(1, 2, 0), np.asarray(image))


def test_without_its_libraries_it_is_refused_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(turbo, "find_spec", lambda name: None)
    write_folder(tmp_path / "train")
    write_folder(tmp_path / "val")
    section = DataConfig(path=str(tmp_path), decoder="turbo", workers=0)
    with pytest.raises(ConvoyError, match=r"needs simplejpeg and OpenCV, which are not installed: pip install"):
        next(evaluation_batches(open_data(section), section, batch=2))


@installed
@pytest.mark.parametrize("crop", ["random-resized", "none"])
def test_photographs_look_as_pillow_shows_them(crop):
    files = [file.read_bytes() for file in sorted(shared("imagenet-sample").rglob("*.JPEG"))[::10]]
    assert difference(files, side=224, crop=crop) < 5
