"""Nested arguments and results: finding and replacing the tensors in tuples, lists, dicts, dataclasses and slices."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch


def replace(tree: Any, kind: type | tuple[type, ...], function: Callable[[Any], Any]) -> Any:
    """The same nest of containers with `function(leaf)` in place of every leaf of a `kind`. Containers are tuples
    (named ones too), lists, dicts, dataclass instances and slices; the given ones are left as they are. Dicts that are
    dataclasses too (the outputs of transformers) stay both."""
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, list):
        return [replace(item, kind, function) for item in tree]
    if isinstance(tree, tuple) and not isinstance(tree, torch.Size):
        items = [replace(item, kind, function) for item in tree]
        named = getattr(tree, "_fields", None) is not None
        return type(tree)(*items) if named else tuple(items)
    if isinstance(tree, slice):
        return slice(*(replace(item, kind, function) for item in (tree.start, tree.stop, tree.step)))
    if isinstance(tree, dict):
        return _replace_dict(tree, kind, function)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _replace_fields(copy.copy(tree), tree, kind, function)
    return tree


def leaves(tree: Any, kind: type | tuple[type, ...]) -> list[Any]:
    """The leaves of a `kind`, in the order in which `replace` meets them."""
    items: list[Any] = []
    replace(tree, kind, items.append)
    return items


def _replace_dict(tree: dict, kind: type | tuple[type, ...], function: Callable[[Any], Any]) -> Any:
    if type(tree) is dict:
        return {key: replace(item, kind, function) for key, item in tree.items()}
    result = copy.copy(tree)
    for key, item in tree.items():
        dict.__setitem__(result, key, replace(item, kind, function))
    fields = getattr(tree, "__dataclass_fields__", ())
    for name in (*fields, *(name for name in getattr(tree, "__dict__", ()) if name in result and name not in fields)):
        object.__setattr__(result, name, result.get(name))
    return result


def _replace_fields(result: Any, tree: Any, kind: type | tuple[type, ...], function: Callable[[Any], Any]) -> Any:
    for field in dataclasses.fields(tree):
        object.__setattr__(result, field.name, replace(getattr(tree, field.name), kind, function))
    return result
