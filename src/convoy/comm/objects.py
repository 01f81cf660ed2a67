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
    """The JSON text that `from_json` reads; a TypeError where something in the value is no data."""
    return json.dumps(_plain(value)).encode()


def from_json(text: bytes) -> Any:
    """The value that `to_json` wrote; an error for any other text."""
    return _from_plain(json.loads(text))


def _content(tensor: Tensor) -> list[Any]:
    return [tensor.dtype, list(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()]


def _tensor(dtype: torch.dtype, shape: list[int], content: bytes) -> Tensor:
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


# by the name in the JSON: the type, how it becomes parts, and how it is made of them
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


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) is list:
        return [_plain(one) for one in value]
    name, parts = next((name, parts) for name, (kind, parts, _) in _KINDS.items() if kind in (type(value), object))
    return {name: _plain(parts(value))}


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    ((name, parts),) = value.items()
    return _KINDS[name][2](_from_plain(parts))


def _fields(value: Any) -> list[Any]:
    """The class of an object, its arguments and its state, as for a copy."""
    reduced = value.__reduce_ex__(2)
    kind, args, state, items, pairs = (
        (*reduced, None, None, None)[:5] if isinstance(reduced, tuple) else (reduced, *[()] * 4)
    )
    kind, *args = args if kind is copyreg.__newobj__ else (kind, *args)  # type: ignore[attr-defined]
    if isinstance(value, Exception):  # a user's own goes as what it is to Convoy
        kind = next((base for base in type(value).__mro__ if base.__module__.startswith("convoy.")), None)
    name = f"{getattr(kind, '__module__', '')}:{getattr(kind, '__qualname__', '')}"
    if items or pairs or _class(name) is not kind:
        raise TypeError(f"{type(value).__qualname__} is no class of data")
    return [name, args, state]


def _class(name: str) -> type:
    """The class of that name, if instances of it hold data."""
    module, _, place = name.partition(":")
    kind: Any = getattr(sys.modules.get(module) if module.startswith("convoy.") else None, place, None)
    if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, tuple | Exception)):
        return kind
    if hasattr(kind, "__pydantic_fields__"):
        return kind  # type: ignore[no-any-return]
    raise TypeError(f"{name} is no class of data")


def _object(name: str, args: list[Any], state: Any) -> Any:
    kind = _class(name)
    instance = kind(*args) if args else kind.__new__(kind)  # type: ignore[call-overload]
    if hasattr(instance, "__setstate__"):
        instance.__setstate__(state)
    else:
        for field, content in (state or {}).items():
            object.__setattr__(instance, field, content)  # also of what is frozen
    return instance
