"""Files of pictures as pixels: of eight bits, grey or RGB, upright; or a reason why there are none."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from convoy.data.decode import BadImage, finish_picture, open_picture, upright_size
from data.made import encoded, picture, turned


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
