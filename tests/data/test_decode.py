import io
import struct
import tracemalloc
import zlib
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image, ImageOps

from convoy.data.decode import BadImage, finish_picture, open_picture, upright_size
from convoy.terminal import printable
from data.made import encoded, picture


def decode(data: bytes, **options) -> Image.Image:
    return finish_picture(open_picture(data, "it"), "it", **options)


def reason(data: bytes) -> str:
    with pytest.raises(BadImage) as error:
        decode(data)
    assert error.value.name == "it"
    assert str(error.value).startswith("it ")
    return error.value.reason


def test_grey_and_rgb_stay_as_they_are():
    for mode in ("L", "RGB"):
        image = picture(mode=mode)
        result = decode(encoded(image))
        assert result.mode == mode
        assert result.tobytes() == image.tobytes()


def test_cmyk_becomes_rgb():
    image = picture()
    result = decode(encoded(image.convert("CMYK"), "JPEG", quality=100))
    assert result.mode == "RGB"
    assert np.abs(np.asarray(result).astype(int) - np.asarray(image)).mean() < 3


def test_transparent_becomes_white():
    for mode, kind in (("RGBA", "PNG"), ("LA", "PNG"), ("RGBA", "WEBP")):
        image = picture(mode=mode)
        alpha = Image.new("L", image.size, 255)
        alpha.paste(0, (0, 0, 40, 70))
        image.putalpha(alpha)
        options = {"lossless": True} if kind == "WEBP" else {}
        result = decode(encoded(image, kind, **options))
        assert result.mode == ("L" if mode == "LA" else "RGB")
        pixels = np.asarray(result)
        assert (pixels[:, :40] == 255).all()
        opaque = np.asarray(image.convert(result.mode))[:, 40:]
        np.testing.assert_array_equal(pixels[:, 40:], opaque)


def test_half_transparent_is_mixed_with_white():
    image = Image.new("RGBA", (2, 2), (0, 100, 200, 128))
    assert decode(encoded(image)).getpixel((0, 0)) == pytest.approx((127, 177, 227), abs=1)


def test_palettes_with_and_without_transparency():
    image = picture().quantize(8)
    np.testing.assert_array_equal(decode(encoded(image)), image.convert("RGB"))
    result = np.asarray(decode(encoded(image, transparency=3)))
    where = np.asarray(image) == 3
    assert (result[where] == 255).all()
    np.testing.assert_array_equal(result[~where], np.asarray(image.convert("RGB"))[~where])
    assert decode(encoded(image, "GIF")).mode == "RGB"


def test_a_transparent_color_of_an_rgb_png():
    image = Image.new("RGB", (4, 4), (10, 20, 30))
    image.putpixel((0, 0), (1, 2, 3))
    result = decode(encoded(image, transparency=(1, 2, 3)))
    assert result.mode == "RGB"
    assert result.getpixel((0, 0)) == (255, 255, 255)
    assert result.getpixel((1, 1)) == (10, 20, 30)


def test_sixteen_bits_are_scaled_not_cut_off():
    ramp = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    for kind in ("PNG", "TIFF"):
        result = decode(encoded(Image.fromarray(ramp), kind))
        assert result.mode == "L"
        np.testing.assert_array_equal(np.asarray(result).ravel(), np.arange(256))
    plain = np.asarray(decode(encoded(Image.fromarray(ramp), "PPM")))
    np.testing.assert_array_equal(plain.ravel(), np.arange(256))


