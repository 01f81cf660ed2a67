"""Parts of all pages: templates with escaping, scripts with their hashes, pictures and downloads inside the page."""

import base64
import gzip
import hashlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from convoy import units
from convoy.errors import ConvoyError
from convoy.report import axes
from convoy.terminal import printable
from convoy.version import __version__

LARGEST = 256  # pictures are shown at about 130 pixels; twice that is sharp on every screen


@dataclass(frozen=True)
class InlinePicture:
    """An image for the page. `coarse` says that it has few pixels and is to be enlarged without smoothing."""

    uri: str
    width: int
    height: int
    coarse: bool


def read_picture(run: Path, name: str | None) -> InlinePicture | None:
    """The picture `name` of the run directory `run`, or None if there is no such file in it.

    Raises ConvoyError if the file is no readable picture, or its name leads out of the run directory.
    """
    if not name:
        return None
    path = run / name
    try:
        if not path.resolve().is_relative_to(run.resolve()):
            source = run / "evaluation.json"
            raise ConvoyError(f"{source}: the picture {name!r} lies outside the run directory; evaluate the run again.")
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
    return InlinePicture(data_uri(written.getvalue(), "image/png"), image.width, image.height, max(image.size) <= 96)


def data_uri(content: bytes, kind: str) -> str:
    """`content` of the MIME type `kind` as a URI."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


KINDS = {
    "png": "image/png",
    "svg": "image/svg+xml",
    "csv": "text/csv",
    "json": "application/json",
    "jsonl": "application/jsonl",
}
COMPRESS_FROM = 1 << 20  # files of this many bytes are packed with gzip for the download


@dataclass(frozen=True)
class Download:
    """A file inside the page."""

    name: str
    size: str
    uri: str

    @staticmethod
    def of(name: str, content: bytes) -> "Download":
        """A file of a kind that its name ends with, packed where it is large."""
        size = units.prefixed(len(content), "B")
        if len(content) < COMPRESS_FROM:
            return Download(name, size, data_uri(content, KINDS[name.rpartition(".")[2]]))
        packed = gzip.compress(content, mtime=0)
        return Download(f"{name}.gz", f"{size}, packed", data_uri(packed, "application/gzip"))


# The CSS custom property of each color that the plots use.
_COLORS = ("paper", "ink", "muted", "grid", "train", "test", "green", "purple", "ochre")
_PROPERTIES = {getattr(axes, name.upper()): f"var(--{name})" for name in _COLORS}


@dataclass(frozen=True)
class Panel:
    """One plot of a page; `figure` is None where there is nothing to draw, and `description` says why."""

    name: str
    title: str
    description: str
    figure: Figure | None

    def file(self, kind: str, **options: Any) -> bytes:
        """The plot as a file of a kind, the same bytes whenever it is written."""
        assert self.figure is not None
        written = io.BytesIO()
        with axes.house_style():
            self.figure.savefig(written, format=kind, **options)
        return written.getvalue()

    def svg(self) -> Markup:
        """As an `<svg>` element for HTML: scalable, labelled for screen readers, every id prefixed by its name."""
        name, about = self.name, {"Date": None, "Creator": None, "Format": None, "Type": None}
        written = self.file("svg", metadata=about, transparent=True).decode()
        start, _, body = written.partition("<svg ")[2].partition(">")
        body = re.sub(r"<metadata>.*?</metadata>|<style .*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
        used = set(re.findall(r'(?:xlink:href="|url\()#([^")]+)', body))

        def adapt(match: re.Match[str]) -> str:
            tag = re.sub(r' id="([^"]*)"', lambda id_: f' id="{name}-{id_[1]}"' if id_[1] in used else "", match[0])
            tag = re.sub(r'(xlink:href="|url\()#', lambda to: f"{to[1].removeprefix('xlink:')}#{name}-", tag)
            tag = re.sub(r"\s*font-family:[^;\"]*;?", "", tag)
            tag = re.sub(r": (#[0-9a-f]{6})\b", lambda color: f": {_PROPERTIES[color[1]]}", tag)
            return re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", tag)

        # Matplotlib escapes < and > in texts and attributes, so that what stands between them is a tag.
        body = re.sub(r"<[^>]*>", adapt, re.sub(r">\s+<", "><", body.strip()))
        view = re.search(r'viewBox="[^"]*"', start)
        assert view is not None
        labels = f'<title id="{name}-title">{escape(self.title)}</title>'
        labels += f'<desc id="{name}-description">{escape(self.description)}</desc>'
        return Markup(f'<svg {view[0]} role="img" aria-labelledby="{name}-title {name}-description">{labels}{body}')


Drawing = tuple[str, Axes] | None  # what it shows in words, and where; None where there is nothing


def drawn(name: str, title: str, draw: Callable[[str], Drawing], nothing: str) -> Panel:
    """A plot under a title, or a sentence where there is nothing to draw."""
    with axes.house_style():
        drawing = draw(title)
    if drawing is None:
        return Panel(name, title, nothing, None)
    return Panel(name, title, drawing[0], axes.figure_of(drawing[1]))


@dataclass(frozen=True)
class Tile:
    """A label, a value, and a line of small print."""

    label: str
    value: str
    note: str = ""
    main: bool = False


_FILTERS = (
    *("count", "decimal", "significant", "percent", "rough_percent", "duration", "seconds"),
    *("size", "shape", "extra", "value", "plural", "shorten"),
)
_OPTION = re.compile(r"(?<![\w-])--[a-z]\w*(?:-\w+)*")


def render(template: str, styles: Sequence[str], scripts: Sequence[str], **content: object) -> str:
    """A page as HTML, from a template under `templates/` and the names of its style sheets and scripts."""
    environment = Environment(
        loader=PackageLoader("convoy.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    for name in _FILTERS:
        environment.filters[name] = getattr(units, name)
    environment.filters["running"] = running
    loader = environment.loader
    assert loader is not None
    style, code = ("\n".join(loader.get_source(environment, name)[0] for name in names) for names in (styles, scripts))
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    content = {"over": "", "version": __version__, **content}
    return environment.get_template(template).render(
        content,
        style=Markup(style),
        script=Markup(code),
        script_hash=f"sha256-{digest}",
    )


def running(text: str) -> Markup:
    """A sentence whose options, as `--resume`, stay in one line."""
    return Markup(_OPTION.sub(r'<span class="nowrap">\g<0></span>', str(escape(printable(text, keep="\n\t")))))


def _shown(value: object) -> object:
    return printable(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value
