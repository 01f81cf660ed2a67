"""The decoder `turbo` beside Pillow, the reference: the same parts of the same pictures."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from convoy.data import AugmentConfig, DataConfig, turbo
from convoy.data.batch import BatchMaker
from convoy.data.decode import oriented
from convoy.data.transforms import Geometry
from convoy.errors import ConvoyError
from data.made import Listed, encoded, evaluated, picture, trained, write_folder
from shared_data import shared

installed = pytest.mark.skipif(bool(turbo.missing()), reason="needs simplejpeg and OpenCV (extra `fast`)")
CROP = {"crop": "random-resized", "flip": True}


def maker(files: list[bytes], decoder: str = "turbo", channels: int = 3, side: int = 48, **augment: Any) -> BatchMaker:
    geometry = Geometry(side, side + 8, AugmentConfig(**augment))
    return BatchMaker(Listed(files), geometry, channels, seed=3, skip_bad=False, decoder=decoder)


def made(files: list[bytes], decoder: str, **options: Any) -> np.ndarray:
    both, samples = maker(files, decoder, **options), np.arange(len(files))
    batches = both.training(samples, epoch=1), both.evaluation(samples)
    return np.concatenate([batch.images.numpy() for batch in batches]).astype(int)


def difference(files: list[bytes], **options: Any) -> float:
    """Mean absolute difference of a pixel between the two decoders, of 255."""
    return float(np.abs(made(files, "turbo", **options) - made(files, "pillow", **options)).mean())


def files(kind: str = "JPEG", width: int = 160, height: int = 120, mode: str = "RGB", **options: Any) -> list[bytes]:
    return [encoded(picture(seed=i, width=width, height=height, mode=mode), kind, **options) for i in range(6)]


KINDS: dict[str, Callable[[], list[bytes]]] = {
    "JPEG": lambda: files(quality=95),
    "large JPEG": lambda: files(width=900, height=700, quality=95),
    "small JPEG": lambda: files(width=40, height=30, quality=95),
    "grey JPEG": lambda: files(mode="L", quality=95),
    "CMYK JPEG": lambda: files(mode="CMYK"),
    "PNG": lambda: files("PNG"),
    "PPM": lambda: files("PPM"),
    "PGM": lambda: files("PPM", mode="L"),
}


@installed
@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_those_of_pillow_but_for_the_last_bits(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, make in KINDS.items():
        assert difference(make(), channels=channels, **CROP) < 1.5, kind
    for augment in ({"crop": "pad"}, {"crop": "none"}, CROP | {"color_jitter": 0.4}):
        assert difference(files(quality=95), **augment) < 2, augment
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x112] = orientation
        turned = files(quality=95, exif=exif)[:1]
        assert oriented(turned[0]) == (orientation != 1) and difference(turned, crop="none") < 1.5
    near, box = difference(files(quality=95), **CROP), Geometry.training_box
    shifted = lambda self, *of: tuple(end + 2 * (place % 2 == 0) for place, end in enumerate(box(self, *of)))  # noqa: E731
    monkeypatch.setattr(Geometry, "training_box", shifted)  # the control: two pixels beside it
    assert difference(files(quality=95), **CROP) > 2 * near


@installed
def test_broken_files_are_refused_in_pillows_words() -> None:
    data = files(quality=95)[0]
    for broken, words in (
        (b"", "is an empty file"),
        (data[: len(data) // 2], "cannot be decoded"),
        (b"nothing", "is no picture in a known format"),
        (data[:300] + bytes(200) + data[500:], ""),
        (b"P6\n900000 900000\n255\n", "million pixels"),
        (b"P6\n90 90\n255\nabc", "cannot be decoded"),
    ):
        sentences = []
        for decoder in ("turbo", "pillow"):
            try:
                sentences.append(str(made([broken], decoder, crop="none").shape))
            except ConvoyError as error:
                sentences.append(str(error))
        assert sentences[0] == sentences[1] and words in sentences[0]
    for header in (b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd8" + b"\xff\xe1\x00\x00" * 3, b"\xff\xd8abc"):
        assert oriented(header), "a header that cannot be read is left to Pillow"


@installed
def test_pixels_are_a_function_of_seed_epoch_and_sample(tmp_path: Path) -> None:
    """Whatever makes them: this process, in which OpenCV has threads, threads of its own, workers, or several ranks."""
    every = files(quality=95) * 4
    shared_maker = maker(every, **CROP)
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda i: shared_maker.evaluation(np.array([i])).images.numpy()[0], range(len(every)))
        assert np.array_equal(np.stack(list(found)), shared_maker.evaluation(np.arange(len(every))).images)
    write_folder(tmp_path / "train", num=8, width=500, height=400)
    write_folder(tmp_path / "val", num=1)
    section = DataConfig(path=str(tmp_path), decoder="turbo", augment=AugmentConfig(**CROP))

    def images(workers: int, positions: range | None = None) -> torch.Tensor:
        batches = trained(section.model_copy(update={"workers": workers}), 1, 3, batch=8, positions=positions)
        return torch.stack([batch.images for batch in batches])

    plain = images(0)
    assert torch.equal(images(2), plain)
    assert torch.equal(torch.cat([images(1, range(3)), images(0, range(3, 8))], dim=1), plain)


@installed
def test_raw_pixels_are_not_changed_by_their_file() -> None:
    image = picture(width=64, height=64)
    whole = Geometry(64, 64, AugmentConfig())
    plain = BatchMaker(Listed([encoded(image, "PPM")]), whole, 3, seed=0, skip_bad=False, decoder="turbo")
    assert np.array_equal(plain.evaluation(np.array([0])).images[0].permute(1, 2, 0), np.asarray(image))


def test_without_its_libraries_it_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turbo, "find_spec", lambda name: None)
    write_folder(tmp_path / "train")
    write_folder(tmp_path / "val")
    with pytest.raises(ConvoyError, match=r"needs simplejpeg and OpenCV, which are not installed: pip install"):
        evaluated(DataConfig(path=str(tmp_path), decoder="turbo", workers=0))


@installed
def test_photographs_look_as_pillow_shows_them() -> None:
    photos = [file.read_bytes() for file in sorted(shared("imagenet-sample").rglob("*.JPEG"))[::20]]
    assert max(difference(photos, side=224, crop=crop) for crop in ("random-resized", "none")) < 5
