"""What ranks try together: how all of them learn soon that one has failed, of what, and what to change.

A rank that fails leaves the others in collectives. Over gloo and shared memory these get an error as soon as it closes
its end. NCCL's kernels wait on until the time limit of their group, and so does the host, in whatever synchronizes with
them. So a rank that fails says so under a key of the store by which the ranks have met, and a thread of every other
rank aborts the groups that were made for the try (`Alarm`).
"""

import contextlib
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from convoy.comm.groups import Temporary, only_gloo
from convoy.comm.position import current, place_in_words
from convoy.errors import ConvoyError, MachineError, TooLargeError
from convoy.units import size


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


_POLL_S = 0.1


class Alarm:
    """While entered, a rank that leaves with an error calls the others out of what was made for a try.

    Over gloo alone there is nothing to do: closed connections say the same, and torch cannot abort its groups.

    Args:
        name: of the try: the same on all ranks, and of no other try.
        made: what the ranks may wait in.
    """

    def __init__(self, name: str, made: Temporary) -> None:
        self._name, self._made = name, made
        self._over = threading.Event()
        self._store: Store | None = None

    def __enter__(self) -> Self:
        if dist.is_initialized() and not only_gloo():
            world: Any = dist.group.WORLD
            store = world.get_group_store().clone()  # the other one serves one thread at a time
            self._store = PrefixStore(self._name, store)
            self._thread = threading.Thread(target=self._listen, daemon=True, name="convoy-alarm")
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._over.set()
        if self._store is None:
            return
        self._thread.join()
        if error is not None:
            with contextlib.suppress(RuntimeError):  # who keeps the store has ended, and all know it
                self._store.set("failed", "")

    def _listen(self) -> None:
        assert self._store is not None
        with contextlib.suppress(RuntimeError):
            while not self._over.wait(_POLL_S):
                if self._store.check(["failed"]):
                    self._made.abort()
                    return


_LOST_MEMORY, _MISTAKE, _MACHINE, _BROKEN, _CUT_OFF = range(5)
_ENDED = ("closed by peer", "reset by peer", "Broken pipe", "aborted")
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?[KMGTPE]?i?B|\d+ bytes)")
_FREE = re.compile(r"capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")
NEEDS_LESS = "smaller microbatches, a plan over more devices or --precision bf16 need less"


@dataclass(frozen=True)
class Failure:
    """Why a rank has failed; the sort says which of several ranks' failures is the cause of the others'."""

    sort: int
    text: str

    @staticmethod
    def of(error: Exception) -> "Failure":
        """That of this rank, which has just failed."""
        if (needed := lack_of_memory(error)) is not None:
            layer = current.layer.partition("#")[0]
            return Failure(_LOST_MEMORY, (f", in layer {layer}" if layer else "") + needed)
        if isinstance(error, ConvoyError):
            return Failure(_MACHINE if isinstance(error, MachineError) else _MISTAKE, str(error))
        first_line = str(error).partition("\n")[0].rstrip(".")
        cut_off = isinstance(error, RuntimeError) and any(words in str(error) for words in _ENDED)
        return Failure(_CUT_OFF if cut_off else _BROKEN, f"{type(error).__name__}: {first_line}")

    def error(self, rank: int, what: str) -> ConvoyError:
        """For every rank."""
        if self.sort == _MISTAKE:
            return ConvoyError(self.text)
        if self.sort == _MACHINE:
            return MachineError(self.text)
        if self.sort == _LOST_MEMORY:
            return RankFailedError(f"rank {rank} ran out of memory while {what}{self.text}; {NEEDS_LESS}", True)
        return RankFailedError(f"rank {rank} failed while {what} ({self.text}): -v shows where")


def lack_of_memory(error: BaseException) -> str | None:
    """What was asked for in vain, to end a sentence: `: it asked for 2.00 GiB where 1.02 GiB of 79.10 GiB were free`.

    Empty where the error does not say; None where it says anything else than that memory lacks.
    """
    text = str(error)
    if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not (
        isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY)
    ):
        return None
    asked, free = _ASKED.search(text), _FREE.search(text)
    if asked is None:
        return ""
    number, _, unit = asked[1].partition(" ")
    given = f" where {free[2]} of {free[1]} were free" if free is not None else ""
    return f": it asked for {size(int(number)) if unit == 'bytes' else asked[1]}{given}"


@contextmanager
def memory_explained(rank: int, num_ranks: int, has_gone_well: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Say in one sentence that the memory of this rank's device does not do, where, and what needs less.

    Args:
        rank: this one.
        num_ranks: of all.
        has_gone_well: whether the same went well before, so that it may do so again.

    Raises:
        TooLargeError: it does not.
        MachineError: it did before.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        needed = lack_of_memory(error)
        if needed is None:
            raise
        who = f"rank {rank}" if num_ranks > 1 else "the device"
        layer = current.layer or _layer_of(error)
        where = place_in_words(current.update, current.part, layer)
        where += f", layer {layer}" if layer and layer not in where else ""
        sentence = f"{who} ran out of memory ({where}){needed}; {NEEDS_LESS}"
        raise (MachineError if has_gone_well() else TooLargeError)(sentence) from error


def _layer_of(error: BaseException) -> str:
    """The innermost layer in whose forward pass an exception was raised; empty where it was in none."""
    inner = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [one for one in inner if isinstance(one, nn.Module)]
    names = {id(layer): name for name, layer in modules[0].named_modules()} if modules else {}
    return next((names[id(one)] for one in reversed(modules) if id(one) in names), "")
