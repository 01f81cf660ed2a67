"""Changes to a recipe from the command line: `optimizer.lr=0.4`.

An override says something about the keys it does not name, too: a new `optimizer.lr` takes the place of a recipe's
`base_lr`, and a new `optimizer.name` makes the numbers that were tuned for the old one meaningless.
"""

from collections.abc import Callable, Sequence
from typing import Any

from convoy.documents import DEEPEST, parse, show
from convoy.errors import ConvoyError
from convoy.terminal import brief

_ALTERNATIVES = [("optimizer.lr", "optimizer.base_lr"), ("microbatch", "microbatches")]
_KEPT = {"optimizer": (), "schedule": ("warmup", "warmup_from")}


def parse_overrides(texts: Sequence[str], is_text: Callable[[str], bool]) -> dict[str, Any]:
    """`key.sub=value` texts as dotted keys and values.

    Args:
        texts: the overrides.
        is_text: whether a key's value is free text, such as a path. It is then taken as it stands, unless it is in
            quotes; every other value is read as YAML.

    Raises:
        ConvoyError: a text has another form, a value is no YAML, or a key is given two values.
    """
    overrides: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")) or key.count(".") > DEEPEST:
            raise ConvoyError(f"{brief(text)!r} is not of the form key=value: write for example optimizer.lr=0.4")
        raw = is_text(key) and value not in ("", "null") and value[:1] not in ("'", '"')
        read = value if raw else parse(value, f"the value of {brief(key)}")
        if key in overrides and overrides[key] != read:
            raise ConvoyError(f"{brief(key)} is set twice, to {show(overrides[key])} and to {show(read)}: set it once")
        overrides[key] = read
    return overrides


def apply_overrides(document: dict[str, Any], overrides: dict[str, Any]) -> list[str]:
    """Change a recipe's document in place.

    Returns:
        A sentence for each group of the recipe's options that no longer apply.

    Raises:
        ConvoyError: a key lies below something that is not a section.
    """
    notes = []
    for section, kept in _KEPT.items():
        new = overrides.get(f"{section}.name")
        old = document.get(section)
        if new is not None and isinstance(old, dict) and old.get("name") not in (None, new):
            dropped = [key for key in old if key not in (*kept, "name") and f"{section}.{key}" not in overrides]
            document[section] = {key: value for key, value in old.items() if key in kept}
            if dropped:
                what = ", ".join(f"{key}={show(old[key])}" for key in dropped)
                notes.append(f"{section}.name={new} takes the place of {old['name']}: {what} no longer apply")
    for pair in _ALTERNATIVES:
        for key, other in (pair, pair[::-1]):
            if overrides.get(key) is not None and other not in overrides:
                _remove(document, other.split("."))
    for key in sorted(overrides, key=lambda key: key.count(".")):  # a whole section first, then its keys
        _put(document, key.split("."), overrides[key])
    return notes


def _put(document: Any, keys: Sequence[str], value: Any) -> None:
    for depth, key in enumerate(keys[:-1], 1):
        if document.get(key) is None:
            document[key] = {}
        document = document[key]
        if not isinstance(document, dict):
            path = ".".join(keys[:depth])
            raise ConvoyError(f"{brief('.'.join(keys))} cannot be set: {path} is {show(document)}, not a section")
    document[keys[-1]] = value


def _remove(document: Any, keys: Sequence[str]) -> None:
    for key in keys[:-1]:
        document = document.get(key) or {}
        if not isinstance(document, dict):
            return
    document.pop(keys[-1], None)
