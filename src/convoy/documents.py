"""YAML as people expect it: `1e-3` is a number, `no` is a word, a key written twice is a mistake.

PyYAML reads YAML 1.1. This follows the core schema of YAML 1.2 instead, for reading and for writing, so that a recipe
that was written reads back as the same values. Plans keep their own walk over the nodes: their words (`on`, `1e3`) may
be names of layers.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from convoy.errors import ConvoyError
from convoy.files import LONGEST_TEXT, read_text
from convoy.terminal import brief

_TYPES = [
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
]


DEEPEST = 20  # sections and lists within each other


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012  PyYAML's own form

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        # By aliases of aliases a few hundred bytes stand for billions of values, and PyYAML's constructors for tags
        # take for granted that a value is what its tag says. `dump` writes neither.
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) is not None:
            sign = f"*{event.anchor}" if isinstance(event, yaml.AliasEvent) else event.tag
            problem = f"write the value itself, without {brief(sign)}"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = {}
        for key, value in node.value:
            problem = None if isinstance(key, yaml.ScalarNode) else "a key must be a plain word"
            problem = (
                f"the key {brief(key.value)} is twice here" if problem is None and key.value in mapping else problem
            )
            if problem is not None:
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            mapping[key.value] = self.construct_object(value, deep=True)  # keys are words, also where they are digits
        return mapping


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _TYPES:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), [*_first, *([""] if _tag == "null" else [])]
        )
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """The mapping in a YAML file, which the sentences call `what` ("recipe"); a ConvoyError names the file and the
    line."""
    if path.is_dir():
        raise ConvoyError(f"{path} is a folder: name the {what} file itself, for a run its config.yaml")
    document = parse(read_text(path, what), str(path))
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConvoyError(f"{path} is not a {what}: write one `key: value` a line")
    return document


def parse(text: str, source: str) -> Any:
    """The value of a YAML text; a ConvoyError names the `source` and the line."""
    if len(text) > LONGEST_TEXT:
        raise ConvoyError(f"{source}: more than {LONGEST_TEXT:,} characters, which no recipe, run or plan has")
    try:
        value = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark and "\n" in text else ""
        hint = ": put what begins with * in quotes: '*'" if "an alias" in (error.context or "") else ""
        raise ConvoyError(f"{source}{line}: {error.problem or 'this is no YAML'}{hint}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConvoyError(f"{source}: this is no YAML ({reason})") from error
    if _is_deeper(value, DEEPEST):
        raise ConvoyError(f"{source}: more than {DEEPEST} sections or lists within each other, which no key has")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(item, levels - 1) for item in inner)


def line_of(text: str, keys: Iterable[str]) -> int | None:
    """The line at which the last of these keys stands, each below the one before it, as far as a YAML text has them."""
    node, line = yaml.compose(text, _Loader), None
    for name in keys:
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        key, node = next((pair for pair in pairs if pair[0].value == name), (None, None))
        line = line if key is None else key.start_mark.line + 1
    return line


def dump(document: dict[str, Any], in_lines: bool = False) -> str:
    """A mapping as YAML, in its own order, and `in_lines` each of its innermost mappings and lists on one line; `parse`
    gives back the same values."""
    flow, width = (None, 10_000) if in_lines else (False, 120)
    return yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=flow, width=width
    )


def show(value: Any) -> str:
    """A value as it is written in YAML, on one line and not too long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return brief(f"[{', '.join(map(show, value))}]")
    if isinstance(value, dict):
        return brief(f"{{{', '.join(f'{key}: {show(item)}' for key, item in value.items())}}}")
    return brief(str(value))


def dotted(keys: Iterable[str | int]) -> str:
    """`optimizer.betas.0` from its parts."""
    return brief(".".join(map(str, keys)))
