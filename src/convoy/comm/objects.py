"""Objects as JSON, for what ranks tell each other: who writes it can change results, but have nothing run.

Numbers, texts and lists stand for themselves; anything else is an object whose one key says what it is. Of classes only
Convoy's are made, and only those that hold data: by their fields, without a call, or if they define it so by a call of
the class, as an exception is.
"""

import copyreg
import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_PACKAGE = __name__.partition(".")[0] + "."


def to_json(value: Any) -> bytes:
    """What `from_json` makes the same value of.

    Raises:
        TypeError: the value, or something in it, is no data.
    """
    return json.dumps(_plain(value)).encode()


def from_json(text: bytes) -> Any:
    """What `to_json` was given.

    Raises:
        ValueError: it does not come from there.
    """
    return _made(json.loads(text))


def _tensor(dtype: torch.dtype, shape: list[int], content: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)
    )


def _dtype(name: str) -> torch.dtype:
    if not isinstance(found := getattr(torch, name), torch.dtype):
        raise ValueError(f"{name} is no type of numbers")
    return found


_KINDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "dict": (dict, lambda value: [list(pair) for pair in value.items()], dict),
    "bytes": (bytes, lambda value: b64encode(value).decode(), b64decode),
    "path": (type(Path()), str, Path),
    "dtype": (torch.dtype, lambda value: str(value).removeprefix("torch."), _dtype),
    "size": (torch.Size, list, torch.Size),
    "tensor": (
        Tensor,
        lambda value: [
            value.dtype,
            list(value.shape),
            value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        ],
        lambda parts: _tensor(*parts),
    ),
    "object": (object, lambda value: _fields(value), lambda parts: _object(*parts)),
}
"""By what the JSON says: the type, its parts, and what is made of them."""


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) is list:
        return [_plain(one) for one in value]
    name, (_, parts, _) = next((name, kind) for name, kind in _KINDS.items() if kind[0] in (type(value), object))
    return {name: _plain(parts(value))}


def _made(value: Any) -> Any:
    if isinstance(value, list):
        return [_made(one) for one in value]
    if not isinstance(value, dict):
        return value
    ((name, parts),) = value.items()
    return _KINDS[name][2](_made(parts))


def _fields(value: Any) -> list[Any]:
    """Of an object: its class, whether that is called, with what, and its state."""
    found = value.__reduce_ex__(2)
    make, args, state, items, pairs = (*found, None, None, None)[:5] if isinstance(found, tuple) else (found, *[()] * 4)
    is_called = make is not copyreg.__newobj__  # type: ignore[attr-defined]
    kind, *args = (make, *args) if is_called else args
    if isinstance(value, Exception):  # a user's own goes as what it is to Convoy
        kind = next((known for known in type(value).__mro__ if known.__module__.startswith(_PACKAGE)), None)
    name = f"{getattr(kind, '__module__', '')}:{getattr(kind, '__qualname__', '')}"
    if items or pairs or _class(name) is not kind:
        raise TypeError(f"{type(value).__qualname__} is no class of data")
    return [name, is_called, args, state]


def _class(name: str) -> type:
    """The class of that name, of those that hold data."""
    module, _, place = name.partition(":")
    found: Any = getattr(sys.modules.get(module) if module.startswith(_PACKAGE) else None, place, None)
    if isinstance(found, type):
        is_model = hasattr(found, "__pydantic_fields__")
        if is_dataclass(found) or is_model or issubclass(found, tuple | Exception):
            return found
    raise TypeError(f"{name} is no class of data")


def _object(name: str, is_called: bool, args: list[Any], state: Any) -> Any:
    kind = _class(name)
    made = kind(*args) if is_called else kind.__new__(kind, *args)
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
    else:
        for name, part in (state or {}).items():
            object.__setattr__(made, name, part)  # also of what is frozen
    return made
