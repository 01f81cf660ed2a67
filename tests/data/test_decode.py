"""Files of pictures as pixels: of eight bits, grey or RGB, upright; or a reason why there are none."""

import io
import struct
import tracemalloc
import zlib
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image, ImageOps

from convoy.data.decode import BadImage, finish_picture, open_picture, upright_size
from data.made import encoded, picture


def decode(data: bytes, **options: tuple[int, int]) -> Image.Image:
    return finish_picture(open_picture(data, "it"), "it", **options)


def reason(data: bytes) -> str:
    with pytest.raises(BadImage, match=r"^it ") as error:
        decode(data)
    assert error.value.name == "it"
    return error.value.reason


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x112] = orientation
    return exif


def test_colors_become_grey_or_rgb() -> None:
    for mode in ("L", "RGB"):
        image = picture(mode=mode)
        assert decode(encoded(image)).mode == mode and decode(encoded(image)).tobytes() == image.tobytes()
    cmyk = decode(encoded(picture(mode="CMYK"), "JPEG", quality=100))
    assert cmyk.mode == "RGB" and np.abs(np.asarray(cmyk).astype(int) - np.asarray(picture())).mean() < 3
    bits = picture(mode="L").point(lambda value: 255 * (value > 128)).convert("1")
    np.testing.assert_array_equal(decode(encoded(bits)), bits.convert("L"))
    image = picture().quantize(8)
    np.testing.assert_array_equal(decode(encoded(image)), image.convert("RGB"))
    assert decode(encoded(image, "GIF")).mode == "RGB"


def test_what_is_transparent_becomes_white() -> None:
    for mode, kind in (("RGBA", "PNG"), ("LA", "PNG"), ("RGBA", "WEBP")):
        image = picture(mode=mode)
        alpha = Image.new("L", image.size, 255)
        alpha.paste(0, (0, 0, 40, 70))
        image.putalpha(alpha)
        result = decode(encoded(image, kind, **({"lossless": True} if kind == "WEBP" else {})))
        assert result.mode == ("L" if mode == "LA" else "RGB")
        assert (np.asarray(result)[:, :40] == 255).all()
        np.testing.assert_array_equal(np.asarray(result)[:, 40:], np.asarray(image.convert(result.mode))[:, 40:])
    half = Image.new("RGBA", (2, 2), (0, 100, 200, 128))
    assert decode(encoded(half)).getpixel((0, 0)) == pytest.approx((127, 177, 227), abs=1)
    palette = picture().quantize(8)
    result, where = np.asarray(decode(encoded(palette, transparency=3))), np.asarray(palette) == 3
    assert (result[where] == 255).all()
    np.testing.assert_array_equal(result[~where], np.asarray(palette.convert("RGB"))[~where])
    image = Image.new("RGB", (4, 4), (10, 20, 30))
    image.putpixel((0, 0), (1, 2, 3))
    image = decode(encoded(image, transparency=(1, 2, 3)))
    assert (image.mode, image.getpixel((0, 0)), image.getpixel((1, 1))) == ("RGB", (255,) * 3, (10, 20, 30))


def test_sixteen_bits_are_scaled_not_cut_off_and_in_little_memory() -> None:
    ramp = Image.fromarray(np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16))
    for kind in ("PNG", "TIFF", "PPM"):
        np.testing.assert_array_equal(np.asarray(decode(encoded(ramp, kind))).ravel(), np.arange(256))
    for array in (np.ones((4, 4), np.int32), np.ones((4, 4), np.float32)):
        assert "32 bits" in reason(encoded(Image.fromarray(array), "TIFF"))
    values = np.random.default_rng(0).integers(0, 2**16, (1500, 1500), dtype=np.uint16)
    data = encoded(Image.fromarray(values), compress_level=1)
    tracemalloc.start()
    result = decode(data)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(np.asarray(result), (values.astype(int) + 128) // 257)
    assert most < 40 * 2**20  # as three copies of eight bytes a pixel it was 54 MiB, for 89 megapixels 2 GiB


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "P with transparency", "LA", "RGBA", "CMYK"])
def test_a_large_picture_is_converted_as_its_parts_would_be(mode: str) -> None:
    kind = "TIFF" if mode in ("I;16B", "CMYK") else "PNG"
    random, size = np.random.default_rng(0).bytes(4 * 700 * 1600), (700, 1600)
    options = {"transparency": 7} if mode[0] == "P" else {}
    if mode[0] in "IP":
        image = Image.frombytes(mode.split()[0], size, random[: (2 if mode[0] == "I" else 1) * 700 * 1600])
        image.putpalette(random[:768]) if mode[0] == "P" else None
    else:
        image = Image.frombytes("RGBA", size, random).convert("RGB" if mode == "CMYK" else mode).convert(mode)
    whole = np.asarray(decode(encoded(image, kind, **options)))
    for top in range(0, 1600, 400):
        part = decode(encoded(image.crop((0, top, 700, top + 400)), kind, **options))
        np.testing.assert_array_equal(whole[top : top + 400], np.asarray(part))


def test_pictures_are_upright() -> None:
    for orientation in (*range(1, 9), 17):  # the last is nonsense, and left out
        for mode in ("RGB", "L", "CMYK"):
            data = encoded(picture(60, 40, mode), "JPEG", exif=turned(orientation))
            with Image.open(io.BytesIO(data)) as plain:
                wanted = ImageOps.exif_transpose(plain).convert("L" if mode == "L" else "RGB")
            assert upright_size(open_picture(data, "it")) == wanted.size
            np.testing.assert_array_equal(decode(data), wanted)
    assert decode(encoded(picture(60, 40), "TIFF", tiffinfo={0x112: 6})).size == (40, 60)


def test_a_large_jpeg_is_decoded_smaller_but_never_below_what_is_needed() -> None:
    data = encoded(picture(800, 600), "JPEG")
    for least, size in (((190, 140), (200, 150)), ((201, 100), (400, 300)), ((700, 500), (800, 600))):
        assert decode(data, at_least=least).size == size
    assert decode(encoded(picture(800, 600), "JPEG", exif=turned(6)), at_least=(140, 190)).size == (150, 200)


def test_what_is_broken_or_no_picture_is_refused_and_raises_nothing_else() -> None:
    assert reason(b"") == "is an empty file"
    assert reason(b"hello, I am a text") == "is no picture in a known format"
    assert reason(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n") == "is no picture in a known format"
    random = np.random.default_rng(0)
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "JPEG2000", "PPM"):
        data = np.frombuffer(encoded(picture(16, 16), kind), np.uint8)
        for _ in range(40):
            broken = data.copy()
            broken[random.integers(len(broken), size=4)] = random.integers(256, size=4)
            with suppress(BadImage):
                assert decode(broken.tobytes()).mode in ("L", "RGB")
    for kind in ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF"):
        data = encoded(picture(), kind)
        for share in (0.02, 0.3, 0.5, 0.9):
            words = reason(data[: int(len(data) * share)])
            assert "cannot be decoded" in words or share != 0.5 or kind in ("WEBP", "TIFF")


def test_a_few_bytes_cannot_claim_a_gigabyte() -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    for side in (10_000, 60_000):
        header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
        content = chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
        assert "million" in reason(b"\x89PNG\r\n\x1a\n" + header + content)
