"""Sources of single pictures: the interface, and its two kinds, pixels in memory and encoded files."""

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from convoy.data.decode import BadImage, finish_picture, in_channels, open_picture
from convoy.data.processes import SharedArray
from convoy.errors import ConvoyError

Progress = Callable[[str, int, int], None]  # called with the name of long work, the number done, and the total


class Source(ABC):
    """Labelled pictures, numbered from 0."""

    labels: NDArray[np.int64]  # int64 [N]
    mend = "mend or remove it"  # what to do about one that is bad
    is_packed = False

    def __len__(self) -> int:
        return len(self.labels)

    def __getstate__(self) -> dict[str, Any]:
        """For a worker process, which needs no copy of the labels."""
        return self.__dict__ | {"labels": range(len(self))}

    @abstractmethod
    def name(self, sample: int) -> str:
        """The sample's name in messages: a file name, or a file and a number in it."""

    def fingerprint(self) -> dict[str, Any]:
        """The marks by which the samples are recognised, as JSON: the number of `samples`, CRC-32 of their `labels` and
        `names` in their order, and either that of the `contents` of all, or the `sizes` of a few files."""
        return {"samples": len(self), "labels": zlib.crc32(self.labels.astype(np.int64).data), **self._marks()}

    def _marks(self) -> dict[str, Any]:
        return {}

    def names(self, samples: NDArray[np.int64]) -> str:
        names, more = ", ".join(self.name(int(sample)) for sample in samples[:3]), len(samples) - 3
        return f"{names} and {more} more" if more > 0 else names

    @abstractmethod
    def open(self, sample: int) -> Image.Image:
        """The picture, perhaps not decoded yet: `decode.finish_picture` makes it L or RGB. Raises BadImage."""

    @abstractmethod
    def subset(self, samples: NDArray[np.int64]) -> "Source":
        """Some of the samples, in this order."""

    def load(self, sample: int) -> Image.Image:
        """The picture, 8 bit, mode L or RGB, upright. Raises BadImage."""
        return finish_picture(self.open(sample), self.name(sample))


class PixelSource(Source):
    """Pictures of one size in memory, uint8 [N, H, W, C] with C of 1 or 3; `name` is that of the sample with a number
    in `numbers`."""

    def __init__(
        self,
        pixels: NDArray[np.uint8],
        labels: NDArray[np.int64],
        name: str | Callable[[int], str],
        numbers: NDArray[np.int64] | None = None,
    ) -> None:
        assert pixels.ndim == 4 and pixels.dtype == np.uint8 and len(pixels) == len(labels)
        self.pixels, self.labels = pixels, labels
        self._name, self._numbers = name, np.arange(len(labels)) if numbers is None else numbers
        self._shared: SharedArray | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._shared is None:
            self._shared = SharedArray.of(self.pixels)
            self.pixels = self._shared.array
        return super().__getstate__() | {"pixels": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state | {"pixels": state["_shared"].array}

    def open(self, sample: int) -> Image.Image:
        pixels = self.pixels[sample]
        return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)

    def name(self, sample: int) -> str:
        number = int(self._numbers[sample])
        return f"{self._name}, picture {number}" if isinstance(self._name, str) else self._name(number)

    def _marks(self) -> dict[str, Any]:
        return {"contents": zlib.crc32(np.ascontiguousarray(self.pixels).data)}

    def with_channels(self, channels: int) -> "PixelSource":
        num, height, width, depth = self.pixels.shape
        if depth == channels:
            return self
        strip = self.pixels.reshape(num * height, width, depth)
        image = in_channels(Image.fromarray(strip[:, :, 0] if depth == 1 else strip), channels)
        pixels = np.asarray(image).reshape(num, height, width, channels)
        return PixelSource(pixels, self.labels, self._name, self._numbers)

    def subset(self, samples: NDArray[np.int64]) -> "PixelSource":
        return PixelSource(self.pixels[samples], self.labels[samples], self._name, self._numbers[samples])


class EncodedSource(Source):
    """Pictures as the bytes of picture files; a subclass says where the bytes are."""

    @abstractmethod
    def read(self, sample: int) -> bytes:
        """The bytes of a picture file. Raises BadImage."""

    def open(self, sample: int) -> Image.Image:
        return open_picture(self.read(sample), self.name(sample))

    def settled(self, progress: Progress | None) -> "EncodedSource":
        """The source to load from: this one, or a faster one with the same pictures."""
        return self

    def subset(self, samples: NDArray[np.int64]) -> "EncodedSource":
        return _Subset(self, samples)


class _Subset(EncodedSource):
    def __init__(self, source: EncodedSource, samples: NDArray[np.int64]) -> None:
        self.source, self.mend, self.is_packed = source, source.mend, source.is_packed
        self._samples = SharedArray.of(samples)
        self.labels = source.labels[samples]

    def read(self, sample: int) -> bytes:
        return self.source.read(int(self._samples.array[sample]))

    def name(self, sample: int) -> str:
        return self.source.name(int(self._samples.array[sample]))


def spread(number: int, most: int) -> list[int]:
    """At most `most` samples, evenly spread."""
    samples: list[int] = np.linspace(0, number - 1, min(most, number)).astype(int).tolist()
    return samples


NUM_SIZES = 64  # files whose sizes a fingerprint contains
_MAX_SIDE = 64
_MAX_BYTES = 2**30
_NUM_PROBES = 16
_PROGRESS_EVERY = 2000


def in_memory(
    sources: dict[str, EncodedSource], skip_bad: bool, progress: Progress | None
) -> tuple[tuple[int, int, int] | None, list[PixelSource]]:
    """Height, width and channels of the pictures of all splits if they are small, of one size and few enough to keep in
    memory; and the decoded splits, none where pictures that cannot be read are to be skipped."""
    form = _common_form(sources.values())
    decoded, is_whole = [], True
    for split, source in sources.items() if form is not None else ():
        assert form is not None
        pixels = np.zeros((len(source), *form), np.uint8)
        for sample in range(len(source)):
            try:
                image = source.load(sample)
            except BadImage as reason:
                if not skip_bad:
                    raise refusal(reason, source) from None
                is_whole = False  # the others still tell whether all have one size, wherever the bad one lies
                continue
            if image.size != (form[1], form[0]):
                return None, []
            pixels[sample] = np.asarray(in_channels(image, form[2])).reshape(form)
            if progress and (sample % _PROGRESS_EVERY == 0 or sample == len(source) - 1):
                progress(f"decoding the {split} pictures", sample + 1, len(source))
        decoded.append(PixelSource(pixels, source.labels, source.name))
    return form, decoded if is_whole else []


def _common_form(sources: Collection[EncodedSource]) -> tuple[int, int, int] | None:
    """Height, width and channels by a few pictures of each source; None where they differ or are too large."""
    sizes, modes = set(), set()
    for source in sources:
        for sample in spread(len(source), _NUM_PROBES):
            with suppress(BadImage):
                width, height = source.open(sample).size
                if max(width, height) > _MAX_SIDE:
                    return None
                modes.add(source.load(sample).mode)
                sizes.add((height, width))
    if len(sizes) != 1:
        return None
    form = *sizes.pop(), 1 if modes == {"L"} else 3
    return form if sum(map(len, sources)) * math.prod(form) <= _MAX_BYTES else None


def refusal(bad: BadImage, source: Source) -> ConvoyError:
    """The error for a picture that cannot be read when bad ones are not to be skipped."""
    skip = "set data.bad_images=skip (--bad-images skip); convoy data PATH --check names all of them"
    return ConvoyError(f"{bad}: {source.mend}, or {skip}")
