"""Where a picture is cut and how it is resized: in training at random, in evaluation always the centre."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from convoy.data.config import AugmentConfig
from convoy.data.decode import finish_picture, upright_size
from convoy.data.randomness import Purpose, uniforms

DEFAULT_PAD = 4
DEFAULT_SCALE = (0.08, 1.0)
DEFAULT_RATIO = (3 / 4, 4 / 3)
_ATTEMPTS = 10

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Geometry:
    """How pictures get the size of the net's input.

    Attributes:
        image_size: side of the result.
        resize: short side before the centre, or crop=pad's piece, is taken.
        augment: what training does.
    """

    image_size: int
    resize: int
    augment: AugmentConfig

    @property
    def _resample(self) -> Image.Resampling:
        return Image.Resampling[(self.augment.interpolation or "bilinear").upper()]

    @property
    def pad(self) -> int:
        """Pixels added on each side before crop=pad."""
        return DEFAULT_PAD if self.augment.pad is None else self.augment.pad

    def centre(self, image: Image.Image, name: str) -> Image.Image:
        """The centre of the picture after its short side was resized. Raises BadImage."""
        image = finish_picture(image, name)
        width, height = image.size
        side = min(width, height) * self.image_size / self.resize
        left, top = (width - side) / 2, (height - side) / 2
        return self._cut(image, (left, top, left + side, top + side))

    def draws(self, seed: int, epoch: int, samples: NDArray[np.int64]) -> NDArray[np.float64]:
        """The random numbers in [0, 1) that `crop` needs for each sample: [n, some]."""
        num = {"none": 0, "pad": 2, "random-resized": 2 * _ATTEMPTS + 2}[self.augment.crop]
        return uniforms(seed, Purpose.CROP, epoch, samples, num)

    def crop(self, image: Image.Image, name: str, draws: NDArray[np.float64]) -> Image.Image:
        """Training's piece of the picture, as `augment.crop` says. Raises BadImage."""
        if self.augment.crop == "none":
            return self.centre(image, name)
        if self.augment.crop == "pad":
            return self._padded_crop(finish_picture(image, name), draws)
        width, height = upright_size(image)
        box = self._random_box(width, height, draws)
        # As small as may be decoded, so that the box still has image_size pixels on its short side.
        factor = self.image_size / min(box[2] - box[0], box[3] - box[1])
        image = finish_picture(image, name, (math.ceil(width * factor), math.ceil(height * factor)))
        across, down = image.width / width, image.height / height
        return self._cut(image, (box[0] * across, box[1] * down, box[2] * across, box[3] * down))

    def pad_offsets(self, width: int, height: int, draws: NDArray[np.float64]) -> NDArray[np.int64]:
        """Left and top corner [n, 2] of crop=pad's pieces in padded pictures of this size, from draws [n, 2]."""
        room = np.array([width, height]) + 2 * self.pad - self.image_size + 1
        corners: NDArray[np.int64] = np.floor(draws * room).astype(np.int64)
        return corners

    def _padded_crop(self, image: Image.Image, draws: NDArray[np.float64]) -> Image.Image:
        width, height = image.size
        if min(width, height) != self.resize:
            factor = self.resize / min(width, height)
            image = image.resize(
                (max(round(width * factor), self.resize), max(round(height * factor), self.resize)), self._resample
            )
        left, top = (self.pad_offsets(*image.size, draws[None])[0] - self.pad).tolist()
        return image.crop((left, top, left + self.image_size, top + self.image_size))

    def _random_box(self, width: int, height: int, draws: NDArray[np.float64]) -> Box:
        """A random part of the area with a random shape, as in torchvision: ten tries, then the middle."""
        low, high = self.augment.scale or DEFAULT_SCALE
        narrow, wide = self.augment.ratio or DEFAULT_RATIO
        u = draws.tolist()
        for attempt in range(_ATTEMPTS):
            area = width * height * (low + (high - low) * u[2 * attempt])
            shape = math.exp(math.log(narrow) + (math.log(wide) - math.log(narrow)) * u[2 * attempt + 1])
            w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
            if 0 < w <= width and 0 < h <= height:
                left, top = math.floor(u[-2] * (width - w + 1)), math.floor(u[-1] * (height - h + 1))
                return left, top, left + w, top + h
        shape = min(max(width / height, narrow), wide)
        w, h = min(width, max(1, round(height * shape))), min(height, max(1, round(width / shape)))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h

    def _cut(self, image: Image.Image, box: Box) -> Image.Image:
        return image.resize((self.image_size, self.image_size), self._resample, box=box)
