"""Reads the pickles of CIFAR's python version without letting them run anything.

A pickle names functions to call. Here the few names that an array of bytes needs mean small stand-ins that only keep
what they are given, and every other name is refused; not even numpy sees what the file says before it is checked.
"""

import pickle
import pickletools
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from convoy.data.files import reading, shown
from convoy.errors import ConvoyError

_MAX_BYTES = 2**30


class _Kept:
    """A stand-in for an array or a dtype: its arguments and its state."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"encodes as {encoding}")
    return text.encode("latin1")


_NAMES: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Kept,
    ("numpy._core.multiarray", "_reconstruct"): _Kept,
    ("numpy", "ndarray"): _Kept,
    ("numpy", "dtype"): _Kept,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _NAMES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"wants {module}.{name}") from None

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("wants an object from outside")


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in a CIFAR file; keys as text, arrays of bytes as uint8.

    Raises:
        ConvoyError: the file is missing, cut off, no CIFAR pickle, or names anything but an array.
    """
    with reading(path), path.open("rb") as file:
        if path.stat().st_size > _MAX_BYTES:
            raise ConvoyError(f"{shown(path)} is larger than any CIFAR file: set data.path to a CIFAR folder")
        try:
            _check_places(file)
            content = _Unpickler(file, encoding="bytes").load()
        except pickle.UnpicklingError as error:
            raise ConvoyError(
                f"{shown(path)} is refused: it is no plain CIFAR pickle ({error}); fetch CIFAR again from its own site"
            ) from None
        except OSError:
            raise
        except Exception as error:
            raise ConvoyError(
                f"{shown(path)} is cut off or no pickle ({type(error).__name__}): fetch it again"
            ) from None
    if not isinstance(content, dict):
        raise ConvoyError(f"{shown(path)} is no CIFAR file (it holds no dictionary): fetch it again")
    return {_text(key): _array(value) if isinstance(value, _Kept) else value for key, value in content.items()}


def _check_places(file: BinaryIO) -> None:
    """Refuse a pickle that keeps an object at a place far beyond those before it, for which memory would be taken.

    Raises:
        pickle.UnpicklingError: it does.
        ValueError: the file is cut off or no pickle.
    """
    for number, (code, place, _) in enumerate(pickletools.genops(file)):
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and isinstance(place, int) and place > number:
            raise pickle.UnpicklingError(f"keeps its object {number} at place {place}")
    file.seek(0)


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _array(kept: _Kept) -> NDArray[np.uint8] | None:
    """The array of bytes that the stand-in stands for, or None if it is anything else."""
    match kept.state:
        case (_, tuple() as shape, _Kept(arguments=(b"u1" | "u1", *_)), fortran, bytes() as data):
            if all(type(n) is int and n >= 0 for n in shape) and len(data) == int(np.prod(shape, dtype=object)):
                return np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")
    return None
