"""A batch of pictures, and how one is made from the numbers of its samples."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from convoy.data.decode import BadImage, in_channels
from convoy.data.order import Purpose, uniforms
from convoy.data.sources import EncodedSource, PixelSource, Source, refusal
from convoy.data.transforms import ColorAugment, Geometry
from convoy.data.turbo import Crop, Turbo
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


@dataclass
class Filled:
    """What became of the samples of a batch, or of a part of one.

    Attributes:
        samples: int64 [n], whose pictures were written, one after the other.
        bad: as in `Batch`.
    """

    samples: NDArray[np.int64]
    bad: list[tuple[int, str]] = field(default_factory=list)


class BatchMaker:
    """Makes the batches of one source; a sample's picture depends on nothing but (seed, epoch, sample).

    Args:
        source: the pictures.
        geometry: how they get their size.
        channels: 1 = grey, 3 = RGB.
        seed: of the augmentation.
        skip_bad: pictures that cannot be read are left out instead of refused.
        decoder: pillow or turbo.
    """

    def __init__(
        self,
        source: Source,
        geometry: Geometry,
        channels: int,
        *,
        seed: int,
        skip_bad: bool,
        decoder: str = "pillow",
    ) -> None:
        """Raises ConvoyError when an augmentation or the decoder lacks its library."""
        self.source = source
        self.geometry = geometry
        self.channels = channels
        self.seed = seed
        self.skip_bad, self.decoder = skip_bad, decoder
        self.color = ColorAugment(geometry.augment, seed)
        crop = geometry.augment.crop
        self._central = geometry.resize == geometry.image_size and self._in_memory(geometry.image_size)
        pads = crop == "pad" and self._in_memory(geometry.resize)
        self.vectorised = not self.color.on and (pads or (crop == "none" and self._central))
        """Whether training batches need no work picture by picture: pixels in memory, and crop and flip at most."""
        method = geometry.augment.interpolation or "bilinear"
        self._turbo = Turbo(geometry.image_size, channels, method) if decoder == "turbo" else None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of its pictures."""
        return self.channels, self.geometry.image_size, self.geometry.image_size

    def training(self, samples: NDArray[np.int64], epoch: int) -> Batch:
        """The augmented batch of some samples [n] in an epoch. Raises ConvoyError, as `fill`."""
        if not self.vectorised:
            return self._filled(samples, epoch)
        used, bad = self._readable(samples, self._known_bad)
        return self.batch(self._augmented(used, epoch), Filled(used, bad), epoch)

    def evaluation(self, samples: NDArray[np.int64]) -> Batch:
        """The batch of some samples [n], resized and cut in the center. Raises ConvoyError, as `fill`."""
        if self._central and not getattr(self.source, "bad", None):
            return self.batch(self._pixels[samples].transpose(0, 3, 1, 2), Filled(samples), 0)
        return self._filled(samples, None)

    def _filled(self, samples: NDArray[np.int64], epoch: int | None) -> Batch:
        images = np.empty((len(samples), *self.shape), np.uint8)
        return self.batch(images, self.fill(images, samples, epoch), epoch or 0)

    def fill(self, images: NDArray[np.uint8], samples: NDArray[np.int64], epoch: int | None) -> Filled:
        """Write the pictures of some samples [n] to `images` [n, channels, height, width].

        A picture that cannot be read gives its place to the next sample in the source that can; in an evaluation it
        is missing, and those after it move up.

        Args:
            images: where to write.
            samples: which.
            epoch: for which they are augmented; None resizes them and takes the center, as an evaluation does.

        Raises:
            ConvoyError: a picture cannot be read and bad ones are not skipped, or none can be read.
        """
        if epoch is not None:
            return Filled(*self._readable(samples, lambda places, used: self._write(images, places, used, epoch)))
        good: list[int] = []
        bad: list[tuple[int, str]] = []
        for sample in samples.tolist():
            try:
                self._write_center(images[len(good)], sample)
                good.append(sample)
            except BadImage as reason:
                bad.append((sample, self._accept(reason)))
        return Filled(np.array(good, np.int64), bad)

    def _readable(
        self,
        samples: NDArray[np.int64],
        write: Callable[[NDArray[np.int64], NDArray[np.int64]], list[tuple[int, BadImage]]],
    ) -> tuple[NDArray[np.int64], list[tuple[int, str]]]:
        """The samples that were written, and the bad ones among them; `write` says which places could not be."""
        used, places = samples.copy(), np.arange(len(samples))
        bad: list[tuple[int, str]] = []
        for _ in range(len(self.source)):
            failures = write(places, used[places])
            if not failures:
                return used, bad
            bad.extend((int(used[place]), self._accept(reason)) for place, reason in failures)
            places = np.array([place for place, _ in failures])
            used[places] = (used[places] + 1) % len(self.source)
        raise ConvoyError(f"none of the {len(self.source)} training pictures can be read: {bad[0][1]}")

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

    def _write(
        self, images: NDArray[np.uint8], places: NDArray[np.int64], samples: NDArray[np.int64], epoch: int
    ) -> list[tuple[int, BadImage]]:
        """Writes the pictures of `samples` to `places` of `images`; returns the places that could not be filled."""
        draws, flips = self.geometry.draws(self.seed, epoch, samples), self._flips(samples, epoch)
        failures = []
        for place, sample, drawn, flip in zip(places.tolist(), samples.tolist(), draws, flips.tolist(), strict=True):
            try:
                if self._turbo is not None and self.geometry.augment.crop != "pad":
                    crop = partial(self.geometry.training_box, drawn)
                    self._write_part(self._turbo, images[place], sample, crop, flip)
                    if self.color.on:
                        image = Image.fromarray(_pixels_of(images[place]))
                        images[place] = _planes(self.color(image, epoch, sample), self.channels)
                    continue
                image = self.geometry.crop(self.source.open(sample), self.source.name(sample), drawn)
            except BadImage as reason:
                failures.append((place, reason))
                continue
            image = in_channels(image, self.channels)
            if flip:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            images[place] = _planes(self.color(image, epoch, sample), self.channels)
        return failures

    def _write_center(self, planes: NDArray[np.uint8], sample: int) -> None:
        if self._turbo is not None:
            self._write_part(self._turbo, planes, sample, self.geometry.center_box, False)
        else:
            image, name = self.source.open(sample), self.source.name(sample)
            planes[:] = evaluation_pixels(image, name, self.geometry, self.channels)

    def _write_part(self, turbo: Turbo, planes: NDArray[np.uint8], sample: int, crop: Crop, mirror: bool) -> None:
        if isinstance(self.source, EncodedSource):
            turbo.write(self.source.read(sample), self.source.name(sample), crop, mirror, planes)
            return
        pixels = np.asarray(in_channels(self.source.load(sample), self.channels))
        turbo.write_part(pixels, crop(pixels.shape[1], pixels.shape[0]), mirror, planes)

    def _accept(self, bad: BadImage) -> str:
        if not self.skip_bad:
            raise refusal(bad, self.source)
        return bad.reason

    def batch(self, images: NDArray[np.uint8], filled: Filled, epoch: int) -> Batch:
        """The batch of pictures that lie in `images`, which may have room for more."""
        return Batch(
            images=torch.from_numpy(np.ascontiguousarray(images[: len(filled.samples)])),
            labels=torch.from_numpy(self.source.labels[filled.samples]),
            samples=torch.from_numpy(filled.samples),
            epoch=epoch,
            bad=filled.bad,
        )


def evaluation_pixels(image: Image.Image, name: str, geometry: Geometry, channels: int) -> NDArray[np.uint8]:
    """A picture as an evaluation shows it to the network: uint8 [channels, image_size, image_size]. Raises BadImage."""
    return _planes(geometry.center(image, name), channels)


def _planes(image: Image.Image, channels: int) -> NDArray[np.uint8]:
    pixels = np.asarray(in_channels(image, channels))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _pixels_of(planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return planes[0] if len(planes) == 1 else np.ascontiguousarray(planes.transpose(1, 2, 0))
