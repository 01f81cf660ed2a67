"""Where this process is in its training: kept all the time, as it is asked for when nothing moves any more.

A GPU is somewhere else: the host runs ahead of it, and does not notice when it waits for the other ranks. So what it
was given to exchange is numbered, by group: who has given it less than the others holds them up.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

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
"""What a rank does; `reading` is of a checkpoint, `gradient` their exchange, `rest` the loss and all else."""


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
    """For people: `update 7, forward pass of layer conv1`; a number behind `#` in a layer tells its calls apart."""
    if part in _OUTSIDE:
        return _OUTSIDE[part]
    of_layer = f" of layer {layer.partition('#')[0]}" if layer else ""
    return f"update {update + 1:,}, {_WORDS.get(part, part)}{of_layer}"


@dataclass(slots=True)
class Position:
    """The last thing that began; one for each process.

    Attributes:
        update: weight updates done before it.
        part: of the update.
        layer: the layer that it belongs to; empty for none.
        collective: what this rank waits for others in; empty where it does not wait.
        moved: when it began, in seconds of `time.monotonic`.
        waited_s: seconds waited for other ranks so far.
        late: while samples are waited for, who has not delivered which, in words; asked from any thread.
    """

    update: int = 0
    part: Part = "start"
    layer: str = ""
    collective: str = ""
    moved: float = 0.0
    waited_s: float = 0.0
    late: Callable[[], str] | None = None

    def to(self, part: Part) -> None:
        """Another part begins, outside of all layers."""
        self.part = part
        self.layer = ""
        self.moved = time.monotonic()

    def at(self, layer: str) -> None:
        """A layer begins."""
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
    """A collective that a device was given.

    Attributes:
        number: of those of its group, from 1.
        name: what it is: `all reduce`.
        layer: the layer that it belongs to; empty for none.
        done: whether the device is through with it; asked from any thread.
    """

    number: int
    name: str
    layer: str
    done: Callable[[], bool]


GroupState = tuple[list[int], int, list[tuple[int, str, str]]]
"""The ranks of a group, how many collectives this one has enqueued there, and number, name and layer of the first few
that its device is not through with."""
_SHOWN = 16


@dataclass(slots=True)
class _Group:
    """What a device was given in one group."""

    members: list[int]
    count: int = 0
    open: deque[Enqueued] = field(default_factory=deque)


@dataclass
class Ledger:
    """The collectives that devices were given, by the names of their groups; one for each process."""

    _groups: dict[str, _Group] = field(default_factory=dict)

    def add(self, group: str, members: Callable[[], Sequence[int]], name: str, done: Callable[[], bool]) -> None:
        """One more of a group with these members, in the numbering of all; those before it are forgotten as far as they
        are done."""
        given = self._groups.get(group)
        if given is None:
            given = self._groups[group] = _Group(list(members()))
        given.count += 1
        while given.open and given.open[0].done():
            given.open.popleft()
        given.open.append(Enqueued(given.count, name, current.layer, done))

    def forget(self, group: str) -> None:
        """A group has ended."""
        self._groups.pop(group, None)

    def clear(self) -> None:
        """All groups have ended."""
        self._groups.clear()

    def state(self) -> dict[str, GroupState]:
        """What there is, by the names of groups; from any thread, while others add and forget."""
        found: dict[str, GroupState] = {}
        for name, given in list(self._groups.items()):
            left = islice((one for one in list(given.open) if not one.done()), _SHOWN)
            rows = [(one.number, one.name, one.layer.partition("#")[0]) for one in left]
            found[name] = (given.members, given.count, rows)
        return found


ledger = Ledger()
