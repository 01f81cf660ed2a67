"""What a forward pass reads of Python's objects: the attributes of modules, in words that can be compared."""

import copy
import enum
import itertools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

MISSING = "-"  # in place of an attribute that an instance does not have
# Attributes whose changes are followed in another way.
LOOKED_AFTER = {"training", "_parameters", "_buffers", "_modules", "_convoy"}
# Kinds of values that are what they say.
VALUES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice, range, enum.Enum)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
# Containers that have more entries, or lie deeper in others, are known by their identity alone.
_LONGEST, _DEEPEST = 1000, 6
_LIBRARIES = {"torch", "numpy", "convoy", *sys.stdlib_module_names} - {"types", "argparse"}


class Reads:
    """Attributes that forward passes have read before they set them, and tensors that they took from elsewhere. These
    alone are compared before later passes: comparing all attributes would capture again, or refuse as ranks differ, for
    a note such as `net.best = 0.9` that nobody reads."""

    def __init__(self) -> None:
        self.names: dict[nn.Module, dict[str, None]] = {}
        self.tensors: dict[int, Tensor] = {}

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Within it the attributes of all modules are followed, whoever reads them."""
        written: set[tuple[int, str]] = set()
        put = nn.Module.__setattr__

        def read(module: nn.Module, name: str) -> Any:
            if not name.startswith("__") and name not in LOOKED_AFTER and (id(module), name) not in written:
                self.names.setdefault(module, {})[name] = None
            return super(nn.Module, module).__getattribute__(name)

        def write(module: nn.Module, name: str, value: Any) -> None:
            written.add((id(module), name))
            put(module, name, value)

        nn.Module.__getattribute__, nn.Module.__setattr__ = read, write  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del nn.Module.__getattribute__
            nn.Module.__setattr__ = put  # type: ignore[method-assign]


class Texts:
    """Words for values, which are the same for values that are equal; objects that are no values are numbered. A
    number, after #, is this rank's own. `live` holds the containers and objects' attributes that the words since
    `clear` were made of, `copies` their contents then, and `tensors` the tensors that were met."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[Any, str]] = {}
        self._next, self._start = itertools.count(), 0
        self.clear()

    def clear(self) -> None:
        """Forget what words were made of; numbers stay."""
        self.live: list[Any] = []
        self.copies: list[Any] = []
        self.tensors: list[Tensor] = []

    def of_attribute(self, name: str, value: Any) -> str:
        """The words for an attribute of a module; hooks have keys that are no part of what they do."""
        if "_hooks" not in name or not isinstance(value, dict):
            return self.of(value)
        self._follow(value)
        return self.of(tuple(value.values()))

    def of(self, value: Any, depth: int = _DEEPEST) -> str:
        if value is None or isinstance(value, VALUES):
            return repr(value)
        if depth == _DEEPEST:
            self._start = len(self.live)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            self.tensors.append(value)
            return f"{self._number(value)}.{version(value)}"
        if isinstance(value, weakref.ref):
            return self.of(value(), depth - 1)
        if isinstance(value, types.MethodType):
            return f"{self._number(value)} of {self.of(value.__self__, depth - 1)}"
        if depth <= 0 or len(self.live) - self._start > _LONGEST:
            return self._number(value)
        if isinstance(value, _CONTAINERS):
            if len(value) > _LONGEST:
                return self._number(value)
            if not isinstance(value, tuple | frozenset):
                self._follow(value)
            items = [self.of(item, depth - 1) for item in value]
            if isinstance(value, dict):
                items = [f"{key}: {self.of(item, depth - 1)}" for key, item in zip(items, value.values(), strict=True)]
            return f"[{', '.join(sorted(items) if isinstance(value, set | frozenset) else items)}]"
        if _is_of_user(value):
            return f"{self._number(value)} {self.of(vars(value), depth - 1)}"
        return self._number(value)

    def _follow(self, container: Any) -> None:
        self.live.append(container)
        self.copies.append(dict(container) if isinstance(container, dict) else copy.copy(container))

    def _number(self, value: Any) -> str:
        entry = self._numbers.get(id(value))
        if entry is None or entry[0]() is not value:
            entry = self._numbers[id(value)] = _reference(value), f"{type(value).__name__} #{next(self._next)}"
        return entry[1]

    def alias(self, substitute: Any, value: Any) -> None:
        self._numbers[id(substitute)] = weakref.ref(substitute), self._number(value)


def _reference(value: Any) -> Callable[[], Any]:
    with suppress(TypeError):
        return weakref.ref(value)
    return lambda: value  # kept, so that no other gets its id


def version(tensor: Tensor) -> int:
    """How often a tensor was changed in place, as far as torch knows."""
    return 0 if tensor.is_inference() else tensor._version


def described(model: nn.Module, texts: Texts) -> dict[tuple[nn.Module, str], str]:
    """Words for all attributes of the modules."""
    texts.clear()
    return {
        (module, name): texts.of_attribute(name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in LOOKED_AFTER
    }


def _is_of_user(value: Any) -> bool:
    """Whether it is an object with attributes, of a class that neither Python nor a large library has."""
    kind = type(value)
    is_value = hasattr(value, "__dict__") and not isinstance(value, type | types.FunctionType | nn.Module)
    return is_value and kind.__module__.partition(".")[0] not in _LIBRARIES
