"""Transforms of pictures: crop and resizing, random changes of color, normalization, mixup and CutMix."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from convoy.data.config import AugmentConfig, MixConfig, ProgressiveConfig
from convoy.data.decode import CropBox, finish_picture, least_size, scaled_box, upright_size
from convoy.data.order import Purpose, keys, normals, uniforms
from convoy.errors import ConvoyError, reason
from convoy.own import absolute, function_of
from convoy.terminal import pip_install

DEFAULT_PAD = 4
DEFAULT_SCALE = (0.08, 1.0)
DEFAULT_RATIO = (3 / 4, 4 / 3)
_ATTEMPTS = 10
BOX_DRAWS = 2 * _ATTEMPTS + 2  # random numbers for a box


@dataclass(frozen=True)
class Geometry:
    """How pictures get the size of the network's input."""

    image_size: int  # side of the result
    resize: int  # short side before the center, or crop=pad's piece, is taken
    augment: AugmentConfig  # for training
    evaluation_size: int | None = None  # side of the result in an evaluation, where that is another
    progressive: ProgressiveConfig | None = None

    def at(self, epoch: int | None) -> "Geometry":
        """That of an epoch, or, without one, of an evaluation."""
        side = self.image_size
        if epoch is None:
            side = self.evaluation_size or side
        elif self.progressive is not None:
            side = self.progressive.size(epoch, side)
        return Geometry(side, self.resize, self.augment)

    @property
    def _resample(self) -> Image.Resampling:
        return Image.Resampling[(self.augment.interpolation or "bilinear").upper()]

    @property
    def margin(self) -> int:
        """Pixels by which a square picture of the size `resize` is larger than its center."""
        return self.resize - self.image_size

    @property
    def pad(self) -> int:
        return DEFAULT_PAD if self.augment.pad is None else self.augment.pad

    @property
    def pad_mode(self) -> Literal["constant", "reflect"]:
        """Of crop=pad, as numpy calls it."""
        return "reflect" if self.augment.padding == "reflect" else "constant"

    def center_box(self, width: int, height: int) -> CropBox:
        side = min(width, height) * self.image_size / self.resize
        left, top = (width - side) / 2, (height - side) / 2
        return left, top, left + side, top + side

    def box(self, draws: NDArray[np.float64] | None, width: int, height: int) -> CropBox:
        """The part of a picture of this size that becomes the result, but for crop=pad; the center without draws."""
        if draws is None or self.augment.crop == "none":
            return self.center_box(width, height)
        return random_box(
            width, height, draws, self.augment.scale or DEFAULT_SCALE, self.augment.ratio or DEFAULT_RATIO
        )

    def draws(self, seed: int, epoch: int, samples: NDArray[np.int64]) -> NDArray[np.float64]:
        """The random numbers in [0, 1) that `crop` needs: [n, 0, 2 or 22]."""
        num = {"none": 0, "pad": 2, "random-resized": BOX_DRAWS}[self.augment.crop]
        return uniforms(seed, Purpose.CROP, epoch, samples, num)

    def crop(self, image: Image.Image, name: str, draws: NDArray[np.float64] | None) -> Image.Image:
        """Training's piece of the picture, as `augment.crop` says; the center without draws. Raises BadImage."""
        if draws is not None and self.augment.crop == "pad":
            return self._padded_crop(finish_picture(image, name), draws)
        width, height = upright_size(image)
        box = self.box(draws, width, height)
        is_random = draws is not None and self.augment.crop == "random-resized"
        image = finish_picture(image, name, least_size(self.image_size, width, height, box) if is_random else None)
        box = scaled_box(box, image.width / width, image.height / height)
        return image.resize((self.image_size, self.image_size), self._resample, box=box)

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
        if self.pad_mode != "constant":
            pixels, sides = np.asarray(image), ((self.pad, self.pad), (self.pad, self.pad), (0, 0))
            image = Image.fromarray(np.pad(pixels, sides[: pixels.ndim], self.pad_mode))
            left, top = left + self.pad, top + self.pad
        return image.crop((left, top, left + self.image_size, top + self.image_size))


def random_box(
    width: int, height: int, draws: NDArray[np.float64], scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """A random part of the area with a random shape, as in torchvision: ten tries, then the middle."""
    (low, high), (narrow, wide), u = scale, ratio, draws.tolist()
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


# Eigenvalues and eigenvectors (in columns) of the covariance of ImageNet's RGB values, scaled from 0 to 1.
_PCA_VALUES = np.array([0.2175, 0.0188, 0.0045])
_PCA_VECTORS = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])


