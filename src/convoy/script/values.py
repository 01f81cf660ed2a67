"""Nested values as JSON and tensors, and back exactly as they were; nothing is pickled."""

import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from convoy.checkpoint.files import TYPES
from convoy.errors import ConvoyError

_TAG = "$"  # the key of a JSON object that stands for something else than a dictionary with names for keys


@dataclass(frozen=True)
class Whole:
    """A tensor of which ranks hold parts."""

    make: Callable[[], Tensor]  # gives the whole; all ranks call it
    shape: tuple[int, ...]  # of the whole


class Packed:
    """Nested dictionaries, lists, tuples, numbers, strings, None and tensors, taken apart; a ConvoyError names the
    place of anything else. `values` are the tree as JSON can hold it, `tensors` those in it by their places, such as
    `net/conv.weight` (a slash in a key is `~1` there, RFC 6901), and `leaves` all else, and the shapes of parts, as
    text by their places."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.tensors: dict[str, Tensor | Whole] = {}
        self.leaves: dict[str, str] = {}
        self.values: dict[str, Any] = {key: self._packed(_join("", key), value) for key, value in tree.items()}

    def contents(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors, whole and one after the other. All ranks go through them."""
        for name, tensor in self.tensors.items():
            yield name, tensor.make() if isinstance(tensor, Whole) else tensor

    def facts(self, free: Collection[str]) -> dict[str, str]:
        """The facts that ranks can compare: all values by their places, with checksums of tensors in one piece. Values
        under the keys `free` may differ, but tensors may not."""
        facts = {place: text for place, text in self.leaves.items() if place.partition("/")[0] not in free}
        for place, value in self.tensors.items():
            if isinstance(value, Tensor):
                content = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
                facts[place] = f"{value.dtype} {list(value.shape)} {hashlib.sha256(content).hexdigest()}"
        return facts

    def _packed(self, place: str, value: Any) -> Any:
        if isinstance(value, Whole | Tensor):
            return self._noted(place, value)
        if type(value) in (list, tuple):
            items = [self._packed(_join(place, str(i)), item) for i, item in enumerate(value)]
            self.leaves[place] = f"{type(value).__name__} of {len(items)}"
            return items if type(value) is list else {_TAG: "tuple", "items": items}
        if type(value) in (dict, OrderedDict, Counter):
            return self._dictionary(place, value)
        if not isinstance(value, bool | int | float | str | None) and hasattr(value, "item"):
            with suppress(TypeError, ValueError):
                value = value.item()  # a plain number in place of one of numpy's
        self.leaves[place] = repr(value)
        if isinstance(value, float):  # numpy's are too
            return float(value) if math.isfinite(value) else {_TAG: "float", "text": str(float(value))}
        if value is None or type(value) in (bool, int, str):
            return value
        advice = "save what can be, or an object with state_dict and load_state_dict under a name of its own"
        raise ConvoyError(f"{place} is a {type(value).__name__}, which a checkpoint cannot hold: {advice}")

    def _dictionary(self, place: str, value: Mapping[Any, Any]) -> Any:
        bad_key = next((key for key in value if type(key) not in (str, int, float, bool, type(None))), None)
        if bad_key is not None:
            raise ConvoyError(
                f"{place} has the key {bad_key!r}, which a checkpoint cannot hold: make it text or a number"
            )
        items = [self._packed(_join(place, str(key)), item) for key, item in value.items()]
        self.leaves[place] = f"{type(value).__name__} of {len(items)}"
        has_names = all(type(key) is str for key in value) and _TAG not in value and type(value) is not Counter
        if has_names:
            return dict(zip(value, items, strict=True))
        keys = [self._packed(_join(place, f"key of {key}"), key) for key in value]
        kind = "counter" if type(value) is Counter else "dict"
        return {_TAG: kind, "keys": keys, "items": items}

    def _noted(self, place: str, value: Tensor | Whole) -> dict[str, str]:
        if isinstance(value, Tensor):
            value = value.detach()
            if value.layout != torch.strided or value.is_meta or value.dtype not in TYPES:
                kind = f"tensor of {value.dtype} and {value.layout}"
                raise ConvoyError(f"{place} is a {kind}, which safetensors cannot hold: convert it first")
        else:
            self.leaves[place] = f"{list(value.shape)} of all ranks"
        name = place
        while name in self.tensors:
            name += "~"
        self.tensors[name] = value
        return {_TAG: "tensor", "name": name}


def unpacked(values: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What was packed, with whole tensors."""
    if isinstance(values, list):
        return [unpacked(item, tensors) for item in values]
    if not isinstance(values, dict):
        return values
    kind = values.get(_TAG)
    if kind is None:
        return {key: unpacked(item, tensors) for key, item in values.items()}
    if kind == "tensor":
        return tensors[values["name"]]
    if kind == "float":
        return float(values["text"])
    items = unpacked(values["items"], tensors)
    if kind == "tuple":
        return tuple(items)
    mapping = dict(zip(unpacked(values["keys"], tensors), items, strict=True))
    return Counter(mapping) if kind == "counter" else mapping


def _join(place: str, key: str) -> str:
    key = key.replace("~", "~0").replace("/", "~1")
    return f"{place}/{key}" if place else key
