"""The steps that write numbers to memory, noted so that they can be done later, for one tensor at a time.

Tensors of one storage share a `Memory`, which has the steps that write to it; views need no step of their own. A step
that draws random numbers has the state of then, and a step that reads other memories says in what state: so the steps
behind a tensor are known, and only these are done.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from convoy.errors import ConvoyError
from convoy.graph import tree

_numbers = itertools.count()


@dataclass(eq=False)
class Memory:
    """What tensors of one storage have in common: the steps that wrote to it so far."""

    device: torch.device
    steps: "list[Step]" = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """A tensor as a region of a memory."""

    memory: Memory
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def begin(self) -> int:
        """Its first byte."""
        return self.offset * self.dtype.itemsize

    @property
    def end(self) -> int:
        """The byte after its last."""
        steps = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return (self.offset + steps + 1) * self.dtype.itemsize

    def blank(self) -> Tensor:
        """A tensor that lies so, with any numbers."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.memory.device)

    def of(self, storages: "Mapping[Memory, torch.UntypedStorage]") -> Tensor:
        """This region of memory that is there."""
        found = torch.empty(0, dtype=self.dtype, device=self.memory.device)
        return found.set_(storages[self.memory], self.offset, self.size, self.stride)


@dataclass(eq=False)
class Step:
    """An operation that writes numbers.

    Attributes:
        function: what it calls, with places in the arguments in place of deferred tensors.
        made: the new tensors among its results; None for others.
        read: the memories that it takes numbers from, with how many steps each had then.
        drawn: the generator that it draws from, and its state before.
        dtype: the default type of numbers.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    made: list[Place | None] = field(default_factory=list)
    read: list[tuple[Memory, int]] = field(default_factory=list)
    drawn: tuple[torch.Generator, Tensor] | None = None
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    number: int = field(default_factory=lambda: next(_numbers))

    def run(self, storages: dict[Memory, torch.UntypedStorage]) -> None:
        """Do it to memory that is there; what it makes is put beside that."""
        args, kwargs = tree.replace((self.args, self.kwargs), Place, lambda place: place.of(storages))
        there = {storage._cdata for storage in storages.values()}
        with _default_dtype(self.dtype), _drawing(self.drawn):
            result = self.function(*args, **kwargs)
        for place, tensor in zip(self.made, tree.leaves(result, Tensor), strict=True):
            if place is None:
                continue
            lies = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
            storage = tensor.untyped_storage()
            if lies != (place.size, place.stride, place.offset, place.dtype) or storage._cdata in there:
                raise cannot(self.function)
            storages[place.memory] = storage


class Constant:
    """Numbers that are there."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __call__(self) -> Tensor:
        return self._tensor.clone()

    def __str__(self) -> str:
        return digest(self._tensor)


def steps_behind(wanted: list[tuple[Memory, int]]) -> list[Step]:
    """The steps after which memories are as they were after so many of their steps, in order."""
    found: dict[int, Step] = {}
    seen: dict[Memory, int] = {}
    while wanted:
        memory, end = wanted.pop()
        for step in memory.steps[seen.get(memory, 0) : end]:
            if step.number not in found:
                found[step.number] = step
                wanted += step.read
        seen[memory] = max(end, seen.get(memory, 0))
    return [found[number] for number in sorted(found)]


def replay(memory: Memory) -> dict[Memory, torch.UntypedStorage]:
    """A memory with its numbers; what else that takes is freed as soon as nothing needs it."""
    steps = steps_behind([(memory, len(memory.steps))])
    last = {used: step.number for step in steps for used in _uses(step)} | {memory: -1}
    storages: dict[Memory, torch.UntypedStorage] = {}
    for step in steps:
        step.run(storages)
        for used in _uses(step):
            if last[used] == step.number:
                storages.pop(used, None)
    return storages


def _uses(step: Step) -> set[Memory]:
    return {memory for memory, _ in step.read} | {place.memory for place in step.made if place is not None}


def default_generator(device: torch.device) -> torch.Generator:
    """The one that a device draws from, where nobody gives another.

    Raises:
        ConvoyError: the device is neither a CPU nor a GPU of CUDA.
    """
    if device.type == "cuda":
        torch.cuda.init()  # before it there are none
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    if device.type != "cpu":
        raise ConvoyError(f"random numbers of {device.type} cannot be deferred: build the network on the CPU")
    return torch.default_generator


@contextmanager
def _drawing(drawn: tuple[torch.Generator, Tensor] | None) -> Iterator[None]:
    """Within it a generator is as it was; after it as before it."""
    if drawn is None:
        yield
        return
    generator, state = drawn
    kept = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(kept)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    kept = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(kept)


def digest(tensor: Tensor) -> str:
    """A checksum of type, shape and numbers."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    lies = tensor.dtype, tuple(tensor.shape), tensor.stride()
    return f"{lies} {hashlib.blake2b(content, digest_size=16).hexdigest()}"


def cannot(func: Any) -> ConvoyError:
    """The error where an operation's steps would not give what it gives."""
    return ConvoyError(f"{func} cannot be deferred: build this network without convoy.deferred")
