"""Objects that ranks tell each other, packed into tensors on the CPU; for what is small and rare.

A group of None is one rank alone. All ranks of a group call the same function.
"""

import pickle
from typing import Any, TypeVar

import torch
from torch import Tensor

from convoy.comm.collectives import Group, all_gather, broadcast, gather_ints, place

T = TypeVar("T")


def broadcast_object(value: T, group: Group) -> T:
    """What rank 0 has; the others' values play no role."""
    if group is None:
        return value
    packed = _pack(value) if place(group) == 0 else torch.empty(0, dtype=torch.uint8)
    size = gather_ints([len(packed)], group)[0][0]
    if place(group) == 0:
        broadcast(packed, group)
        return value
    found: T = _unpack(broadcast(torch.empty(size, dtype=torch.uint8), group))
    return found


def broadcast_tensors(tensors: dict[str, Tensor] | None, group: Group) -> dict[str, Tensor]:
    """The named tensors of rank 0, on the CPU; others give None."""
    if group is None:
        assert tensors is not None
        return tensors
    shapes = {name: (t.shape, t.dtype) for name, t in tensors.items()} if tensors is not None else None
    found: dict[str, Tensor] = {}
    for name, (shape, dtype) in (broadcast_object(shapes, group) or {}).items():
        tensor = tensors[name].cpu().contiguous() if tensors is not None else torch.empty(shape, dtype=dtype)
        found[name] = broadcast(tensor, group)
    return found


def gather_objects(value: T, group: Group) -> list[T]:
    """What every rank has, in the order of ranks."""
    if group is None:
        return [value]
    packed = _pack(value)
    sizes = [size for (size,) in gather_ints([len(packed)], group)]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(packed)] = packed
    return [_unpack(row[:size]) for row, size in zip(all_gather(padded, group), sizes, strict=True)]


def _pack(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpack(packed: Tensor) -> Any:
    return pickle.loads(packed.numpy().tobytes())
