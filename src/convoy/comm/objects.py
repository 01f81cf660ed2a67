"""Objects as JSON, for what ranks tell each other: who writes it can change results, but have nothing run.

Numbers, texts and lists stand for themselves; anything else is an object whose one key says what it is. Of classes only
Convoy's are made, and of these such as hold data, by their fields.
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

_DTYPES = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}


def to_json(value: Any) -> bytes:
    """What `from_json` makes the same value of; a TypeError where something in it is no data."""
    return json.dumps(_plain(value)).encode()


def from_json(text: bytes) -> Any:
    """What `to_json` was given; an error where the text is not from there."""
    return _made(json.loads(text))


def _content(tensor: Tensor) -> list[Any]:
    return [tensor.dtype, list(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()]


def _tensor(dtype: torch.dtype, shape: list[int], content: bytes) -> Tensor:
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


_KINDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "dict": (dict, lambda value: [list(pair) for pair in value.items()], dict),
    "bytes": (bytes, lambda value: b64encode(value).decode(), b64decode),
    "path": (type(Path()), str, Path),
    "dtype": (torch.dtype, str, _DTYPES.__getitem__),
    "size": (torch.Size, list, torch.Size),
    "tensor": (Tensor, _content, lambda parts: _tensor(*parts)),
    "object": (object, lambda value: _fields(value), lambda parts: _object(*parts)),
}
"""By what the JSON says: the type, its parts, and what is made of them."""


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) is list:
        return [_plain(one) for one in value]
    name, parts = next((name, parts) for name, (kind, parts, _) in _KINDS.items() if kind in (type(value), object))
    return {name: _plain(parts(value))}


def _made(value: Any) -> Any:
    if isinstance(value, list):
        return [_made(one) for one in value]
    if not isinstance(value, dict):
        return value
    ((name, parts),) = value.items()
    return _KINDS[name][2](_made(parts))


def _fields(value: Any) -> list[Any]:
    """The class of an object, what that is called with, and its state, as for a copy."""
    found = value.__reduce_ex__(2)
    kind, args, state, items, pairs = (*found, None, None, None)[:5] if isinstance(found, tuple) else (found, *[()] * 4)
    kind, *args = args if kind is copyreg.__newobj__ else (kind, *args)  # type: ignore[attr-defined]
    if isinstance(value, Exception):  # a user's own goes as what it is to Convoy
        kind = next((known for known in type(value).__mro__ if known.__module__.startswith("convoy.")), None)
    name = f"{getattr(kind, '__module__', '')}:{getattr(kind, '__qualname__', '')}"
    if items or pairs or _class(name) is not kind:
        raise TypeError(f"{type(value).__qualname__} is no class of data")
    return [name, args, state]


def _class(name: str) -> type:
    """The class of that name, of those that hold data."""
    module, _, place = name.partition(":")
    found: Any = getattr(sys.modules.get(module) if module.startswith("convoy.") else None, place, None)
    if isinstance(found, type) and (is_dataclass(found) or issubclass(found, tuple | Exception)):
        return found
    if hasattr(found, "__pydantic_fields__"):
        return found  # type: ignore[no-any-return]
    raise TypeError(f"{name} is no class of data")


def _object(name: str, args: list[Any], state: Any) -> Any:
    kind = _class(name)
    made = kind(*args) if args else kind.__new__(kind)  # type: ignore[call-overload]
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
    else:
        for field, content in (state or {}).items():
            object.__setattr__(made, field, content)  # also of what is frozen
    return made
