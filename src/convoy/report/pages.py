"""Parts of all pages: templates with escaping, scripts with their hashes, pictures and downloads inside the page."""

import base64
import gzip
import hashlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from PIL import Image

import convoy
from convoy import units
from convoy.errors import ConvoyError
from convoy.report import axes
from convoy.terminal import printable

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
    return InlinePicture(data_uri(written.getvalue(), "image/png"), image.width, image.height, max(image.size) <= 96)


def data_uri(content: bytes, kind: str) -> str:
    """`content` of the MIME type `kind` as a URI."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


KINDS = {
    "png": "image/png",
    "svg": "image/svg+xml",
    "csv": "text/csv",
    "tex": "application/x-tex",
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


@dataclass(frozen=True)
class Panel:
    """One plot of a page; `figure` is None where there is nothing to draw, and `description` says why."""

    name: str
    title: str
    description: str
    figure: Figure | None

    def svg(self) -> Markup | None:
        if self.figure is None:
            return None
        return Markup(inline_svg(self.figure, self.name, self.title, self.description))  # markup of our own making


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
    content = {"over": "", "version": convoy.__version__, **content}
    return environment.get_template(template).render(
        content,
        style=Markup(style),
        script=Markup(code),
        script_hash=f"sha256-{digest}",
    )


def running(text: str) -> Markup:
    """A sentence whose options, as `--resume`, stay in one line."""
    markup, end = Markup(""), 0
    shown = printable(text, keep="\n\t")
    for option in _OPTION.finditer(shown):
        markup += shown[end : option.start()] + Markup('<span class="nowrap">{}</span>').format(option[0])
        end = option.end()
    return markup + shown[end:]


def _shown(value: object) -> object:
    return printable(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value


_SVG = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"

# The CSS custom property of each color that the plots use.
_PROPERTIES = {
    axes.PAPER: "var(--paper)",
    axes.INK: "var(--ink)",
    axes.MUTED: "var(--muted)",
    axes.GRID: "var(--grid)",
    axes.TRAIN: "var(--train)",
    axes.TEST: "var(--test)",
    axes.GREEN: "var(--green)",
    axes.PURPLE: "var(--purple)",
    axes.OCHRE: "var(--ochre)",
}


def inline_svg(figure: Figure, name: str, title: str, description: str) -> str:
    """The figure as an `<svg>` element for HTML: scalable, labelled for screen readers, every id prefixed by `name`."""
    written = io.BytesIO()
    with axes.house_style():
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    root = ElementTree.fromstring(written.getvalue())
    _drop(root)
    used = {reference for node in root.iter() for reference in _references(node)}
    for node in root.iter():
        _adapt(node, name, used)
    root.attrib = {
        "viewBox": root.attrib["viewBox"],
        "role": "img",
        "aria-labelledby": f"{name}-title {name}-description",
    }
    for position, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(tag, {"id": f"{name}-{'title' if tag == 'title' else 'description'}"})
        element.text = text
        root.insert(position, element)
    return ElementTree.tostring(root, encoding="unicode")


def _drop(root: ElementTree.Element) -> None:
    """Remove metadata, styles, and the backgrounds: the first patch of the figure and of each axes."""
    for parent in list(root.iter()):
        has_background = parent.get("id", "").startswith(("figure_", "axes_"))
        for number, child in enumerate(list(parent)):
            is_background = has_background and number == 0 and child.get("id", "").startswith("patch_")
            if child.tag in (f"{_SVG}metadata", f"{_SVG}style") or is_background:
                parent.remove(child)


def _references(node: ElementTree.Element) -> list[str]:
    urls = re.findall(r"url\(#([^)]+)\)", " ".join(node.attrib.values()))
    return [*urls, node.attrib.get(_HREF, "#")[1:]]


def _adapt(node: ElementTree.Element, name: str, used: set[str]) -> None:
    node.tag = node.tag.removeprefix(_SVG)
    if node.get("id") in used:
        node.set("id", f"{name}-{node.get('id')}")
    else:
        node.attrib.pop("id", None)
    if target := node.attrib.pop(_HREF, None):
        node.set("href", f"#{name}-{target[1:]}")
    if "clip-path" in node.attrib:
        node.set("clip-path", node.attrib["clip-path"].replace("url(#", f"url(#{name}-"))
    if "style" in node.attrib:
        style = re.sub(r"\s*font-family:[^;]*;?", "", node.attrib["style"])
        node.set("style", re.sub(r"#[0-9a-f]{6}\b", lambda match: _PROPERTIES[match[0]], style))
    if node.get("transform", "").startswith("rotate(-0 "):
        del node.attrib["transform"]
    if "d" in node.attrib:
        node.set("d", re.sub(r"-?\d+\.\d+", lambda match: f"{float(match[0]):.2f}", node.attrib["d"]).replace("\n", ""))
    if node.tag != "text":
        node.text = None
    node.tail = None
