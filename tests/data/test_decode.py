"""Files of pictures as pixels: of eight bits, grey or RGB, upright; or a reason why there are none. And the decoder
`turbo` beside Pillow, the reference: the same parts of the same pictures."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from convoy.data.batch import BatchMaker
from convoy.data.config import AugmentConfig
from convoy.data.decode import BadImage, Turbo, finish_picture, open_picture, oriented, turbo_lacks, upright_size
from convoy.data.transforms import Geometry
from data.made import Listed, encoded, picture, turned


def decode(data: bytes, **options: tuple[int, int]) -> Image.Image:
    return finish_picture(open_picture(data, "it"), "it", **options)


def reason(data: bytes) -> str:
    with pytest.raises(BadImage, match=r"^it ") as error:
        decode(data)
    assert error.value.name == "it"
    return error.value.reason


def clear() -> Image.Image:
    """Transparent on its left half."""
    image = picture(mode="RGBA")
    image.paste((*image.getpixel((0, 0))[:3], 0), (0, 0, 40, 70))
    return image


def on_white() -> np.ndarray:
    pixels = np.array(picture())
    pixels[:, :40] = 255
    return pixels


PALETTE, RAMP = picture().quantize(8), np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
LOOKS: dict[str, tuple[bytes, Any]] = {
    "grey": (encoded(picture(mode="L")), picture(mode="L")),
    "palette": (encoded(PALETTE), PALETTE.convert("RGB")),
    "clear": (encoded(clear()), on_white()),
    **{f"16 {kind}": (encoded(Image.fromarray(RAMP), kind), RAMP // 257) for kind in ("PNG", "TIFF", "PPM")},
}


def test_whatever_a_file_keeps_becomes_grey_or_rgb_on_white() -> None:
    for kind, (data, wanted) in LOOKS.items():
        image = decode(data)
        assert image.mode == ("L" if np.ndim(wanted) == 2 else "RGB"), kind
        np.testing.assert_array_equal(image, wanted, kind)
    cmyk = decode(encoded(picture(mode="CMYK"), "JPEG", quality=100))
    assert cmyk.mode == "RGB" and np.abs(np.asarray(cmyk).astype(int) - np.asarray(picture())).mean() < 3
    for array in (np.ones((4, 4), np.int32), np.ones((4, 4), np.float32)):
        assert "32 bits" in reason(encoded(Image.fromarray(array), "TIFF"))


def test_pictures_are_upright_and_large_jpegs_decoded_smaller_but_never_below_what_is_needed() -> None:
    for orientation in (*range(1, 9), 17):  # the last is nonsense, and left out
        data = encoded(picture(60, 40), "JPEG", exif=turned(orientation))
        with Image.open(io.BytesIO(data)) as plain:
            wanted = ImageOps.exif_transpose(plain)
        assert upright_size(open_picture(data, "it")) == wanted.size
        np.testing.assert_array_equal(decode(data), wanted)
    assert decode(encoded(picture(60, 40), "TIFF", tiffinfo={0x112: 6})).size == (40, 60)
    for kind in ("PNG", "WEBP", "JPEG"):  # what turns a picture is damaged, its pixels are not
        data = encoded(picture(60, 40), kind, exif=b"Exif\0\0no tags", dpi=(72, 72))
        assert upright_size(open_picture(data, "it")) == decode(data).size == (60, 40)
    for least, size in (((190, 140), (200, 150)), ((201, 100), (400, 300))):
        assert decode(encoded(picture(800, 600), "JPEG"), at_least=least).size == size


def test_what_is_broken_no_picture_or_a_bomb_is_refused() -> None:
    assert reason(b"") == "is an empty file"
    for content in (b"hello, I am a text", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"):
        assert reason(content) == "is no picture in a known format"
    for kind in ("JPEG", "PNG", "GIF"):
        data = encoded(picture(), kind)
        assert "cannot be decoded" in reason(data[: len(data) // 2])

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    for side in (10_000, 60_000):  # a few bytes cannot claim a gigabyte
        header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
        content = chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
        assert "million" in reason(b"\x89PNG\r\n\x1a\n" + header + content)


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


def files_of(kind: str = "JPEG", width: int = 160, height: int = 120, mode: str = "RGB", **options: Any) -> list[bytes]:
    return [encoded(picture(seed=i, width=width, height=height, mode=mode), kind, **options) for i in range(6)]


KINDS = [("JPEG", 900, 700, "RGB"), ("JPEG", 160, 120, "L"), ("JPEG", 160, 120, "CMYK"), ("PNG", 160, 120, "RGB")]


@installed
@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_those_of_pillow_but_for_the_last_bits(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        quality = {"quality": 95} if kind[0] == "JPEG" else {}
        assert difference(files_of(*kind, **quality), channels=channels, **CROP) < 1.5
    plain = files_of(quality=95)
    for augment in ({"crop": "pad"}, {"crop": "none"}, CROP | {"color_jitter": 0.4}):
        assert difference(plain, **augment) < 2, augment
    for orientation in range(1, 9):
        rotated = files_of(quality=95, exif=turned(orientation))[:1]
        assert oriented(rotated[0]) == (orientation != 1) and difference(rotated, crop="none") < 1.5
    raw = maker(files_of("PPM", 64, 64), side=64, margin=0).make(np.array([0]), None)  # not changed at all
    assert np.array_equal(raw.images[0].permute(1, 2, 0), np.asarray(picture(64, 64)))
    near, write = difference(plain, **CROP), Turbo.write_part
    shifted = lambda self, pixels, box, *of: write(self, pixels, (box[0] + 2, box[1], box[2] + 2, box[3]), *of)  # noqa: E731
    monkeypatch.setattr(Turbo, "write_part", shifted)  # the control: two pixels beside it
    assert difference(plain, **CROP) > 2 * near
