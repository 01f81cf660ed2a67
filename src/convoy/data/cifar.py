"""CIFAR-10 and CIFAR-100 as their author publishes them: python and binary files (Krizhevsky, 2009).

A pickle is a program for a stack machine, which may name functions and call them. Its few instructions that make plain
values are carried out here, by a machine that has nothing to call; a file with any other is refused. Arrays are kept as
what the file says of them, and checked before numpy sees that.
"""

import pickle
import pickletools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from convoy.data.files import Opened, reading, shown
from convoy.data.sources import PixelSource
from convoy.errors import ConvoyError
from convoy.terminal import brief, printable

_MAX_BYTES = 2**30
_MOST_INSTRUCTIONS = 2**22  # ten times as many as a file of CIFAR-100 has: some ten seconds
_MOST_DIMS = 8
_VALUES = {"INT", "BININT", "LONG", "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE8", "BINBYTES8"}
_VALUES |= {"BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_ENCODE = "_codecs encode"
_ARRAY = {"numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct", "numpy ndarray", "numpy dtype"}


@dataclass
class _Kept:
    """An array or a dtype, by the arguments with which a pickle calls it and the state that it gives it."""

    arguments: Any
    state: Any = None


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in a CIFAR file; keys as text, arrays of bytes as uint8. Raises ConvoyError for a damaged file, or
    one that names anything but an array."""
    with reading(path):
        if path.stat().st_size > _MAX_BYTES:
            raise ConvoyError(f"{shown(path)} is larger than any CIFAR file: set data.path to a CIFAR folder")
        data = path.read_bytes()
    try:
        content = _unpickled(data)
    except pickle.UnpicklingError as error:
        raise ConvoyError(
            f"{shown(path)} is refused: it is no plain CIFAR pickle ({error}); fetch CIFAR again from its own site"
        ) from None
    except Exception as error:
        raise ConvoyError(f"{shown(path)} is cut off or no pickle ({type(error).__name__}): fetch it again") from None
    if not isinstance(content, dict):
        raise ConvoyError(f"{shown(path)} is no CIFAR file (it holds no dictionary): fetch it again")
    return {
        key.decode("latin1") if isinstance(key, bytes) else key: _array(value) if isinstance(value, _Kept) else value
        for key, value in content.items()
    }


def _unpickled(data: bytes) -> Any:
    """The value of a pickle of numbers, text, lists, tuples, dictionaries and arrays. Raises pickle.UnpicklingError
    where it wants anything else, any Exception where it is cut off or no pickle."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    value: Any
    for number, (code, value, _) in enumerate(pickletools.genops(data)):
        if number == _MOST_INSTRUCTIONS:
            raise pickle.UnpicklingError(f"has more than {number:,} instructions")
        takes = code.stack_before
        start = marks.pop() if pickletools.markobject in takes else len(stack) - len(takes)
        items, stack[start:] = stack[start:], []
        match code.name.removeprefix("EMPTY_").rstrip("123"):  # one instruction has several forms
            case kind if kind in _VALUES:
                stack.append(value)
            case kind if kind in _CONSTANTS:
                stack.append(_CONSTANTS[kind])
            case "STRING" | "BINSTRING" | "SHORT_BINSTRING":  # of Python 2
                stack.append(value.encode("latin1"))
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[value] = stack[-1]
            case "MEMOIZE":
                stack.append(items[0])
                memo[len(memo)] = items[0]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case "MARK":
                marks.append(start)
            case "LIST":
                stack.append(items)
            case "TUPLE":
                stack.append(tuple(items))
            case "APPEND" | "APPENDS" | "SETITEM" | "SETITEMS" | "DICT" as kind:
                target: Any = {} if kind == "DICT" else stack.pop() if kind.endswith("S") else items.pop(0)
                stack.append(target)
                if kind.startswith("APPEND"):
                    target.extend(items)
                    continue
                # Hashing other keys takes for ever where tuples nest the same tuples.
                if not all(type(key) in (str, bytes) for key in items[::2]):
                    raise pickle.UnpicklingError("has a key that is no text")
                target.update(zip(items[::2], items[1::2], strict=True))
            case "GLOBAL" | "STACK_GLOBAL":
                name = value or " ".join(items)
                if name not in {*_ARRAY, _ENCODE}:
                    raise pickle.UnpicklingError(f"wants {printable(brief(name, 60)).replace(' ', '.')}")
                stack.append(name)
            case "REDUCE" if items[0] == _ENCODE:
                text, encoding = items[1]
                if encoding != "latin1":
                    raise pickle.UnpicklingError("encodes text as something else than latin1")
                stack.append(text.encode(encoding))
            case "REDUCE":
                stack.append(_Kept(items[1]))
            case "BUILD" if isinstance(items[0], _Kept):
                items[0].state = items[1]
                stack.append(items[0])
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return items[0]
            case _:
                raise pickle.UnpicklingError(f"has the instruction {code.name}")
    raise EOFError


def _array(content: _Kept) -> NDArray[np.uint8] | None:
    """The array of bytes that the pickle means, or None for anything else."""
    match content.state:
        case (_, tuple() as shape, _Kept(arguments=(b"u1" | "u1", *_)), fortran, bytes() as data):
            fits = len(shape) <= _MOST_DIMS and all(type(n) is int and 0 <= n <= len(data) for n in shape)
            if fits and len(data) == int(np.prod(shape, dtype=object)):
                return np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")
    return None


_SIDE = 32
_BYTES = 3 * _SIDE * _SIDE


class _Layout(NamedTuple):
    """The file names of one version. `label_bytes` is 0 for the python version; its label comes last."""

    name: str
    num_classes: int
    folder: str
    label_bytes: int
    train: tuple[str, ...]
    test: str
    names: str
    names_key: str = ""
    label_key: str = ""


_FIVE = tuple(f"data_batch_{i}" for i in range(1, 6))
_FIVE_BIN = tuple(f"{name}.bin" for name in _FIVE)
_LAYOUTS = (
    _Layout("cifar10", 10, "cifar-10-batches-py", 0, _FIVE, "test_batch", "batches.meta", "label_names", "labels"),
    _Layout("cifar10", 10, "cifar-10-batches-bin", 1, _FIVE_BIN, "test_batch.bin", "batches.meta.txt"),
    _Layout("cifar100", 100, "cifar-100-python", 0, ("train",), "test", "meta", "fine_label_names", "fine_labels"),
    _Layout("cifar100", 100, "cifar-100-binary", 2, ("train.bin",), "test.bin", "fine_label_names.txt"),
)


def find_cifar(path: Path) -> tuple[Path, _Layout] | None:
    """The folder with CIFAR's files, which is `path` or lies in it, and their version."""
    for layout in _LAYOUTS:
        for folder in (path, path / layout.folder):
            if any((folder / name).is_file() for name in (*layout.train, layout.test)):
                return folder, layout
    return None


def open_cifar(path: Path) -> Opened:
    """Both splits in memory, 32x32 RGB; CIFAR-100 with its 100 fine labels. Raises ConvoyError for a file that is
    missing, damaged or dangerous."""
    location = find_cifar(path)
    if location is None:
        raise ConvoyError(
            f"{shown(path)} holds no CIFAR files ({', '.join(layout.folder for layout in _LAYOUTS)}): unpack the "
            "archive and set data.path to its folder"
        )
    folder, layout = location
    classes = _class_names(folder / layout.names, layout)
    train, test = (_open_split(folder, names, layout) for names in (layout.train, (layout.test,)))
    return Opened(
        layout.name,
        classes,
        PixelSource(*train, "CIFAR's training pictures"),
        PixelSource(*test, "CIFAR's test pictures"),
    )


def _open_split(folder: Path, names: tuple[str, ...], layout: _Layout) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    read = _read_binary if layout.label_bytes else _read_python
    pixels, labels = (
        np.concatenate(part) for part in zip(*(read(folder / name, layout) for name in names), strict=True)
    )
    planes = pixels.reshape(-1, 3, _SIDE, _SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels


def _read_binary(path: Path, layout: _Layout) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    with reading(path):
        content = np.fromfile(path, np.uint8)
    row = _BYTES + layout.label_bytes
    if content.size % row or not content.size:
        raise ConvoyError(
            f"{shown(path)} has {content.size} bytes, which is no multiple of {row}: it is cut off or no file of "
            f"{layout.name}, fetch it again"
        )
    table = content.reshape(-1, row)
    return table[:, layout.label_bytes :], table[:, layout.label_bytes - 1].astype(np.int64)


def _read_python(path: Path, layout: _Layout) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    content = read_pickle(path)
    pixels, labels = content.get("data"), content.get(layout.label_key)
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _BYTES or not len(pixels):
        raise ConvoyError(f"{shown(path)} has no `data` of {_BYTES} bytes a picture: fetch it again")
    are_numbers = isinstance(labels, list) and all(type(label) is int and abs(label) < 2**31 for label in labels)
    if not isinstance(labels, list) or not are_numbers or len(labels) != len(pixels):
        raise ConvoyError(f"{shown(path)} has no whole number in `{layout.label_key}` for each picture: fetch it again")
    return pixels, np.array(labels, np.int64)


def _class_names(path: Path, layout: _Layout) -> list[str]:
    names: Any
    if layout.label_bytes:
        with reading(path):
            names = path.read_text(encoding="utf-8", errors="replace").split()
    else:
        names = read_pickle(path).get(layout.names_key)
        if isinstance(names, list):
            names = [name.decode("latin1") if isinstance(name, bytes) else name for name in names]
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not is_list or len(names) != layout.num_classes:
        raise ConvoyError(f"{shown(path)} does not name the {layout.num_classes} classes: fetch it again")
    return list(names)
