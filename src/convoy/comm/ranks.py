"""The ranks of a run, of a plan in the making or of a measurement: this one's place among them, and what they tell
each other.

Objects are packed into tensors on the CPU, as JSON, which is for what is small and rare. A group of None is one rank
alone. All ranks of a group call the same function.
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
    """The named tensors of rank 0, on the CPU; others give None.

    With several ranks they have shapes alone, and each is sent when it is asked for (`received`), so that no rank has
    more than one of them at a time. All ranks ask for the same ones in the same order.
    """
    if group is None:
        assert tensors is not None
        return tensors
    shapes = {name: (t.shape, t.dtype) for name, t in tensors.items()} if tensors is not None else None

    def sent(name: str, like: Tensor) -> Tensor:
        whole = torch.empty_like(like, device="cpu")
        return broadcast(whole if tensors is None else whole.copy_(tensors[name]), group)

    remote: dict[str, Tensor] = {}
    for name, (shape, dtype) in (broadcast_object(shapes, group) or {}).items():
        remote[name] = torch.empty(shape, dtype=dtype, device="meta")
        vars(remote[name])[_SENDING] = partial(sent, name, remote[name])
    return remote


_SENDING = "_convoy_sending"


def received(value: T) -> T:
    """The numbers of a tensor of `broadcast_tensors`, in memory of its own; all else is given back as it is."""
    return cast(T, vars(value)[_SENDING]()) if isinstance(value, Tensor) and _SENDING in vars(value) else value


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
    return torch.frombuffer(bytearray(to_json(value)), dtype=torch.uint8)


def _unpack(packed: Tensor) -> Any:
    return from_json(packed.numpy().tobytes())


@dataclass
class Ranks:
    """This rank among all: who does what once for all, and what they tell each other; alone without a process group.

    Attributes:
        rank: number of this one, from 0.
        num: how many ranks there are.
        on_host: how many of them share this host.
        group: process group through which they talk.
        sample_rank: place of this rank on the plan's sample axes: which part of every batch it computes.
        num_sample_ranks: how many parts a batch has.
        is_group_leader: whether this rank speaks for its model group, whose ranks compute the same samples together.
    """

    rank: int = 0
    num: int = 1
    on_host: int = 1
    group: Group = field(default=None, repr=False)
    sample_rank: int = 0
    num_sample_ranks: int = 1
    is_group_leader: bool = True
    _leaders: list[int] = field(default_factory=lambda: [0], repr=False)

    @staticmethod
    def here() -> "Ranks":
        """All ranks that have joined; each of them calls it."""
        group = everyone()
        num = size(group)
        return Ranks(place(group), num, num_local(num), group)

    def first_of(self, reason: str | None) -> str | None:
        """Of what ranks have to say, the first; None where none has. All ranks call it."""
        return next((said for said in self.gather(reason) if said is not None), None)

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
        """The place on a mesh that each rank takes while it profiles: spread out, where the mesh has more."""
        return [rank * mesh.num_devices // self.num for rank in range(self.num)]

    def barrier(self) -> None:
        """Wait for all."""
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
        """The value of rank 0."""
        return broadcast_object(value, self.group)

    def broadcast_tensors(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """The named tensors of rank 0, on the CPU; others give None."""
        return broadcast_tensors(tensors, self.group)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order."""
        return gather_objects(value, self.group)

    def gather_samples(self, value: T) -> list[T]:
        """The values for each part of the batch, in the order of the parts; model groups speak once."""
        return self.of_parts(self.gather(value))

    def of_parts(self, values: list[T]) -> list[T]:
        """Of the values of all ranks, those of one rank for each part of the batch."""
        return [values[rank] for rank in self._leaders]

    def first(self, work: Callable[[], T]) -> T:
        """What rank 0 finds, on every rank, and so its mistake; else a `RankFailedError` says what it failed with."""
        if self.num == 1:
            return work()
        found: T | ConvoyError | None = None
        failure: Exception | None = None
        if self.rank == 0:
            try:
                found = work()
            except ConvoyError as error:
                found = error
            except Exception as error:  # the others wait for an answer
                failure = error
                found = Cause.of(error).error(0)
        known = self.broadcast(found)
        if failure is not None:
            raise failure
        if isinstance(known, ConvoyError):
            raise known
        return cast(T, known)

    def trying(self, what: str, work: Callable[["Ranks"], T]) -> T:
        """What this rank finds in what all try together; where one of them fails, all do. All ranks call it.

        `what` is tried, as it follows "while": `measuring the links`. `work` is given the ranks to talk to meanwhile.
        Groups that it makes end with it, so that nobody waits for a rank that has failed.
        """
        found: T | None = None
        failure: Exception | None = None
        said: list[Cause | None] = []
        done = False
        name = self.broadcast(uuid.uuid4().hex)
        try:
            with temporary() as made, Alarm(name, made):
                current.at("")
                found = work(self if self.num == 1 else replace(self, group=everyone()))
                done = True
                said = self.gather(None)  # before the groups end: somebody may still read its last messages
                made.failed = any(said)
        except Exception as error:
            if done:
                raise
            failure = error
            said = self.gather(Cause.of(error))
        failed = [(one, rank) for rank, one in enumerate(said) if one is not None]
        if failed:
            forget()
            first, rank = min(failed, key=lambda each: (each[0].sort, each[1]))
            raise first.error(rank, what) from failure
        return cast(T, found)
