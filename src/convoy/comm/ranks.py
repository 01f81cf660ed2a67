"""The ranks of a run, of a plan in the making or of a measurement: this rank's place among them, and what they
exchange.

Objects travel as JSON, packed into tensors on the CPU: for what is small and rare. A group of None is one rank alone.
All ranks of a group call the same function.
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from convoy.comm.alarm import Alarm, Cause
from convoy.comm.collectives import Group, all_gather, broadcast, gather_ints, place, size
from convoy.comm.groups import everyone, forget, temporary
from convoy.comm.joining import num_local
from convoy.comm.objects import from_json, to_json
from convoy.comm.position import current
from convoy.errors import ConvoyError
from convoy.plans.mesh import Axes, Mesh

T = TypeVar("T")


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
        return tuple(map(max, *gather_ints(numbers, self.group), numbers))

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
            with temporary() as groups, Alarm(name, groups):
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
            forget()
            first, rank = min(failures, key=lambda item: (item[0].sort, item[1]))
            raise first.error(rank, what) from failure
        return cast(T, result)
