"""The decoder `turbo`: libjpeg-turbo (simplejpeg) decodes JPEG, OpenCV resizes, Pillow reads all other files.

Pixels differ a little from those of the decoder `pillow`, so which one is part of a recipe. Both give the same pixels
on every machine, in every process and thread. All decoders by libjpeg-turbo give 913 to 946 of ImageNet's photographs a
second on a core, but simplejpeg alone refuses broken files, takes a buffer, reads a header alone, and scales. OpenCV
takes 65 to 85 µs for a crop to 224 pixels, torch 130 to 225, kornia-rs 230 to 400, Pillow 370 to 480.
"""

import math
import re
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convoy.data.decode import finish_picture, in_channels, open_picture, oriented, too_large, upright_size
from convoy.data.transforms import CropBox, least_size
from convoy.errors import ConvoyError

Pixels = NDArray[np.uint8]
Crop = Callable[[int, int], CropBox]  # the box to crop from a picture of this width and height

_PLAIN = re.compile(rb"P([56])\n(\d{1,5}) (\d{1,5})\n255\n")
_LARGEST_SCRATCH = 2**24
_AREA_FROM = 2  # from this reduction on pixels are averaged, as interpolation of two by two would skip some


def missing() -> list[str]:
    """The libraries of this decoder that are not installed."""
    return [name for name, module in (("simplejpeg", "simplejpeg"), ("OpenCV", "cv2")) if find_spec(module) is None]


class Turbo:
    """Crops of pictures, resized to a square of `image_size`, in 1 (grey) or 3 channels (RGB)."""

    def __init__(self, image_size: int, channels: int, interpolation: str) -> None:
        """Raises ConvoyError when simplejpeg or OpenCV is not installed."""
        if lacking := missing():
            raise ConvoyError(
                f"data.decoder=turbo needs {' and '.join(lacking)}, which {'are' if lacking[1:] else 'is'} not "
                "installed: pip install 'convoy-nn[fast]', or set data.decoder=pillow, whose pixels differ a little"
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
        return pixels, _scaled(box, pixels.shape[1] / width, pixels.shape[0] / height)

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
        return pixels, _scaled(box, pixels.shape[1] / width, pixels.shape[0] / height)


class _Buffers(threading.local):
    """Memory that is kept by every thread: fresh pages would be fetched for every picture."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.square, self.mirrored = np.empty(shape, np.uint8), np.empty(shape, np.uint8)
        self.scratch = np.empty(0, np.uint8)

    def __reduce__(self) -> Any:
        return _Buffers, (self.square.shape,)


def _scaled(box: CropBox, across: float, down: float) -> CropBox:
    return box[0] * across, box[1] * down, box[2] * across, box[3] * down
