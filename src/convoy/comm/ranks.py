"""The ranks of a run, of a plan in the making or of a measurement: this rank's place among them, and what they
exchange.

Objects travel as JSON, packed into tensors on the CPU: for what is small and rare. Who writes it can change results,
but have nothing run: numbers, texts and lists stand for themselves, anything else is an object whose one key says what
it is, and of classes only Convoy's are made, of these such as hold data, by their fields (a pickle of which some names
are allowed can still set attributes of the classes that it names). A group of None is one rank
alone. All ranks of a group call the same function.
"""

import copyreg
import json
import sys
import uuid
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from convoy.comm.collectives import Group, all_gather, broadcast, gather_ints, largest, place, size
from convoy.comm.groups import alarm, everyone, temporary
from convoy.comm.joining import num_local
from convoy.comm.position import NEEDS_LESS, current, lack_of_memory
from convoy.errors import ConvoyError, MachineError, RankFailedError
from convoy.plans.mesh import Axes, Mesh

T = TypeVar("T")

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def to_json(value: Any) -> bytes:
    """The JSON text that `from_json` reads; a TypeError where something in the value is no data."""
    return json.dumps(_plain(value)).encode()


def from_json(text: bytes) -> Any:
    """The value that `to_json` wrote; an error for any other text."""
    return _from_plain(json.loads(text))


def _content(tensor: Tensor) -> list[Any]:
    numbers = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)  # of one number strides may be 0
    return [tensor.dtype, list(tensor.shape), numbers.view(torch.uint8).numpy().tobytes()]


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
        return [_plain(item) for item in value]
    name, parts = next((name, parts) for name, (kind, parts, _) in _KINDS.items() if kind in (type(value), object))
    return {name: _plain(parts(value))}


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
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


def broadcast_object(value: T, group: Group) -> T:
    """The value of rank 0; those of other ranks are ignored."""
    if group is None:
        return value
    packed = _pack(value) if place(group) == 0 else torch.empty(0, dtype=torch.uint8)
    size = gather_ints([len(packed)], group)[0][0]
    if place(group) == 0:
        broadcast(packed, group)
        return value
    return cast(T, _unpack(broadcast(torch.empty(size, dtype=torch.uint8), group)))


def broadcast_tensors(tensors: dict[str, Tensor] | None, group: Group) -> dict[str, Tensor]:
    """The named tensors of rank 0, on the CPU; other ranks pass None. With several ranks they have shapes alone, and
    each is sent when it is asked for (`received`), so that no rank holds more than one of them at a time: all ranks ask
    for the same ones in the same order."""
    if group is None:
        assert tensors is not None
        return tensors
    shapes = {name: (t.shape, t.dtype) for name, t in tensors.items()} if tensors is not None else None

    def send(name: str, like: Tensor) -> Tensor:
        whole = torch.empty_like(like, device="cpu")
        return broadcast(whole if tensors is None else whole.copy_(tensors[name]), group)

    remote: dict[str, Tensor] = {}
    for name, (shape, dtype) in (broadcast_object(shapes, group) or {}).items():
        remote[name] = torch.empty(shape, dtype=dtype, device="meta")
        vars(remote[name])[_SENDING] = partial(send, name, remote[name])
    return remote


_SENDING = "_convoy_sending"


def received(value: T) -> T:
    """The numbers of a tensor of `broadcast_tensors`, in memory of its own; anything else is returned as it is."""
    return cast(T, vars(value)[_SENDING]()) if isinstance(value, Tensor) and _SENDING in vars(value) else value


def gather_objects(value: T, group: Group) -> list[T]:
    """The values of all ranks, in their order."""
    if group is None:
        return [value]
    packed = _pack(value)
    sizes = [size for (size,) in gather_ints([len(packed)], group)]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(packed)] = packed
    return [_unpack(row[:size]) for row, size in zip(all_gather(padded, group), sizes, strict=True)]


def _pack(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(to_json(value)), dtype=torch.uint8)


def _unpack(packed: Tensor) -> Any:
    return from_json(packed.numpy().tobytes())


_LOST_MEMORY, _MISTAKE, _MACHINE, _BROKEN, _CUT_OFF = range(5)
_ENDED = ("closed by peer", "reset by peer", "Broken pipe", "aborted")


@dataclass(frozen=True)
class Cause:
    """Why a rank has failed; the lowest `sort` among several ranks is the cause of the others' failures."""

    sort: int
    text: str

    @staticmethod
    def of(error: Exception) -> "Cause":
        """Why this rank has just failed."""
        if (needed := lack_of_memory(error)) is not None:
            layer = current.layer.partition("#")[0]
            return Cause(_LOST_MEMORY, (f", in layer {layer}" if layer else "") + needed)
        if isinstance(error, ConvoyError):
            return Cause(_MACHINE if isinstance(error, MachineError) else _MISTAKE, str(error))
        first_line = str(error).partition("\n")[0].rstrip(".")
        cut_off = isinstance(error, RuntimeError) and any(words in str(error) for words in _ENDED)
        return Cause(_CUT_OFF if cut_off else _BROKEN, f"{type(error).__name__}: {first_line}")

    def error(self, rank: int, what: str = "") -> ConvoyError:
        """The error that every rank raises when `rank` has failed in `what` all tried together, worded to follow
        "while"."""
        attempt = f" while {what}" if what else ""
        if self.sort == _MISTAKE:
            return ConvoyError(self.text)
        if self.sort == _MACHINE:
            return MachineError(self.text)
        if self.sort == _LOST_MEMORY:
            return RankFailedError(f"rank {rank} ran out of memory{attempt}{self.text}; {NEEDS_LESS}", True)
        return RankFailedError(f"rank {rank} failed{attempt} ({self.text}): -v shows where")


