"""From the bytes of a picture file to an upright 8-bit picture, or to a reason why not.

The decoder `pillow`: torchvision does not install beside every build of torch. No GPU decodes, as none has shown a
gain.

The decoder `turbo`: libjpeg-turbo (simplejpeg) decodes JPEG, OpenCV resizes, Pillow reads all other files. Pixels
differ a little from those of Pillow, so which one is part of a recipe. Both give the same pixels on every machine, in
every process and thread. All decoders by libjpeg-turbo give 913 to 946 of ImageNet's photographs a second on a core,
but simplejpeg alone refuses broken files, takes a buffer, reads a header alone, and scales. OpenCV takes 65 to 85 µs
for a crop to 224 pixels, torch 130 to 225, kornia-rs 230 to 400, Pillow 370 to 480.
"""

import io
import math
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from convoy.errors import ConvoyError
from convoy.terminal import pip_install, printable

_ORIENTATION = 0x112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)
_MOST_KINDS = 6
_APP1, _START_OF_SCAN = b"\xe1", b"\xda"
_MAX_PIXELS = 89_478_485  # Pillow's own limit: a quarter of a gigabyte of RGB
_STRIP = 2**20  # pixels

# Formats that only hold pixels, with the usual end of a name; those that have no signature come last. Pillow would also
# hand PostScript to an interpreter and ask plug-ins about the rest.
_USUAL = (
    "JPEG .jpg, PNG .png, WEBP .webp, BMP .bmp, GIF .gif, TIFF .tif, PPM .ppm, JPEG2000 .jp2, AVIF .avif, HEIF .heic, "
    "JXL .jxl, DIB .dib, ICO .ico, QOI .qoi, PSD .psd, SGI .sgi, SUN .ras, DDS .dds, PCX .pcx, TGA .tga"
)
_FORMATS = dict(pair.split() for pair in _USUAL.split(", "))
# Formats that Pillow reads with a package: its module, what it registers itself by (None: by its import), its endings.
_PACKAGES = {
    "pillow-heif": ("pillow_heif", "register_heif_opener", (".heic", ".heif", ".hif", ".heics", ".heifs")),
    "pillow-jxl-plugin": ("pillow_jxl", None, (".jxl",)),
    "pillow-avif-plugin": ("pillow_avif", None, (".avif", ".avifs")),
}
_HEIC = re.compile(rb"....ftyp(hei[cfmsx]|hev[cmsx]|mif1|msf1)", re.DOTALL)


class BadImage(Exception):  # noqa: N818 (a fact about a picture; the user meets a ConvoyError)
    """A picture that cannot be used: `name` of the sample and `reason`."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"{printable(self.name)} {self.reason}"


def open_picture(data: bytes, name: str) -> Image.Image:
    """The picture with only its header read, so that its size, which a file of a few bytes can claim, is known before
    it is decoded. Raises BadImage."""
    if not data:
        raise BadImage(name, "is an empty file")
    with _reasons(name):
        try:
            image = Image.open(io.BytesIO(data), formats=_formats())
        except UnidentifiedImageError:
            if not _HEIC.match(data):
                raise
            raise BadImage(name, "is HEIC, which takes a package to read: pip install pillow-heif") from None
        width, height = image.size
        if too_large(width, height):
            raise BadImage(name, f"has {width}x{height} pixels, more than {_MAX_PIXELS // 10**6} million")
        return image


def suffix_of(image: Image.Image, suffix: str = "") -> str:
    """The end of the name of the file that a picture was opened from: its own, where that is one of the format."""
    # Pillow calls a JPEG file of several pictures, as cameras write them, MPO.
    usual = _FORMATS.get(image.format or "", ".jpg")
    extensions = Image.registered_extensions()
    return suffix if extensions.get(suffix.lower()) == extensions[usual] else usual


def too_large(width: int, height: int) -> bool:
    """Whether a picture has more pixels than are decoded."""
    return width * height > _MAX_PIXELS


def oriented(jpeg: bytes) -> bool:
    """Whether the header of a JPEG may ask for a rotation or a mirror image."""
    place = 2
    while jpeg[place : place + 1] == b"\xff" and (marker := jpeg[place + 1 : place + 2]) != _START_OF_SCAN:
        end = place + 2 + int.from_bytes(jpeg[place + 2 : place + 4])
        if marker == _APP1 and jpeg[place + 4 : place + 10] == b"Exif\0\0":
            tags = Image.Exif()
            try:
                tags.load(jpeg[place + 4 : end])
                return bool(tags.get(_ORIENTATION, 1) != 1)
            except Exception:
                return True
        place = end
    return jpeg[place : place + 2] != b"\xff" + _START_OF_SCAN


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Width and height after the rotation that the EXIF header asks for."""
    width, height = image.size
    return (height, width) if _orientation(image) in _SIDEWAYS else (width, height)


