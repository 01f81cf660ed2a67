"""The ranks that are there while a plan is made: those that will train, or one process by itself."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import torch

from convoy.comm import messages
from convoy.comm.collectives import Group, gather_ints, place, size
from convoy.comm.groups import everyone, temporary
from convoy.errors import ConvoyError, MachineError
from convoy.plans.mesh import Mesh

T = TypeVar("T")


class RankFailedError(MachineError):
    """What all ranks tried together failed on one of them.

    Attributes:
        out_of_memory: whether for want of memory.
    """

    def __init__(self, message: str, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.out_of_memory)


@dataclass(frozen=True)
class Ranks:
    """Who measures.

    Attributes:
        rank: this one.
        num: how many there are.
        on_host: how many of them share this host.
        group: through which they talk.
    """

    rank: int = 0
    num: int = 1
    on_host: int = 1
    group: Group = field(default=None, repr=False)

    @staticmethod
    def here(on_host: int | None = None) -> "Ranks":
        """Those that have joined; all of them call it. Who shares a host is what the launcher says, unless given."""
        group = everyone()
        return Ranks(place(group), size(group), on_host or _on_host(size(group)), group)

    def places(self, mesh: Mesh) -> list[int]:
        """The place on a mesh that each of them takes while it profiles: spread out, where the mesh has more."""
        return [rank * mesh.num_devices // self.num for rank in range(self.num)]

    def barrier(self) -> None:
        """Wait for all."""
        gather_ints([0], self.group)

    def agree(self, done: bool) -> bool:
        """Whether all say so."""
        return all(row[0] for row in gather_ints([int(done)], self.group))

    def broadcast(self, value: T) -> T:
        """What rank 0 has."""
        return messages.broadcast_object(value, self.group)

    def gather(self, value: T) -> list[T]:
        """What every rank says."""
        return messages.gather_objects(value, self.group)

    def first(self, work: Callable[[], T]) -> T:
        """What rank 0 finds, on every rank.

        Raises:
            ConvoyError: it was rank 0's mistake.
            RuntimeError: rank 0 failed otherwise; there, what it failed with.
        """
        if self.num == 1:
            return work()
        found: T | ConvoyError | RuntimeError | None = None
        failure: Exception | None = None
        if self.rank == 0:
            try:
                found = work()
            except ConvoyError as error:
                found = error
            except Exception as error:  # the others wait for an answer
                failure = error
                found = RuntimeError(f"rank 0 failed: {type(error).__name__}: {error}")
        known = self.broadcast(found)
        if failure is not None:
            raise failure
        if isinstance(known, ConvoyError | RuntimeError):
            raise known
        return cast(T, known)

    def trying(self, what: str, work: Callable[["Ranks"], T]) -> T:
        """What this rank finds in what all try together; where one of them fails, all do. All ranks call it.

        Args:
            what: is tried, as it follows "while": `measuring the links`.
            work: is given the ranks to talk to meanwhile. Groups that it makes end with it, so that nobody waits for a
                rank that has failed.

        Raises:
            RankFailedError: one of them has failed.
            ConvoyError: it was a mistake of the user.
        """
        found: T | None = None
        failure: Exception | None = None
        said: list[_Failure | None] = []
        done = False
        try:
            with temporary():
                found = work(self if self.num == 1 else replace(self, group=everyone()))
                done = True
                said = self.gather(None)  # before the groups end: somebody may still read its last messages
        except Exception as error:
            if done:
                raise
            failure = error
            said = self.gather(_Failure.of(error))
        failed = [(one, rank) for rank, one in enumerate(said) if one is not None]
        if failed:
            first, rank = min(failed, key=lambda each: (each[0].sort, each[1]))
            raise first.error(rank, what) from failure
        return cast(T, found)


_LOST_MEMORY, _MISTAKE, _MACHINE, _BROKEN, _CUT_OFF = range(5)
_ENDED = ("closed by peer", "reset by peer", "Broken pipe", "aborted")
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


@dataclass(frozen=True)
class _Failure:
    """Why a rank has failed; the sort says which of several ranks' failures is the cause of the others'."""

    sort: int
    text: str

    @staticmethod
    def of(error: Exception) -> "_Failure":
        first_line = str(error).partition("\n")[0].rstrip(".")
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
            words in str(error) for words in _NO_MEMORY if isinstance(error, RuntimeError)
        ):
            return _Failure(_LOST_MEMORY, first_line)
        if isinstance(error, ConvoyError):
            return _Failure(_MACHINE if isinstance(error, MachineError) else _MISTAKE, str(error))
        cut_off = isinstance(error, RuntimeError) and any(words in str(error) for words in _ENDED)
        return _Failure(_CUT_OFF if cut_off else _BROKEN, f"{type(error).__name__}: {first_line}")

    def error(self, rank: int, what: str) -> ConvoyError:
        """For every rank."""
        if self.sort == _MISTAKE:
            return ConvoyError(self.text)
        if self.sort == _MACHINE:
            return MachineError(self.text)
        if self.sort == _LOST_MEMORY:
            return RankFailedError(f"rank {rank} ran out of memory while {what}", True)
        return RankFailedError(f"rank {rank} failed while {what} ({self.text}): -v shows where")


def _on_host(ranks: int) -> int:
    """How many of the ranks share this host."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and 0 < int(text) <= ranks else ranks