class ColorAugment:
    """The changes of color that a recipe asks for, each a function of (seed, epoch, sample)."""

    def __init__(self, config: AugmentConfig, seed: int) -> None:
        self._config, self._seed = config, seed
        if config.rand_augment and find_spec("kornia") is None:
            raise ConvoyError(
                f"augment.rand_augment={config.rand_augment} needs kornia, which is not installed: "
                f"{pip_install('augment')}"
            )

    @property
    def on(self) -> bool:
        config = self._config
        return bool(config.rand_augment or config.trivial_augment or config.color_jitter or config.pca_noise)

    def __call__(self, image: Image.Image, epoch: int, sample: int) -> Image.Image:
        numbers = np.array([sample], np.int64)
        if self._config.rand_augment_numbers:
            key = int(keys(self._seed, Purpose.RAND_AUGMENT, epoch, numbers)[0])
            image = rand_augment(image, self._config.rand_augment_numbers, key)
        if self._config.trivial_augment:
            image = trivial_augment(image, uniforms(self._seed, Purpose.TRIVIAL_AUGMENT, epoch, numbers, 3)[0])
        if self._config.color_jitter:
            draws = uniforms(self._seed, Purpose.JITTER, epoch, numbers, 6)[0]
            image = jitter(image, self._config.color_jitter, draws)
        if self._config.pca_noise:
            draws = uniforms(self._seed, Purpose.PCA, epoch, numbers, 3)[0]
            image = pca_noise(image, self._config.pca_noise, draws)
        return image


def jitter(image: Image.Image, strength: float, draws: NDArray[np.float64]) -> Image.Image:
    """Multiply brightness, contrast and saturation by 1 ± strength; `draws` are the factors, then the order."""
    enhancers: list[Any] = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]
    for which in np.argsort(draws[3:], kind="stable").tolist():
        if image.mode == "RGB" or which != 2:
            image = enhancers[which](image).enhance(1 + strength * (2 * float(draws[which]) - 1))
    return image


def pca_noise(image: Image.Image, deviation: float, draws: NDArray[np.float64]) -> Image.Image:
    """Add one color to the whole RGB picture: the eigenvectors of ImageNet's colors times their eigenvalues times
    normal numbers of this deviation (0.1 in Krizhevsky, Sutskever, Hinton, 2012)."""
    shift = _PCA_VECTORS @ (_PCA_VALUES * normals(draws) * deviation) * 255
    table = np.arange(256)[None, :] + shift[:, None]
    return image.point(np.rint(table).clip(0, 255).astype(int).ravel().tolist())


def rand_augment(image: Image.Image, numbers: tuple[int, int], key: int) -> Image.Image:
    """RandAugment (Cubuk et al., 2020), kornia's; the same for the same `key`, whatever else drew random numbers."""
    threads = torch.get_num_threads()
    # A mean over pixels rounds differently on several threads, and worker processes have one.
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            # Not torch.manual_seed, which would seed the accelerator's generators as well.
            torch.default_generator.manual_seed(key)
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float().div_(255)
            pixels = _kornia(*numbers)(pixels)[0].mul_(255).round_().clamp_(0, 255).byte()
            return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    finally:
        torch.set_num_threads(threads)


@cache
def _kornia(num: int, strength: int) -> Any:
    from kornia.augmentation.auto import RandAugment

    return RandAugment(n=num, m=strength)


def trivial_augment(image: Image.Image, draws: NDArray[np.float64]) -> Image.Image:
    """TrivialAugment (Müller and Hutter, 2021, table 1, wide): `draws` choose one of 14 operations, one of 31
    strengths from none to full, and its sign where it has one."""
    strength = math.floor(draws[1] * 31) / 30
    signed = strength if draws[2] < 0.5 else -strength

    def enhanced(kind: Any) -> Any:
        return kind(image).enhance(1 + 0.99 * signed)

    def moved(*matrix: float) -> Any:
        return image.transform(image.size, Image.Transform.AFFINE, matrix)

    operations: list[Callable[[], Any]] = [
        lambda: image,
        lambda: ImageOps.autocontrast(image),
        lambda: ImageOps.equalize(image),
        lambda: ImageOps.posterize(image, 8 - round(6 * strength)),
        lambda: ImageOps.solarize(image, round(256 * (1 - strength))),
        lambda: image.rotate(135 * signed),
        lambda: moved(1, 0.99 * signed, 0, 0, 1, 0),
        lambda: moved(1, 0, 0, 0.99 * signed, 1, 0),
        lambda: moved(1, 0, round(32 * signed), 0, 1, 0),
        lambda: moved(1, 0, 0, 0, 1, round(32 * signed)),
        *(partial(enhanced, getattr(ImageEnhance, kind)) for kind in ("Color", "Contrast", "Brightness", "Sharpness")),
    ]
    result: Image.Image = operations[math.floor(draws[0] * len(operations))]()
    return result


ERASED_AREA, ERASED_RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)


