"""Plans as YAML: a mapping with `mesh` and `layers`, whose every mistake is said with its line."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from convoy.errors import ConvoyError
from convoy.plans.mesh import Mesh
from convoy.plans.strategies import Layers, Place, check_axes, check_layers, show
from convoy.yaml_file import read_text

_FORM = "write e.g. `mesh: {sample: 2}` and below it `layers:` with lines such as `features.*: {sample: sample}`"
_DEPTH = 4


def read_file(path: Path) -> tuple[Mesh, Layers]:
    """The mesh and layers in a YAML file.

    Raises:
        ConvoyError: it cannot be read or is no plan; the sentence has the file and the line.
    """
    if path.is_dir():
        raise ConvoyError(f"{path} is a folder: name the plan file itself, for a run {path / 'plan.yaml'}")
    return parse_yaml(read_text(path, "plan", ", or write e.g. sample=2"), str(path))


def parse_yaml(text: str, source: str = "the plan") -> tuple[Mesh, Layers]:
    """The mesh and layers of a YAML text.

    Args:
        text: the YAML.
        source: where it stands, for the sentences.

    Raises:
        ConvoyError: it is no plan; the sentence has the source and the line.
    """
    lines: dict[tuple[str, ...], int] = {}
    try:
        node = yaml.compose(text, yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        hint = "put a pattern that begins with * in quotes: '*'" if "alias" in (error.context or "") else _FORM
        raise ConvoyError(f"{source}{line}: this is no YAML ({error.problem}): {hint}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConvoyError(f"{source}: this is no YAML ({str(error).partition(chr(10))[0]}): {_FORM}") from error
    document = None if node is None else _value(node, (), lines, source)

    def at(path: tuple[str, ...]) -> str:
        while path and path not in lines:
            path = path[:-1]
        return f"{source}, line {lines[path]}: " if path else f"{source}: "

    return parse_document(document, at)


def parse_document(document: Any, at: Place = lambda path: "the plan: ") -> tuple[Mesh, Layers]:
    """The mesh and layers of a mapping with the keys `mesh` and `layers`.

    Args:
        document: what was written.
        at: where a part of it stands, for the sentences.

    Raises:
        ConvoyError: it is no plan.
    """
    if not isinstance(document, Mapping):
        raise ConvoyError(f"{at(())}a plan has the keys mesh and layers, but this is {_kind(document)}: {_FORM}")
    for key in document:
        if key not in ("mesh", "layers"):
            close = difflib.get_close_matches(str(key), ("mesh", "layers"), 1)
            hint = f"did you mean {close[0]}?" if close else "a plan has the keys mesh and layers"
            raise ConvoyError(f"{at((str(key),))}the key {show(key)} is unknown: {hint}")
    mesh = _mesh(document, at)
    if "layers" not in document:
        raise ConvoyError(
            f"{at(())}layers is missing: write for each pattern of layer names a strategy on each axis, "
            f"e.g. `layers: {{'*': {{{next(iter(mesh.names), 'sample')}: sample}}}}`"
        )
    layers = document["layers"]
    if not isinstance(layers, Mapping):
        raise ConvoyError(
            f"{at(('layers',))}layers is {_kind(layers)}, but must be a mapping of patterns: "
            f"write lines such as `features.*: {{{next(iter(mesh.names), 'sample')}: sample}}` below it"
        )
    check_layers(list(layers.items()), mesh, at)
    return mesh, tuple((pattern, dict(strategies)) for pattern, strategies in layers.items())


def dump_yaml(document: dict[str, Any]) -> str:
    """A plan's mapping as YAML, one pattern a line, in its own order."""
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=None, allow_unicode=True, width=10_000)


def _mesh(document: Mapping[Any, Any], at: Place) -> Mesh:
    if "mesh" not in document:
        raise ConvoyError(f"{at(())}mesh is missing: write the axes and their sizes, e.g. `mesh: {{sample: 2}}`")
    mesh = document["mesh"]
    if not isinstance(mesh, Mapping):
        raise ConvoyError(
            f"{at(('mesh',))}mesh is {_kind(mesh)}, but must have a size for each axis: write e.g. {{sample: 2}}"
        )
    check_axes(list(mesh), list(mesh.values()), at)
    return Mesh(tuple(mesh), tuple(mesh.values()))


def _kind(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, list | tuple):
        return "a list"
    return "a mapping" if isinstance(value, Mapping) else f"the word {show(value)}"


def _value(node: yaml.Node, path: tuple[str, ...], lines: dict[tuple[str, ...], int], source: str) -> Any:
    """What a node holds, with the line of every key noted; nothing deeper than a plan goes."""
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    if len(path) >= _DEPTH:
        return "…"
    if not isinstance(node, yaml.MappingNode):
        return [_scalar(child) if isinstance(child, yaml.ScalarNode) else "…" for child in node.value]
    found: dict[str, Any] = {}
    for key, value in node.value:
        line = f"{source}, line {key.start_mark.line + 1}: "
        if not isinstance(key, yaml.ScalarNode):
            raise ConvoyError(f"{line}a key must be a plain word")
        if key.value in found:
            raise ConvoyError(f"{line}the key {show(key.value)} is there twice: leave one out")
        lines[*path, key.value] = key.start_mark.line + 1
        found[key.value] = _value(value, (*path, key.value), lines, source)
    return found


def _scalar(node: yaml.ScalarNode) -> Any:
    """A word; a number or nothing where one is written without quotes."""
    text: str = node.value
    if node.style is None and text in ("", "~", "null"):
        return None
    if node.style is None and text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    return text
