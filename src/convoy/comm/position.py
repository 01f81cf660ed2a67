"""Where this process is in its training, and memory that does not suffice there.

Positions are kept all the time, as they are asked for only once nothing moves any more. The host runs ahead of its GPU
and does not notice when that waits for other ranks. So the collectives enqueued on it are numbered by group: a rank
that has enqueued fewer than the others holds them up.
"""

import re
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import torch
from torch import nn

from convoy.errors import MachineError, RankFailedError, TooLargeError
from convoy.units import size

# what a rank does; `reading` is of a checkpoint, `gradient` the exchange of gradients, `rest` the loss and all else
Part = Literal[
    "start",
    "reading",
    "data",
    "input",
    "forward",
    "backward",
    "gradient",
    "update",
    "rest",
    "evaluation",
    "checkpoint",
    "weights",
    "report",
]
_OUTSIDE = {
    "start": "before the first update",
    "reading": "reading a checkpoint",
    "weights": "writing the weights",
    "report": "writing the report",
}
_WORDS = {
    "data": "waiting for data",
    "input": "moving its data to the device",
    "forward": "forward pass",
    "backward": "backward pass",
    "gradient": "exchange of gradients",
    "update": "optimizer",
    "rest": "between the parts of the update",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
}


def place_in_words(update: int, part: str, layer: str) -> str:
    """For people: `update 7, forward pass of layer conv1`; the number behind `#` that tells a layer's calls apart is
    left out."""
    if part in _OUTSIDE:
        return _OUTSIDE[part]
    of_layer = f" of layer {layer.partition('#')[0]}" if layer else ""
    return f"update {update + 1:,}, {_WORDS.get(part, part)}{of_layer}"


@dataclass(slots=True)
class Position:
    """The last thing that began in this process."""

    update: int = 0  # weight updates done before it
    part: Part = "start"
    layer: str = ""  # empty outside of layers
    collective: str = ""  # what this rank waits for others in; empty where it does not wait
    moved: float = 0.0  # when it began, in seconds of `time.monotonic`
    waited_s: float = 0.0  # for other ranks so far
    # while samples are waited for: who has not delivered which, in words; called from any thread
    late: Callable[[], str] | None = None

    def to(self, part: Part) -> None:
        self.part = part
        self.layer = ""
        self.moved = time.monotonic()

    def at(self, layer: str) -> None:
        self.layer = layer
        self.moved = time.monotonic()

    @contextmanager
    def waiting_for_samples(self, late: Callable[[], str]) -> Iterator[None]:
        """While entered, samples are waited for, from a process or a file system that may not answer."""
        self.late = late
        try:
            yield
        finally:
            self.late = None


current = Position()


@dataclass(slots=True)
class Enqueued:
    """A collective that was enqueued on a device."""

    number: int  # among those of its group, from 1
    name: str  # such as `all reduce`
    layer: str  # empty outside of layers
    done: Callable[[], bool]  # whether the device has finished it; called from any thread


# The ranks of a group, how many collectives this one has enqueued there, and number, name and layer of the first few
# that its device has not finished
GroupState = tuple[list[int], int, list[tuple[int, str, str]]]
_SHOWN = 16


@dataclass(slots=True)
class _Group:
    """What was enqueued on a device in one group."""

    members: list[int]
    count: int = 0
    open: deque[Enqueued] = field(default_factory=deque)


@dataclass
class Ledger:
    """The collectives enqueued on devices, by the names of their groups; one ledger for each process."""

    _groups: dict[str, _Group] = field(default_factory=dict)

    def add(self, group: str, members: Callable[[], Sequence[int]], name: str, done: Callable[[], bool]) -> None:
        """Number and note one more collective of a group with these members, and drop the finished ones at the
        front."""
        entries = self._groups.get(group)
        if entries is None:
            entries = self._groups[group] = _Group(list(members()))
        entries.count += 1
        while entries.open and entries.open[0].done():
            entries.open.popleft()
        entries.open.append(Enqueued(entries.count, name, current.layer, done))

    def forget(self, group: str) -> None:
        self._groups.pop(group, None)

    def clear(self) -> None:
        self._groups.clear()

    def state(self) -> dict[str, GroupState]:
        """The state of every group by its name; called from any thread, while others add and forget."""
        states: dict[str, GroupState] = {}
        for name, entries in list(self._groups.items()):
            unfinished = islice((entry for entry in list(entries.open) if not entry.done()), _SHOWN)
            rows = [(entry.number, entry.name, entry.layer.partition("#")[0]) for entry in unfinished]
            states[name] = (entries.members, entries.count, rows)
        return states


ledger = Ledger()


_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?[KMGTPE]?i?B|\d+ bytes)")
_FREE = re.compile(r"capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")
NEEDS_LESS = "smaller microbatches, a plan over more devices or --precision bf16 need less"


def lack_of_memory(error: BaseException) -> str | None:
    """What was asked for in vain, to end a sentence: `: it asked for 2.00 GiB where 1.02 GiB of 79.10 GiB were free`.
    Empty where the error does not say; None where it is about anything but memory."""
    text = str(error)
    if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not (
        isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY)
    ):
        return None
    request, free = _ASKED.search(text), _FREE.search(text)
    if request is None:
        return ""
    number, _, unit = request[1].partition(" ")
    of_memory = f" where {free[2]} of {free[1]} were free" if free is not None else ""
    return f": it asked for {size(int(number)) if unit == 'bytes' else request[1]}{of_memory}"


@contextmanager
def memory_explained(rank: int, num_ranks: int, has_gone_well: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Say in one sentence that this rank's device ran out of memory, where, and what needs less: as a mistake, or as
    the machine's failure where the same `has_gone_well` before and may do so again."""

    def kind() -> type[MachineError | TooLargeError]:
        return MachineError if has_gone_well() else TooLargeError

    try:
        yield
    except RankFailedError as error:  # says all already
        if not error.out_of_memory:
            raise
        raise kind()(str(error)) from error
    except (RuntimeError, MemoryError) as error:
        needed = lack_of_memory(error)
        if needed is None:
            raise
        who = f"rank {rank}" if num_ranks > 1 else "the device"
        layer = current.layer or _layer_of(error)
        where = place_in_words(current.update, current.part, layer)
        where += f", layer {layer}" if layer and layer not in where else ""
        sentence = f"{who} ran out of memory ({where}){needed}; {NEEDS_LESS}"
        raise kind()(sentence) from error


def _layer_of(error: BaseException) -> str:
    """The innermost layer in whose forward pass an exception was raised; empty where it was in none."""
    selves = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [module for module in selves if isinstance(module, nn.Module)]
    names = {id(layer): name for name, layer in modules[0].named_modules()} if modules else {}
    return next((names[id(module)] for module in reversed(modules) if id(module) in names), "")