@dataclass
class Ranks:
    """This rank among all: who does what once for all, and what they exchange; alone without a process group."""

    rank: int = 0  # from 0
    num: int = 1  # how many ranks there are
    on_host: int = 1  # how many of them share this host
    group: Group = field(default=None, repr=False)
    sample_rank: int = 0  # place on the plan's sample axes: which part of every batch this rank computes
    num_sample_ranks: int = 1  # how many parts a batch has
    is_group_leader: bool = True  # whether it speaks for its model group, whose ranks compute the same samples together
    _leaders: list[int] = field(default_factory=lambda: [0], repr=False)

    @staticmethod
    def here() -> "Ranks":
        """All ranks that have joined; each of them calls it."""
        group = everyone()
        num = size(group)
        return Ranks(place(group), num, num_local(num), group)

    def first_of(self, reason: str | None) -> str | None:
        """The first reason that a rank has; None where none has. All ranks call it."""
        return next((text for text in self.gather(reason) if text is not None), None)

    def follow(self, mesh: Mesh, axes: Axes) -> None:
        """Take this rank's place on a mesh whose `axes` divide the samples."""
        assert mesh.num_devices == self.num
        places = [mesh.coordinates(rank) for rank in range(self.num)]
        self.num_sample_ranks = mesh.size(axes)
        self.sample_rank = mesh.index(places[self.rank], axes)
        stage = mesh.stage_axis  # the last one has the outputs
        speakers = [
            (rank, place) for rank, place in enumerate(places) if stage is None or place[stage] == mesh.sizes[stage] - 1
        ]
        self._leaders = [
            next(rank for rank, place in speakers if mesh.index(place, axes) == part)
            for part in range(self.num_sample_ranks)
        ]
        self.is_group_leader = self.rank in self._leaders

    def places(self, mesh: Mesh) -> list[int]:
        """The place on a mesh that each rank takes while it profiles: spread out, where the mesh has more devices."""
        return [rank * mesh.num_devices // self.num for rank in range(self.num)]

    def barrier(self) -> None:
        gather_ints([0], self.group)

    def agree(self, done: bool) -> bool:
        """Whether something holds on all ranks."""
        return all(row[0] for row in gather_ints([int(done)], self.group))

    def any(self, here: bool) -> bool:
        """Whether something holds on any rank."""
        return self.largest(int(here))[0] == 1

    def largest(self, *numbers: int) -> tuple[int, ...]:
        """The largest of every rank's numbers, one by one."""
        return tuple(largest(numbers, self.group))

    def broadcast(self, value: T) -> T:
        return broadcast_object(value, self.group)

    def broadcast_tensors(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
        return broadcast_tensors(tensors, self.group)

    def gather(self, value: T) -> list[T]:
        return gather_objects(value, self.group)

    def gather_samples(self, value: T) -> list[T]:
        """The values for each part of the batch, in the order of the parts, of one rank for each."""
        return self.of_parts(self.gather(value))

    def of_parts(self, values: list[T]) -> list[T]:
        """Of the values of all ranks, those of one rank for each part of the batch."""
        return [values[rank] for rank in self._leaders]

    def first(self, work: Callable[[], T]) -> T:
        """The result of rank 0's `work`, or its `ConvoyError`, on every rank; a `RankFailedError` for any other
        exception."""
        if self.num == 1:
            return work()
        result: T | ConvoyError | None = None
        failure: Exception | None = None
        if self.rank == 0:
            try:
                result = work()
            except ConvoyError as error:
                result = error
            except Exception as error:  # the others wait for an answer
                failure = error
                result = Cause.of(error).error(0)
        answer = self.broadcast(result)
        if failure is not None:
            raise failure
        if isinstance(answer, ConvoyError):
            raise answer
        return cast(T, answer)

    def trying(self, what: str, work: Callable[["Ranks"], T]) -> T:
        """This rank's result of `work` that all ranks try together; where one of them fails, all do. All ranks call it.

        `what` is tried, worded to follow "while": `measuring the links`. `work` gets the ranks to talk to meanwhile;
        process groups that it makes end with it, so that nobody waits for a rank that has failed.
        """
        result: T | None = None
        failure: Exception | None = None
        causes: list[Cause | None] = []
        has_ended = False
        name = self.broadcast(uuid.uuid4().hex)
        try:
            with temporary() as groups, alarm(name, groups):
                current.at("")
                result = work(self if self.num == 1 else replace(self, group=everyone()))
                has_ended = True
                causes = self.gather(None)  # before the groups end: somebody may still read its last messages
                groups.failed = any(causes)
        except Exception as error:
            if has_ended:
                raise
            failure = error
            causes = self.gather(Cause.of(error))
        failures = [(cause, rank) for rank, cause in enumerate(causes) if cause is not None]
        if failures:
            first, rank = min(failures, key=lambda item: (item[0].sort, item[1]))
            raise first.error(rank, what) from failure
        return cast(T, result)
