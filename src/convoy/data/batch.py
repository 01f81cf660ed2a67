"""A batch of pictures, and how one is made from the numbers of its samples."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from convoy.data.decode import BadImage
from convoy.data.order import Purpose, uniforms
from convoy.data.sources import PixelSource, Source, refusal
from convoy.data.transforms import ColorAugment, Geometry
from convoy.errors import ConvoyError


@dataclass
class Batch:
    """Pictures and labels of one update, or of a piece of an evaluation.

    Attributes:
        images: uint8 [samples, channels, height, width].
        labels: int64 [samples].
        samples: int64 [samples], their numbers in the source.
        epoch: 0-based; 0 in an evaluation.
        bad: pictures that could not be read, as number and reason. In training the next good sample took their
            place; in an evaluation they are missing.
    """

    images: Tensor
    labels: Tensor
    samples: Tensor
    epoch: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.labels)

    def pin_memory(self) -> "Batch":
        """The same batch in memory from which copies to an accelerator need not wait."""
        return replace(self, images=self.images.pin_memory(), labels=self.labels.pin_memory())


class BatchMaker:
    """Makes the batches of one source; a sample's picture depends on nothing but (seed, epoch, sample)."""

    def __init__(self, source: Source, geometry: Geometry, channels: int, *, seed: int, skip_bad: bool) -> None:
        """Raises ConvoyError when an augmentation lacks its library."""
        self.source = source
        self.geometry = geometry
        self.channels = channels
        self.seed = seed
        self.skip_bad = skip_bad
        self.color = ColorAugment(geometry.augment, seed)
        crop = geometry.augment.crop
        self._central = geometry.resize == geometry.image_size and self._in_memory(geometry.image_size)
        pads = crop == "pad" and self._in_memory(geometry.resize)
        self.vectorised = not self.color.on and (pads or (crop == "none" and self._central))
        """Whether training batches need no work picture by picture: pixels in memory, and crop and flip at most."""

    def training(self, samples: NDArray[np.int64], epoch: int) -> Batch:
        """The augmented batch of some samples [n] in an epoch.

        A picture that cannot be read gives its place to the next sample in the source that can.

        Raises:
            ConvoyError: a picture cannot be read and bad ones are not skipped, or none can be read.
        """
        used, places = samples.copy(), np.arange(len(samples))
        images = self._empty(0 if self.vectorised else len(samples))
        bad: list[tuple[int, str]] = []
        for _ in range(len(self.source)):
            if self.vectorised:
                failures = self._known_bad(places, used[places])
            else:
                failures = self._fill(images, places, used[places], epoch)
            if not failures:
                images = self._augmented(used, epoch) if self.vectorised else images
                return self._batch(images, used, epoch, bad)
            bad.extend((int(used[place]), self._accept(reason)) for place, reason in failures)
            places = np.array([place for place, _ in failures])
            used[places] = (used[places] + 1) % len(self.source)
        raise ConvoyError(f"none of the {len(self.source)} training pictures can be read: {bad[0][1]}")

    def evaluation(self, samples: NDArray[np.int64]) -> Batch:
        """The batch of some samples [n], resized and cut in the center, without those that cannot be read.

        Raises:
            ConvoyError: a picture cannot be read and bad ones are not skipped.
        """
        bad: list[tuple[int, str]] = []
        if self._central and not getattr(self.source, "bad", None):
            return self._batch(self._pixels[samples].transpose(0, 3, 1, 2), samples, 0, bad)
        images = self._empty(len(samples))
        good: list[int] = []
        for sample in samples.tolist():
            try:
                image, name = self.source.open(sample), self.source.name(sample)
                images[len(good)] = evaluation_pixels(image, name, self.geometry, self.channels)
                good.append(sample)
            except BadImage as reason:
                bad.append((sample, self._accept(reason)))
        return self._batch(images[: len(good)], np.array(good, np.int64), 0, bad)

    @property
    def _pixels(self) -> NDArray[np.uint8]:
        assert isinstance(self.source, PixelSource)
        return self.source.pixels

    def _in_memory(self, side: int) -> bool:
        return isinstance(self.source, PixelSource) and self._pixels.shape[1:] == (side, side, self.channels)

    def _flips(self, samples: NDArray[np.int64], epoch: int) -> NDArray[np.bool_]:
        if not self.geometry.augment.flip:
            return np.zeros(len(samples), np.bool_)
        return uniforms(self.seed, Purpose.FLIP, epoch, samples, 1)[:, 0] < 0.5

    def _known_bad(self, places: NDArray[np.int64], samples: NDArray[np.int64]) -> list[tuple[int, BadImage]]:
        """The places whose pixels in memory are those of pictures that could not be read."""
        bad = self.source.bad if isinstance(self.source, PixelSource) else {}
        pairs = zip(places.tolist(), samples.tolist(), strict=True) if bad else ()
        return [(place, BadImage(self.source.name(one), bad[one])) for place, one in pairs if one in bad]

    def _augmented(self, samples: NDArray[np.int64], epoch: int) -> NDArray[np.uint8]:
        """The training pictures of some samples at once, from pixels in memory."""
        pixels = self._pixels[samples]
        planes = pixels.transpose(0, 3, 1, 2)
        if self.geometry.augment.crop == "pad":
            size, pad = self.geometry.image_size, self.geometry.pad
            num, height, width, channels = pixels.shape
            padded = np.zeros((num, height + 2 * pad, width + 2 * pad, channels), np.uint8)
            padded[:, pad : pad + height, pad : pad + width] = pixels
            corners = self.geometry.pad_offsets(width, height, self.geometry.draws(self.seed, epoch, samples))
            windows = sliding_window_view(padded, (size, size), axis=(1, 2))
            planes = windows[np.arange(num), corners[:, 1], corners[:, 0]]
        images = np.ascontiguousarray(planes)
        if self.geometry.augment.flip:
            mirrored = self._flips(samples, epoch)
            images[mirrored] = images[mirrored][..., ::-1]
        return images

    def _fill(
        self, images: NDArray[np.uint8], places: NDArray[np.int64], samples: NDArray[np.int64], epoch: int
    ) -> list[tuple[int, BadImage]]:
        """Writes the pictures of `samples` to `places` of `images`; returns the places that could not be filled."""
        draws, flips = self.geometry.draws(self.seed, epoch, samples), self._flips(samples, epoch)
        failures = []
        for place, sample, drawn, flip in zip(places.tolist(), samples.tolist(), draws, flips, strict=True):
            try:
                image = self.geometry.crop(self.source.open(sample), self.source.name(sample), drawn)
            except BadImage as reason:
                failures.append((place, reason))
                continue
            image = in_channels(image, self.channels)
            if flip:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            images[place] = _planes(self.color(image, epoch, sample), self.channels)
        return failures

    def _accept(self, bad: BadImage) -> str:
        if not self.skip_bad:
            raise refusal(bad)
        return bad.reason

    def _empty(self, num: int) -> NDArray[np.uint8]:
        return np.empty((num, self.channels, self.geometry.image_size, self.geometry.image_size), np.uint8)

    def _batch(
        self, images: NDArray[np.uint8], samples: NDArray[np.int64], epoch: int, bad: list[tuple[int, str]]
    ) -> Batch:
        return Batch(
            images=torch.from_numpy(np.ascontiguousarray(images)),
            labels=torch.from_numpy(self.source.labels[samples]),
            samples=torch.from_numpy(samples),
            epoch=epoch,
            bad=bad,
        )


def evaluation_pixels(image: Image.Image, name: str, geometry: Geometry, channels: int) -> NDArray[np.uint8]:
    """A picture as an evaluation shows it to the network: uint8 [channels, image_size, image_size]. Raises BadImage."""
    return _planes(geometry.center(image, name), channels)


def in_channels(image: Image.Image, channels: int) -> Image.Image:
    """A picture of mode L or RGB in grey (1) or RGB (3), by Pillow's rule."""
    mode = "L" if channels == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode)


def _planes(image: Image.Image, channels: int) -> NDArray[np.uint8]:
    pixels = np.asarray(in_channels(image, channels))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)
