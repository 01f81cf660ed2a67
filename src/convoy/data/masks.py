"""Masks of pictures: grey or palette pictures of the same size, whose values are classes; they are cut and mirrored
with their pictures, and resized by the nearest pixel.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from convoy.data.decode import BadImage, open_picture, upright_size
from convoy.data.sources import EncodedSource, Progress, Source
from convoy.data.transforms import Geometry
from convoy.errors import ConvoyError

UNLABELLED = 255  # of pixels that count nowhere, as those that a crop adds


def read_mask(source: EncodedSource, sample: int, ignored: int = UNLABELLED) -> NDArray[np.uint8]:
    """The classes of the pixels [height, width]. Raises BadImage."""
    name = source.name(sample)
    image = open_picture(source.read(sample), name)
    if image.mode not in ("1", "L", "P", "I", "I;16"):
        raise BadImage(name, f"is a mask in {image.mode}, not of one value a pixel: save it as grey or with a palette")
    try:
        values = np.asarray(image)
    except (OSError, ValueError, SyntaxError) as error:
        raise BadImage(name, f"is a mask that cannot be read ({error})") from None
    for value in (int(values.max(initial=0)), int(values.min(initial=0))):
        if not 0 <= value <= UNLABELLED:
            raise BadImage(name, f"is a mask with the value {value}: classes are numbered from 0 to 254")
    values = values.astype(np.uint8)
    return values if ignored == UNLABELLED else np.where(values == ignored, np.uint8(UNLABELLED), values)


def cut_mask(
    mask: NDArray[np.uint8], name: str, geometry: Geometry, draws: NDArray[np.float64] | None, mirror: bool
) -> NDArray[np.uint8]:
    """The part of a mask that belongs to what `geometry.crop` takes of its picture. Raises BadImage."""
    nearest = replace(geometry, augment=geometry.augment.model_copy(update={"interpolation": "nearest"}))
    # what a crop adds is 0: of the inverted mask that is UNLABELLED
    piece = np.asarray(nearest.crop(Image.fromarray(UNLABELLED - mask), name, draws))
    return UNLABELLED - (piece[:, ::-1] if mirror else piece)


def check_masks(source: Source, classes: Sequence[str] | None, ignored: int, progress: Progress | None) -> set[int]:
    """The classes in the masks of a source; a ConvoyError names the first that has another size than its picture, or
    values beyond the `classes`."""
    masks, found = source.masks, set[int]()
    assert masks is not None
    for sample in range(len(source)):
        try:
            mask, size = read_mask(masks, sample, ignored), upright_size(source.open(sample))
        except BadImage as bad:
            raise ConvoyError(f"{bad}: mend it, or take its row out") from None
        if mask.shape != (size[1], size[0]):
            raise ConvoyError(
                f"{masks.name(sample)} has {mask.shape[1]}×{mask.shape[0]} pixels, but its picture "
                f"{source.name(sample)} has {size[0]}×{size[1]}: a mask has the size of its picture"
            )
        values = set(np.flatnonzero(np.bincount(mask.ravel(), minlength=UNLABELLED)[:UNLABELLED]).tolist())
        if classes is not None and (largest := max(values, default=0)) >= len(classes):
            raise ConvoyError(
                f"{masks.name(sample)} has the value {largest}, but the classes are 0 to {len(classes) - 1}: name "
                "more in data.classes, or say which value counts nowhere (data.ignore_index)"
            )
        found |= values
        if progress and (sample % 500 == 0 or sample == len(source) - 1):
            progress("looking at the masks", sample + 1, len(source))
    return found