def finish_picture(image: Image.Image, name: str, at_least: tuple[int, int] | None = None) -> Image.Image:
    """The decoded picture: 8 bit, mode L (grey) or RGB, upright, on white where it was transparent. A JPEG may be
    decoded at 1/2, 1/4 or 1/8 of its size, much faster, as long as it stays `at_least` so large. Raises BadImage."""
    with _reasons(name):
        orientation = _orientation(image)
        if at_least is not None and image.format == "JPEG":
            image.draft(image.mode, at_least if orientation not in _SIDEWAYS else at_least[::-1])
        image.load()
        image = _eight_bit(image, name)
        return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def in_channels(image: Image.Image, channels: int) -> Image.Image:
    """A picture of mode L or RGB in grey (1) or RGB (3), by Pillow's rule."""
    mode = "L" if channels == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode)


def _eight_bit(image: Image.Image, name: str) -> Image.Image:
    if image.mode in ("L", "RGB") and "transparency" not in image.info:
        return image
    sixteen = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    if image.mode in ("I", "F") and not sixteen:
        raise BadImage(name, "has 32 bits a channel, and how bright that is meant to be is unknown: save it as 8 bit")
    # In strips, as intermediate values take up to 24 times the memory of the picture; pixels are independent.
    rows, convert = max(1, _STRIP // image.width), _from_sixteen_bits if sixteen else _flat
    if rows >= image.height:
        return convert(image)
    whole: Image.Image | None = None
    for top in range(0, image.height, rows):
        strip = convert(image.crop((0, top, image.width, min(top + rows, image.height))))
        whole = whole or Image.new(strip.mode, image.size)
        whole.paste(strip, (0, top))
    assert whole is not None
    return whole


def _from_sixteen_bits(image: Image.Image) -> Image.Image:
    """16 bits a channel as 8: Pillow's own conversion would cut off at 255 instead of scaling 65535 to 255."""
    values = np.asarray(image).astype(np.int64)
    return Image.fromarray(((values + 128) // 257).clip(0, 255).astype(np.uint8))


def _flat(image: Image.Image) -> Image.Image:
    """Any other picture in grey or RGB, on white where it was transparent."""
    mode = image.mode
    if mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        background = Image.new("RGBA", image.size, "white")
        background.alpha_composite(image)
        flat = background.convert("RGB")
        return flat.convert("L") if mode in ("L", "LA", "La", "1") else flat
    return image.convert("L" if mode == "1" else "RGB")


def _orientation(image: Image.Image) -> int:
    if "exif" in image.info and image.format != "TIFF":  # Pillow turns TIFF by itself
        with suppress(Exception):  # the header is damaged, which pixels need not be
            if isinstance(value := image.getexif().get(_ORIENTATION), int):
                return value
    return 1


@cache
def _formats() -> list[str]:
    Image.init()
    for module, register, _ in _PACKAGES.values():
        if find_spec(module) is not None:
            plugin = import_module(module)
            if register is not None:
                getattr(plugin, register)()
    return [name for name in _FORMATS if name in Image.OPEN]


@cache
def suffixes() -> frozenset[str]:
    """How the names of picture files that can be read end, in lower case."""
    readable = {*_formats(), "MPO"}  # what Pillow calls a JPEG file of several pictures
    return frozenset(end for end, form in Image.registered_extensions().items() if form in readable)


def needs_package(ends: Iterable[str]) -> list[str]:
    """The packages with which Pillow would read files that end so."""
    return [name for name, (*_, endings) in _PACKAGES.items() if not suffixes().issuperset(set(ends) & set(endings))]


def left_out(ends: Counter[str]) -> list[str]:
    """A sentence on files that are no pictures, or cannot be read, by the ends of their names; none without files."""
    if not ends:
        return []
    kinds = [f"{number:,} {printable(end) or 'without an ending'}" for end, number in ends.most_common()]
    if len(kinds) > _MOST_KINDS:
        kinds[_MOST_KINDS:] = [f"{len(kinds) - _MOST_KINDS:,} other kinds"]
    needed = needs_package(ends)
    return [f"left out: {', '.join(kinds)}" + (f" (read after pip install {' '.join(needed)})" if needed else "")]


@contextmanager
def _reasons(name: str) -> Iterator[None]:
    """Turn whatever Pillow says into BadImage; its warnings about odd but readable files are left out."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except BadImage:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadImage(name, f"has more than {_MAX_PIXELS // 10**6} million pixels") from None
    except UnidentifiedImageError:
        raise BadImage(name, "is no picture in a known format") from None
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:
        raise BadImage(name, f"cannot be decoded ({printable(str(error)) or type(error).__name__})") from None


Pixels = NDArray[np.uint8]
CropBox = tuple[float, float, float, float]  # left, upper, right and lower end of a part of a picture
Crop = Callable[[int, int], CropBox]  # the box to crop from a picture of this width and height

_PLAIN = re.compile(rb"P([56])\n(\d{1,5}) (\d{1,5})\n255\n")
_LARGEST_SCRATCH = 2**24
_AREA_FROM = 2  # from this reduction on pixels are averaged, as interpolation of two by two would skip some


def least_size(image_size: int, width: int, height: int, box: CropBox) -> tuple[int, int]:
    """Width and height of a picture from which on the short side of a box of it has image_size pixels."""
    factor = image_size / min(box[2] - box[0], box[3] - box[1])
    return math.ceil(width * factor), math.ceil(height * factor)


def scaled_box(box: CropBox, across: float, down: float) -> CropBox:
    """The box in a picture so many times as wide and high."""
    return box[0] * across, box[1] * down, box[2] * across, box[3] * down


def turbo_lacks() -> list[str]:
    """The libraries of the decoder `turbo` that are not installed."""
    return [name for name, module in (("simplejpeg", "simplejpeg"), ("OpenCV", "cv2")) if find_spec(module) is None]


class Turbo:
    """Crops of pictures, resized to a square of `image_size`, in 1 (grey) or 3 channels (RGB)."""

    def __init__(self, image_size: int, channels: int, interpolation: str) -> None:
        """Raises ConvoyError when simplejpeg or OpenCV is not installed."""
        if lacking := turbo_lacks():
            raise ConvoyError(
                f"data.decoder=turbo needs {' and '.join(lacking)}, which {'are' if lacking[1:] else 'is'} not "
                f"installed: {pip_install('fast')}, or set data.decoder=pillow, whose pixels differ a little"
            )
        import cv2

        methods = {"nearest": "NEAREST", "bilinear": "LINEAR", "bicubic": "CUBIC", "lanczos": "LANCZOS4"}
        self._size, self._grey = image_size, channels == 1
        self._method = getattr(cv2, f"INTER_{methods[interpolation]}")
        self._buffers = _Buffers((image_size, image_size) if self._grey else (image_size, image_size, 3))

    def write(self, data: bytes, name: str, crop: Crop, mirror: bool, planes: Pixels) -> None:
        """Decode a picture file, resize a part of it, and write that to uint8 [channels, image_size, image_size].
        Raises BadImage."""
        self.write_part(*self._decoded(data, name, crop), mirror, planes)

    def write_part(self, pixels: Pixels, box: CropBox, mirror: bool, planes: Pixels) -> None:
        """The same from pixels: uint8 [height, width, 3] or [height, width]."""
        import cv2

        size, buffers = self._size, self._buffers
        left, top = round(box[0]), round(box[1])
        right, bottom = max(round(box[2]), left + 1), max(round(box[3]), top + 1)
        reduction = max(right - left, bottom - top) / size
        method = cv2.INTER_AREA if reduction >= _AREA_FROM and self._method != cv2.INTER_NEAREST else self._method
        cv2.resize(pixels[top:bottom, left:right], (size, size), dst=buffers.square, interpolation=method)
        square = cv2.flip(buffers.square, 1, dst=buffers.mirrored) if mirror else buffers.square
        if self._grey:
            planes[0] = square
        else:
            cv2.split(square, list(planes))

    def _decoded(self, data: bytes, name: str, crop: Crop) -> tuple[Pixels, CropBox]:
        """A picture, perhaps decoded smaller, and the box of its crop."""
        if data[:2] == b"\xff\xd8" and not oriented(data):
            try:
                return self._jpeg_decoded(data, crop)
            except ValueError:
                pass  # Pillow reads what libjpeg-turbo rejects, or says why it cannot
        elif (plain := self._plain(data)) is not None:
            return plain, crop(plain.shape[1], plain.shape[0])
        image = open_picture(data, name)
        width, height = upright_size(image)
        box = crop(width, height)
        image = finish_picture(image, name, least_size(self._size, width, height, box))
        pixels = np.asarray(in_channels(image, 1 if self._grey else 3))
        return pixels, scaled_box(box, pixels.shape[1] / width, pixels.shape[0] / height)

    def _plain(self, data: bytes) -> Pixels | None:
        """Pixels as they lie in a PPM or PGM file, where it is one with the wanted channels."""
        header = _PLAIN.match(data)
        if header is None or (header[1] == b"5") != self._grey:
            return None
        width, height = int(header[2]), int(header[3])
        shape = (height, width) if self._grey else (height, width, 3)
        if 0 < math.prod(shape) == len(data) - header.end() and not too_large(width, height):
            return np.frombuffer(data, np.uint8, offset=header.end()).reshape(shape)
        return None

    def _jpeg_decoded(self, data: bytes, crop: Crop) -> tuple[Pixels, CropBox]:
        import simplejpeg

        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        if too_large(width, height) or space in ("CMYK", "YCCK"):
            raise ValueError
        box = crop(width, height)
        wide, high = least_size(self._size, width, height, box)
        # By 2, 4 or 8: libjpeg-turbo also scales by 7/8 and the like, but slower than it decodes the whole picture.
        factor = next((divisor for divisor in (8, 4, 2) if min(width / wide, height / high) >= divisor), 1)
        num_bytes, buffers = width * height * (1 if self._grey else 3), self._buffers
        if len(buffers.scratch) < num_bytes <= _LARGEST_SCRATCH:
            buffers.scratch = np.empty(num_bytes, np.uint8)
        pixels = simplejpeg.decode_jpeg(
            data,
            "GRAY" if self._grey else "RGB",
            min_width=-(-width // factor),
            min_height=-(-height // factor),
            buffer=buffers.scratch if num_bytes <= len(buffers.scratch) else None,
        )
        pixels = pixels[:, :, 0] if self._grey else pixels
        return pixels, scaled_box(box, pixels.shape[1] / width, pixels.shape[0] / height)


class _Buffers(threading.local):
    """Memory that is kept by every thread: fresh pages would be fetched for every picture."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.square, self.mirrored = np.empty(shape, np.uint8), np.empty(shape, np.uint8)
        self.scratch = np.empty(0, np.uint8)

    def __reduce__(self) -> Any:
        return _Buffers, (self.square.shape,)
