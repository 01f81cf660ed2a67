"""The decoder `turbo` beside Pillow, the reference: the same parts of the same pictures."""

from typing import Any

import numpy as np
import pytest

from convoy.data import AugmentConfig
from convoy.data.batch import BatchMaker
from convoy.data.decode import Turbo, oriented, turbo_lacks
from convoy.data.transforms import Geometry
from data.made import Listed, encoded, picture, turned

installed = pytest.mark.skipif(bool(turbo_lacks()), reason="needs simplejpeg and OpenCV (extra `fast`)")
CROP = {"crop": "random-resized", "flip": True}


def maker(
    files: list[bytes], decoder: str = "turbo", channels: int = 3, side: int = 48, margin: int = 8, **augment: Any
) -> BatchMaker:
    geometry = Geometry(side, side + margin, AugmentConfig(**augment))
    return BatchMaker(Listed(files), geometry, channels, seed=3, skip_bad=False, decoder=decoder)


def made(files: list[bytes], decoder: str, **options: Any) -> np.ndarray:
    both, samples = maker(files, decoder, **options), np.arange(len(files))
    batches = both.make(samples, 1), both.make(samples, None)
    return np.concatenate([batch.images.numpy() for batch in batches]).astype(int)


def difference(files: list[bytes], **options: Any) -> float:
    """Mean absolute difference of a pixel between the two decoders, of 255."""
    return float(np.abs(made(files, "turbo", **options) - made(files, "pillow", **options)).mean())


def files(kind: str = "JPEG", width: int = 160, height: int = 120, mode: str = "RGB", **options: Any) -> list[bytes]:
    return [encoded(picture(seed=i, width=width, height=height, mode=mode), kind, **options) for i in range(6)]


KINDS = [("JPEG", 900, 700, "RGB"), ("JPEG", 160, 120, "L"), ("JPEG", 160, 120, "CMYK"), ("PNG", 160, 120, "RGB")]


@installed
@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_those_of_pillow_but_for_the_last_bits(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        quality = {"quality": 95} if kind[0] == "JPEG" else {}
        assert difference(files(*kind, **quality), channels=channels, **CROP) < 1.5
    plain = files(quality=95)
    for augment in ({"crop": "pad"}, {"crop": "none"}, CROP | {"color_jitter": 0.4}):
        assert difference(plain, **augment) < 2, augment
    for orientation in range(1, 9):
        rotated = files(quality=95, exif=turned(orientation))[:1]
        assert oriented(rotated[0]) == (orientation != 1) and difference(rotated, crop="none") < 1.5
    raw = maker(files("PPM", 64, 64), side=64, margin=0).make(np.array([0]), None)  # not changed at all
    assert np.array_equal(raw.images[0].permute(1, 2, 0), np.asarray(picture(64, 64)))
    near, write = difference(plain, **CROP), Turbo.write_part
    shifted = lambda self, pixels, box, *of: write(self, pixels, (box[0] + 2, box[1], box[2] + 2, box[3]), *of)  # noqa: E731
    monkeypatch.setattr(Turbo, "write_part", shifted)  # the control: two pixels beside it
    assert difference(plain, **CROP) > 2 * near
