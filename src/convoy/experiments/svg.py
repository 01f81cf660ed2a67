"""Turns a figure into SVG that lives inside an HTML page: its colours, fonts and theme are those of the page."""

import io
import re
from xml.etree import ElementTree

from matplotlib.figure import Figure

from convoy.experiments import axes

_SVG = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"

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
"""The CSS custom property of each colour that the plots use."""


def inline_svg(figure: Figure, name: str, title: str, description: str) -> str:
    """The figure as an `<svg>` element for HTML: scalable, labelled for screen readers, every id prefixed by `name`."""
    written = io.BytesIO()
    with axes.house_style():
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    root = ElementTree.fromstring(written.getvalue())
    _drop(root, {f"{_SVG}metadata", f"{_SVG}style"})
    _drop_background(root)
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


def _drop(root: ElementTree.Element, tags: set[str]) -> None:
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in tags:
                parent.remove(child)


def _drop_background(root: ElementTree.Element) -> None:
    """Panels are transparent: the first patch of the figure and of each axes is its background."""
    for parent in list(root.iter(f"{_SVG}g")):
        first = next(iter(parent), None)
        if (
            parent.get("id", "").startswith(("figure_", "axes_"))
            and first is not None
            and first.get("id", "").startswith("patch_")
        ):
            parent.remove(first)


def _references(node: ElementTree.Element) -> list[str]:
    found = re.findall(r"url\(#([^)]+)\)", " ".join(node.attrib.values()))
    return [*found, node.attrib.get(_HREF, "#")[1:]]


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