class OwnAugment:
    """`function(picture, rng)` for pictures uint8 [height, width, channels], after crop, flip and colors; it gives one
    of the same shape. `rng` is a `numpy.random.Generator`, a function of (seed, epoch, sample)."""

    def __init__(self, name: str, seed: int) -> None:
        self._name, self._seed = absolute(name), seed

    @cached_property
    def _function(self) -> Callable[..., Any]:
        return function_of(self._name)

    def __getstate__(self) -> dict[str, Any]:
        return {"_name": self._name, "_seed": self._seed}  # a worker imports it by itself

    def __call__(self, planes: NDArray[np.uint8], epoch: int, sample: int) -> None:
        """Change the picture of a sample, [channels, height, width], in place."""
        key = keys(self._seed, Purpose.OWN, epoch, np.array([sample], np.int64))[0]
        picture = np.ascontiguousarray(planes.transpose(1, 2, 0))
        try:
            result = np.asarray(self._function(picture.copy(), np.random.Generator(np.random.Philox(int(key)))))
        except Exception as error:
            raise ConvoyError(
                f"the augmentation {self._name} failed with {reason(error)}: it is called with a picture, "
                f"uint8 {list(picture.shape)}, and a numpy.random.Generator"
            ) from error
        if (result.shape, result.dtype) != (picture.shape, picture.dtype):
            raise ConvoyError(
                f"the augmentation {self._name} gave {result.dtype} {list(result.shape)} for a picture, uint8 "
                f"{list(picture.shape)}: let it give the same shape and type"
            )
        planes[:] = result.transpose(2, 0, 1)


def erase(images: NDArray[np.uint8], samples: NDArray[np.int64], probability: float, seed: int, epoch: int) -> None:
    """Random erasing (Zhong et al., 2020, algorithm 1, with random pixels) of pictures [n, channels, height, width],
    the last change of all; the largest area is that of timm and torchvision."""
    draws = uniforms(seed, Purpose.ERASE, epoch, samples, BOX_DRAWS + 1)
    for place in np.flatnonzero(draws[:, -1] < probability):
        height, width = images.shape[2:]
        left, top, right, bottom = random_box(width, height, draws[place, :-1], ERASED_AREA, ERASED_RATIO)
        piece = images[place, :, top:bottom, left:right]
        noise = uniforms(seed, Purpose.NOISE, epoch, samples[[place]], piece.size)[0]
        piece[:] = (256 * noise).astype(np.uint8).reshape(piece.shape)


def mix(
    images: Tensor, labels: Tensor, *, num_classes: int, config: MixConfig, sizes: list[int], keys: list[int]
) -> tuple[Tensor, Tensor]:
    """Mix each sample with its partner: the one at the same place from the microbatch's end. Returns images and targets
    [samples, classes].

    mixup (Zhang et al., 2018): images and labels are λ of the one and 1 - λ of the other. CutMix (Yun et al., 2019): a
    rectangle of 1 - λ of the area comes from the partner, and λ is corrected where it is cut off at the border. λ has
    the distribution Beta(alpha, alpha). With both on, each microbatch gets one or the other; its key decides.
    """
    assert sum(sizes) == len(images) == len(labels) and len(sizes) == len(keys)
    targets = F.one_hot(labels, num_classes).to(images.dtype)
    if not config.on or not sizes:  # a rank may have no samples in a pass
        return images, targets
    pairs = zip(images.split(sizes), targets.split(sizes), keys, strict=True)
    mixed = [_mix_one(part, part_targets, config, key) for part, part_targets, key in pairs]
    return torch.cat([part for part, _ in mixed]), torch.cat([part_targets for _, part_targets in mixed])


def _mix_one(images: Tensor, targets: Tensor, config: MixConfig, key: int) -> tuple[Tensor, Tensor]:
    random = np.random.Generator(np.random.Philox(key & (2**64 - 1)))
    cut = config.cutmix > 0 and (config.mixup == 0 or random.random() < 0.5)
    alpha = config.cutmix if cut else config.mixup
    part = float(random.beta(alpha, alpha))
    partner = images.flip(0)
    if cut:
        height, width = images.shape[2:]
        half_height, half_width = (int(side * (1 - part) ** 0.5) // 2 for side in (height, width))
        row, column = int(random.integers(height)), int(random.integers(width))
        top, bottom = max(row - half_height, 0), min(row + half_height, height)
        left, right = max(column - half_width, 0), min(column + half_width, width)
        result = images.clone()
        result[:, :, top:bottom, left:right] = partner[:, :, top:bottom, left:right]
        part = 1 - (bottom - top) * (right - left) / (height * width)
    else:
        result = torch.lerp(partner, images, part)
    return result, torch.lerp(targets.flip(0), targets, part)


class Normalize:
    """(images / 255 - mean) / std for each channel, on the device where the images are, in float32."""

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        scale = torch.tensor(std, dtype=torch.float64).mul_(255).reciprocal_()
        shift = torch.tensor(mean, dtype=torch.float64).mul_(-255).mul_(scale)
        self._scale, self._shift = (values.to(device, torch.float32).view(1, -1, 1, 1) for values in (scale, shift))
        self._memory_format = memory_format

    def __call__(self, images: Tensor) -> Tensor:
        """Float32 [samples, channels, height, width] from uint8 of the same shape."""
        # On a contiguous copy: three times as fast on a CPU as broadcasting over channels that lie innermost.
        layout = torch.contiguous_format if images.device.type == "cpu" else self._memory_format
        pixels = images.to(torch.float32, memory_format=layout)
        return torch.addcmul(self._shift, pixels, self._scale).contiguous(memory_format=self._memory_format)
