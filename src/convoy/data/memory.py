"""Decodes a set of small pictures of one size once, so that a batch is one index into an array."""

import numpy as np

from convoy.data.decode import BadImage
from convoy.data.sources import EncodedSource, PixelSource, Progress
from convoy.errors import ConvoyError

_MAX_SIDE = 64
_MAX_BYTES = 2**30
_NUM_PROBES = 16
_PROGRESS_EVERY = 2000


def common_format(*sources: EncodedSource) -> tuple[int, int, int] | None:
    """Height, width and channels of the pictures if they are small, of one size and few enough to keep in memory.

    Looks at some pictures of each source; None where they differ, or are larger than 64 pixels, or than 1 GiB in all.
    """
    sizes, modes, readable = set(), set(), 0
    for source in sources:
        for sample in np.linspace(0, len(source) - 1, min(_NUM_PROBES, len(source))).astype(int).tolist():
            try:
                width, height = source.open(sample).size
                if max(width, height) > _MAX_SIDE:
                    return None
                modes.add(source.load(sample).mode)
            except BadImage:
                continue
            sizes.add((height, width))
            readable += 1
    if len(sizes) != 1:
        return None
    (height, width), channels = sizes.pop(), 1 if modes == {"L"} else 3
    total = sum(len(source) for source in sources) * height * width * channels
    return (height, width, channels) if total <= _MAX_BYTES else None


def decode_all(
    source: EncodedSource, form: tuple[int, int, int], what: str, skip_bad: bool, progress: Progress | None
) -> PixelSource | None:
    """All pictures of a source as pixels, or None if one turns out to have another size.

    Args:
        source: where the pictures are.
        form: their height, width and channels.
        what: the name of the split, for the progress.
        skip_bad: keep pictures that cannot be read as bad ones instead of refusing them.
        progress: is told how far it is.

    Raises:
        ConvoyError: a picture cannot be read, and `skip_bad` is not set.
    """
    height, width, channels = form
    mode = "L" if channels == 1 else "RGB"
    pixels = np.zeros((len(source), height, width, channels), np.uint8)
    bad = {}
    for sample in range(len(source)):
        try:
            image = source.load(sample)
        except BadImage as reason:
            if not skip_bad:
                raise refusal(reason) from None
            bad[sample] = reason.reason
            continue
        if image.size != (width, height):
            return None
        pixels[sample] = np.asarray(image if image.mode == mode else image.convert(mode)).reshape(form)
        if progress and (sample % _PROGRESS_EVERY == 0 or sample == len(source) - 1):
            progress(f"decoding the {what} pictures", sample + 1, len(source))
    return PixelSource(pixels, source.labels, source.name, bad)


def refusal(bad: BadImage) -> ConvoyError:
    """What to say of a picture when bad ones are not to be skipped."""
    return ConvoyError(f"{bad}: mend or remove it, or set data.bad_images=skip (--bad-images skip)")
