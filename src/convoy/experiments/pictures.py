"""Pictures of a run directory as data URIs, so that the report needs no other file."""

import base64
import io
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from convoy.errors import ConvoyError

LARGEST = 256
"""Pictures are shown at about 130 pixels; twice that is sharp on every screen."""


@dataclass(frozen=True)
class Picture:
    """An image for the page. `coarse` says that it has few pixels and is to be enlarged without smoothing."""

    uri: str
    width: int
    height: int
    coarse: bool


def read_picture(run: Path, name: str | None) -> Picture | None:
    """The picture `name` of the run directory `run`, or None if there is no such file in it.

    Raises ConvoyError if the file is no readable picture, or its name leads out of the run directory.
    """
    if not name:
        return None
    path = run / name
    try:
        if not path.resolve().is_relative_to(run.resolve()):
            raise ConvoyError(
                f"{run / 'evaluation.json'}: the picture {name!r} lies outside the run directory; "
                "evaluate the run again."
            )
        if not path.is_file():
            return None
        with Image.open(path, formats=("PNG", "JPEG")) as opened:
            image = opened.convert("L" if opened.mode in ("1", "L") else "RGB")
    except ConvoyError:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise ConvoyError(
            f"{path} is not a readable PNG or JPEG picture; delete it and write the report again."
        ) from None
    image.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    written = io.BytesIO()
    image.save(written, format="PNG", optimize=True)
    return Picture(data_uri(written.getvalue(), "image/png"), image.width, image.height, max(image.size) <= 96)


def data_uri(content: bytes, kind: str) -> str:
    """`content` of the MIME type `kind` as a URI."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"