def test_large_pictures_are_converted_in_little_memory():
    values = np.random.default_rng(0).integers(0, 2**16, (1500, 1500), dtype=np.uint16)
    data = encoded(Image.fromarray(values), compress_level=1)
    tracemalloc.start()
    result = decode(data)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(np.asarray(result), (values.astype(int) + 128) // 257)
    assert most < 40 * 2**20  # as three copies of eight bytes a pixel it was 54 MiB, for 89 megapixels 2 GiB


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "1", "P", "P with transparency", "LA", "RGBA", "CMYK", "YCbCr"])
def test_a_large_picture_is_converted_as_its_parts_would_be(mode):
    kind = "TIFF" if mode in ("I;16B", "CMYK", "YCbCr") else "PNG"
    image = Image.frombytes("RGBA", (700, 1600), np.random.default_rng(0).bytes(4 * 700 * 1600))
    options = {"transparency": 7} if "with" in mode else {}
    if mode in ("I;16", "I;16B"):
        image = Image.frombytes(mode, image.size, image.tobytes()[: 2 * 700 * 1600])
    else:
        image = (
            image.convert("RGB").quantize(16) if mode[0] == "P" else image.convert("RGB" if mode[-1] in "Kr" else mode)
        )
        image = image.convert(mode) if mode[-1] in "Kr" else image
    whole = np.asarray(decode(encoded(image, kind, **options)))
    for top in range(0, 1600, 400):
        part = decode(encoded(image.crop((0, top, 700, top + 400)), kind, **options))
        np.testing.assert_array_equal(whole[top : top + 400], np.asarray(part))


def test_black_and_white():
    image = picture(mode="L").point(lambda v: 255 * (v > 128)).convert("1")
    result = decode(encoded(image))
    assert result.mode == "L"
    np.testing.assert_array_equal(result, image.convert("L"))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_exif_orientation(orientation, mode):
    image = picture(60, 40, mode)
    exif = Image.Exif()
    exif[0x112] = orientation
    data = encoded(image, "JPEG", exif=exif)
    with Image.open(io.BytesIO(data)) as plain:
        expected = ImageOps.exif_transpose(plain).convert("L" if mode == "L" else "RGB")
    opened = open_picture(data, "it")
    assert upright_size(opened) == expected.size
    np.testing.assert_array_equal(finish_picture(opened, "it"), expected)


def test_nonsense_orientation_is_left_out():
    exif = Image.Exif()
    exif[0x112] = 17
    assert decode(encoded(picture(60, 40), "JPEG", exif=exif)).size == (60, 40)


def test_tiff_orientation():
    data = encoded(picture(60, 40), "TIFF", tiffinfo={0x112: 6})
    assert upright_size(open_picture(data, "it")) == (40, 60)
    assert decode(data).size == (40, 60)


def test_a_large_jpeg_is_decoded_smaller_but_never_below_what_is_needed():
    data = encoded(picture(800, 600), "JPEG")
    assert decode(data, at_least=(190, 140)).size == (200, 150)
    assert decode(data, at_least=(201, 100)).size == (400, 300)
    assert decode(data, at_least=(700, 500)).size == (800, 600)
    exif = Image.Exif()
    exif[0x112] = 6
    turned = encoded(picture(800, 600), "JPEG", exif=exif)
    assert decode(turned, at_least=(140, 190)).size == (150, 200)


def test_cut_off_pictures_are_refused():
    for kind in ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF"):
        data = encoded(picture(), kind)
        assert "cannot be decoded" in reason(data[: len(data) // 2]) or kind in ("WEBP", "TIFF")
        for share in (0.02, 0.3, 0.6, 0.9):
            with pytest.raises(BadImage):
                decode(data[: int(len(data) * share)])


def test_broken_bytes_never_raise_anything_else():
    random = np.random.default_rng(0)
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "JPEG2000", "PPM"):
        data = np.frombuffer(encoded(picture(16, 16), kind), np.uint8)
        for _ in range(60):
            broken = data.copy()
            broken[random.integers(len(broken), size=4)] = random.integers(256, size=4)
            with suppress(BadImage):
                assert decode(broken.tobytes()).mode in ("L", "RGB")


def test_what_is_no_picture():
    assert reason(b"") == "is an empty file"
    assert reason(b"hello, I am a text") == "is no picture in a known format"
    assert reason(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n") == "is no picture in a known format"


def test_a_few_bytes_cannot_claim_a_gigabyte():
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    for side in (10_000, 60_000):
        header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
        bomb = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
        assert "million" in reason(bomb)


def test_thirty_two_bits_are_refused():
    for array in (np.ones((4, 4), np.int32), np.ones((4, 4), np.float32)):
        assert "32 bits" in reason(encoded(Image.fromarray(array), "TIFF"))


def test_printable():
    assert printable("a\x1b[31mb\nc") == "a\\x1b[31mb\\nc"
    assert printable("Łódź – 猫") == "Łódź – 猫"
    assert printable("\udcff").isprintable()
