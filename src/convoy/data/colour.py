"""Random changes of colour: jitter of brightness, contrast and saturation, PCA noise, RandAugment."""

from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from convoy.data.config import AugmentConfig
from convoy.data.randomness import Purpose, keys, normals, uniforms
from convoy.errors import ConvoyError

# Eigenvalues and eigenvectors (in columns) of the covariance of ImageNet's RGB values, scaled from 0 to 1.
_PCA_VALUES = np.array([0.2175, 0.0188, 0.0045])
_PCA_VECTORS = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])


class ColourAugment:
    """The changes of colour that a recipe asks for, each a function of (seed, epoch, sample)."""

    def __init__(self, config: AugmentConfig, seed: int) -> None:
        """Raises ConvoyError when RandAugment is asked for and kornia is not installed."""
        self._config = config
        self._seed = seed
        if config.rand_augment and find_spec("kornia") is None:
            raise ConvoyError(
                f"augment.rand_augment={config.rand_augment} needs kornia, which is not installed: "
                "pip install 'convoy-nn[augment]'"
            )

    @property
    def on(self) -> bool:
        """Whether anything is changed at all."""
        return bool(self._config.rand_augment or self._config.color_jitter or self._config.pca_noise)

    def __call__(self, image: Image.Image, epoch: int, sample: int) -> Image.Image:
        """The picture (L or RGB) with its colours changed."""
        numbers = np.array([sample], np.int64)
        if self._config.rand_augment_numbers:
            key = int(keys(self._seed, Purpose.RAND_AUGMENT, epoch, numbers)[0])
            image = rand_augment(image, self._config.rand_augment_numbers, key)
        if self._config.color_jitter:
            draws = uniforms(self._seed, Purpose.JITTER, epoch, numbers, 6)[0]
            image = jitter(image, self._config.color_jitter, draws)
        if self._config.pca_noise:
            draws = uniforms(self._seed, Purpose.PCA, epoch, numbers, 3)[0]
            image = pca_noise(image, self._config.pca_noise, draws)
        return image


def jitter(image: Image.Image, strength: float, draws: NDArray[np.float64]) -> Image.Image:
    """Brightness, contrast and saturation times a factor from 1 - strength to 1 + strength, in random order.

    Args:
        image: L or RGB; grey has no saturation to change.
        strength: 0 to 1.
        draws: six numbers in [0, 1): the factors, then the order.
    """
    enhancers: list[Any] = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]
    for which in np.argsort(draws[3:], kind="stable").tolist():
        if image.mode == "RGB" or which != 2:
            image = enhancers[which](image).enhance(1 + strength * (2 * float(draws[which]) - 1))
    return image


def pca_noise(image: Image.Image, deviation: float, draws: NDArray[np.float64]) -> Image.Image:
    """Adds one colour to the whole RGB picture, along the main directions of ImageNet's colours.

    Krizhevsky, Sutskever, Hinton, 2012: the eigenvectors times their eigenvalues times normal numbers with the given
    standard deviation (0.1 there). `draws` are three numbers in [0, 1).
    """
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
