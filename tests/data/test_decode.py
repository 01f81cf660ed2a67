"""Files of pictures as pixels: of eight bits, grey or RGB, upright; or a reason why there are none."""

import io
import struct
import tracemalloc
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
    alpha = Image.new("L", image.size, 255)
    alpha.paste(0, (0, 0, 40, 70))
    image.putalpha(alpha)
    return image


def on_white(image: Image.Image, where: Any) -> np.ndarray:
    pixels = np.array(image)
    pixels[where] = 255
    return pixels


LEFT = np.s_[:, :40]
BITS = picture(mode="L").point(lambda value: 255 * (value > 128)).convert("1")
PALETTE, RAMP = picture().quantize(8), np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
LOOKS: dict[str, tuple[bytes, Any]] = {
    "RGB": (encoded(picture()), picture()),
    "grey": (encoded(picture(mode="L")), picture(mode="L")),
    "bits": (encoded(BITS), BITS.convert("L")),
    "palette": (encoded(PALETTE), PALETTE.convert("RGB")),
    "clear": (encoded(clear()), on_white(clear().convert("RGB"), LEFT)),
    "clear WEBP": (encoded(clear(), "WEBP", lossless=True), on_white(clear().convert("RGB"), LEFT)),
    "clear grey": (encoded(clear().convert("LA")), on_white(clear().convert("L"), LEFT)),
    "clear index": (encoded(PALETTE, transparency=3), on_white(PALETTE.convert("RGB"), np.asarray(PALETTE) == 3)),
    **{f"16 {kind}": (encoded(Image.fromarray(RAMP), kind), RAMP // 257) for kind in ("PNG", "TIFF", "PPM")},
}


def test_whatever_a_file_keeps_becomes_grey_or_rgb_on_white() -> None:
    for kind, (data, wanted) in LOOKS.items():
        image = decode(data)
        assert image.mode == ("L" if np.ndim(wanted) == 2 else "RGB"), kind
        np.testing.assert_array_equal(image, wanted, kind)
    cmyk = decode(encoded(picture(mode="CMYK"), "JPEG", quality=100))
    assert cmyk.mode == "RGB" and np.abs(np.asarray(cmyk).astype(int) - np.asarray(picture())).mean() < 3
    half = Image.new("RGBA", (2, 2), (0, 100, 200, 128))
    assert decode(encoded(half)).getpixel((0, 0)) == pytest.approx((127, 177, 227), abs=1)
    image = Image.new("RGB", (4, 4), (10, 20, 30))
    image.putpixel((0, 0), (1, 2, 3))
    image = decode(encoded(image, transparency=(1, 2, 3)))
    assert (image.getpixel((0, 0)), image.getpixel((1, 1))) == ((255,) * 3, (10, 20, 30))
    for array in (np.ones((4, 4), np.int32), np.ones((4, 4), np.float32)):
        assert "32 bits" in reason(encoded(Image.fromarray(array), "TIFF"))


@pytest.mark.parametrize("mode", ["I;16", "P with transparency", "LA", "CMYK"])
def test_a_large_picture_is_converted_as_its_parts_would_be_and_in_little_memory(mode: str) -> None:
    kind, width, height = "TIFF" if mode == "CMYK" else "PNG", 700, 1600
    random = np.random.default_rng(0).bytes(4 * width * height)
    options = {"compress_level": 1} | ({"transparency": 7} if mode[0] == "P" else {}) if kind == "PNG" else {}
    if mode[0] in "IP":
        image = Image.frombytes(mode.split()[0], (width, height), random[: (1 + (mode[0] == "I")) * width * height])
        image.putpalette(random[:768]) if mode[0] == "P" else None
    else:
        image = (
            Image.frombytes("RGBA", (width, height), random).convert("RGB" if mode == "CMYK" else mode).convert(mode)
        )
    data = encoded(image, kind, **options)
    tracemalloc.start()
    whole = np.asarray(decode(data))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert mode[0] != "I" or most < 30 * width * height  # else 2 GiB for 89 megapixels
    for top in range(0, height, 400):
        part = decode(encoded(image.crop((0, top, width, top + 400)), kind, **options))
        np.testing.assert_array_equal(whole[top : top + 400], np.asarray(part))


def test_pictures_are_upright_and_large_jpegs_decoded_smaller_but_never_below_what_is_needed() -> None:
    for orientation in (*range(1, 9), 17):  # the last is nonsense, and left out
        for mode in ("RGB", "L", "CMYK"):
            data = encoded(picture(60, 40, mode), "JPEG", exif=turned(orientation))
            with Image.open(io.BytesIO(data)) as plain:
                wanted = ImageOps.exif_transpose(plain).convert("L" if mode == "L" else "RGB")
            assert upright_size(open_picture(data, "it")) == wanted.size
            np.testing.assert_array_equal(decode(data), wanted)
    assert decode(encoded(picture(60, 40), "TIFF", tiffinfo={0x112: 6})).size == (40, 60)
    data = encoded(picture(800, 600), "JPEG")
    for least, size in (((190, 140), (200, 150)), ((201, 100), (400, 300)), ((700, 500), (800, 600))):
        assert decode(data, at_least=least).size == size
    assert decode(encoded(picture(800, 600), "JPEG", exif=turned(6)), at_least=(140, 190)).size == (150, 200)


def test_what_is_broken_no_picture_or_a_bomb_is_refused() -> None:
    assert reason(b"") == "is an empty file"
    for content in (b"hello, I am a text", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"):
        assert reason(content) == "is no picture in a known format"
    for kind in ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF"):
        data = encoded(picture(), kind)
        for share in (0.02, 0.3, 0.5, 0.9):
            words = reason(data[: int(len(data) * share)])
            assert "cannot be decoded" in words or share != 0.5 or kind in ("WEBP", "TIFF")

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    for side in (10_000, 60_000):  # a few bytes cannot claim a gigabyte
        header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
        content = chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
        assert "million" in reason(b"\x89PNG\r\n\x1a\n" + header + content)
