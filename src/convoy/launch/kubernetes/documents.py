"""Documents as YAML that every reader of YAML, 1.1 or 1.2, takes for the same values."""

import re
from collections.abc import Sequence
from typing import Any

import yaml

_PLAIN = re.compile(r"/?[A-Za-z][A-Za-z0-9/._-]*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


class _Dumper(yaml.SafeDumper):
    """Quotes every text that is not clearly a word: readers differ in what else they take for a number or a truth."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _text)


def to_yaml(documents: Sequence[dict[str, Any]]) -> str:
    """Documents, one after the other, in ASCII."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=2**31)
