"""Ends a run in which nothing moves any more, with a sentence on who holds it up and where every rank is; and names a
rank that is slow, for which the others wait.

A thread of each rank writes the rank's position into the store by which the ranks have met, every few seconds. Where
its own rank has not moved for as long as the user allows, it reads those of the others, says what it knows, and ends
the process: the main thread may be in a collective, which nothing interrupts. Nor does it end a rank that waits for one
that moves.

While the run is set up nobody can say how long a rank may take for a step of its own: pictures are counted, plans are
searched, networks compiled. Then only a rank ends that waits for others, shortly before its collective would. A single
rank, for which nobody waits, ends only while it waits for data itself.
"""

import contextlib
import json
import os
import socket
import statistics
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Self

from torch.distributed import Store  # type: ignore[attr-defined]

from convoy.comm.joining import Files, board
from convoy.comm.position import GroupState, Ledger, Position, current, ledger, place_in_words
from convoy.comm.ranks import Ranks
from convoy.launch.host import HostWatch
from convoy.recipe.schema import in_words
from convoy.training.division import Division

TIMEOUT_S = 300.0  # seconds without any movement that a run is given, unless the user says otherwise
_LIMIT_S, _BEFORE = 600.0, 0.9


@dataclass(frozen=True)
class RankState:
    """A rank as it has last written itself down for the others."""

    name: str  # with its stage and host
    place: str  # where it is, in words
    update: int
    waits: bool  # for other ranks
    still_s: float  # since it moved, when it wrote that
    count: int  # how often it has written
    # What it has given its GPU to exchange, by names of groups.
    groups: dict[str, GroupState] = field(default_factory=dict)
    heard: float = field(default_factory=time.monotonic)  # when it wrote that, as its reader has noticed

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.heard

    def works(self, timeout_s: float) -> bool:
        """Whether it moves, and waits for nobody."""
        return not self.waits and self.still_s + self.silent_s <= timeout_s


def collective_limit_s(timeout_s: float) -> float:
    """Seconds that a collective may take where the user allows so many without movement: a watchdog speaks before."""
    return max(_LIMIT_S, 2 * timeout_s)


def explain(
    rank: int,
    ranks: Mapping[int, RankState],
    timeout_s: float,
    silence_s: float,
    num_ranks: int,
    option: str = " (--timeout)",
) -> str:
    """The sentence of a rank that has not moved for `timeout_s`, and below it where all are.

    A rank that has written nothing for `silence_s` does not run; `option` says how long one may stand still.
    """
    own_state = ranks[rank]
    if num_ranks == 1:
        return (
            f"nothing has moved for {in_words(timeout_s)}{option}: {own_state.place}; see whether the file system of "
            "the data answers, then go on with --resume"
        )
    missing = [other for other in range(num_ranks) if other not in ranks]
    silent = [other for other, state in ranks.items() if other != rank and state.silent_s > silence_s]
    late = _late(ranks)
    busy = [other for other, state in ranks.items() if not state.waits and other not in silent]
    if missing or silent:
        held = f"held up by {_named([*silent, *missing], ranks)}, not heard of any more"
    elif late is not None:
        members, why = late
        late_ranks = [other for other in members if other != rank]
        held = f"held up by {_named(late_ranks, ranks)}, {why}" if late_ranks else f"{why}: the others wait for it"
    elif busy == [rank]:
        held = "and the others wait for it"
    elif busy:
        held = f"held up by {_named(busy, ranks)}"
    else:
        earliest = min(state.update for state in ranks.values())
        behind = [other for other, state in ranks.items() if state.update == earliest]
        where = f", {_named(behind, ranks)} behind the others" if len(behind) < len(ranks) else ""
        held = f"while all wait for each other{where}"
    lines = [
        f"{own_state.name} has not moved for {in_words(timeout_s)}{option}: {own_state.place}, {held}",
        "last positions:",
    ]
    for other in range(num_ranks):
        if other not in ranks:
            lines.append(f"  rank {other}: nothing is known of it")
            continue
        state = ranks[other]
        since = f"not heard of for {in_words(state.silent_s)}" if other in silent else f"for {in_words(state.still_s)}"
        lines.append(f"  {state.name}: {state.place} ({since})")
    return "\n".join(lines)


def _late(ranks: Mapping[int, RankState]) -> tuple[list[int], str] | None:
    """Who holds the others' GPUs up, and by what: the ranks that have enqueued the fewest collectives of a group, or
    whose GPU alone does not finish one, first those that wait for nobody themselves. None where no GPU waits."""
    late: list[tuple[list[int], str]] = []
    for name in dict.fromkeys(name for state in ranks.values() for name in state.groups):
        members = next(state.groups[name][0] for state in ranks.values() if name in state.groups)
        states = {rank: ranks[rank].groups.get(name, (members, 0, [])) for rank in members if rank in ranks}
        waiting = [rank for rank, (_, _, still) in states.items() if still]
        if not waiting:
            continue
        least = min(count for _, count, _ in states.values())
        behind = [rank for rank, (_, count, _) in states.items() if count == least]
        if len(behind) < len(states):
            rows = [row for rank in waiting for row in states[rank][2] if row[0] > least]
            late += [(behind, f"which has not begun {_collective(*min(rows))}")] if rows else []
        elif len(waiting) < len(states):
            late.append((waiting, f"whose GPU does not finish {_collective(*states[waiting[0]][2][0])}"))
    free = [(members, why) for members, why in late if not all(_first(ranks[rank].groups) for rank in members)]
    return next(iter([*free, *late]), None)


def _collective(number: int, name: str, layer: str) -> str:
    return f"{name} number {number}" + (f" of layer {layer}" if layer else "")


def _first(groups: Mapping[str, GroupState]) -> str:
    """The first collective that a rank's GPU is not through with; empty where there is none."""
    return next((_collective(*still[0]) for _, _, still in groups.values() if still), "")


def say_and_end(sentence: str) -> None:
    """What to do where nobody has said otherwise."""
    print(f"convoy: {sentence}", file=sys.stderr, flush=True)
    os._exit(1)


class Watchdog:
    """Watches over this rank while entered. All ranks make it, at the same time, with the store by which they have met
    (None on one device).

    After `timeout_s` without movement a thread calls `end` with a sentence, which should end the process. `position` is
    that of this process, `given` what its GPU was given to exchange. It is patient while the run is still being set up:
    until `begin`, it ends only a rank that waits for others.
    """

    def __init__(
        self,
        ranks: Ranks,
        store: Store | None,
        end: Callable[[str], None] = say_and_end,
        timeout_s: float = TIMEOUT_S,
        position: Position = current,
        given: Ledger = ledger,
    ) -> None:
        self.timeout_s = timeout_s
        self._patient = True
        self._stage = 0
        self._rank, self._num = ranks.rank, ranks.num
        self.end, self._position, self._given = end, position, given
        self._interval_s = min(5.0, max(0.2, timeout_s / 10))
        self._store: Files | Store | None = None
        self._count = 0
        self._stop = threading.Event()
        self._known: dict[int, RankState] = {}
        self._groups: dict[str, GroupState] = {}
        if store is None or ranks.num == 1:
            return
        prefix = ranks.broadcast(uuid.uuid4().hex)
        self._store = board(store, prefix, timedelta(seconds=max(1.0, 2 * self._interval_s)), timeout_s)
        self._write()
        ranks.barrier()

    def __enter__(self) -> Self:
        self._position.moved = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="convoy-watchdog")
        self._thread.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._stop.set()
        self._thread.join(self._interval_s)

    def begin(self, stage: int = 0) -> None:
        """The run is set up: from now on the user's time counts. Stages of a network count from 1."""
        self._stage = stage
        self._position.moved = time.monotonic()
        self._patient = False

    @contextlib.contextmanager
    def ending_by(self, end: Callable[[str], None]) -> Iterator[None]:
        """While entered, another function is called with the sentence."""
        before, self.end = self.end, end
        try:
            yield
        finally:
            self.end = before

    def _watch(self) -> None:
        while not self._is_over():
            still_s = time.monotonic() - self._position.moved
            try:
                self._write()
                if still_s > min(2 * self._interval_s, self.timeout_s):
                    self._read()
            except (RuntimeError, OSError):  # the host of the store is not to be reached, or the file is gone
                self._known[self._rank] = self._own()
            still_s = time.monotonic() - self._position.moved
            if self._is_stuck(still_s) and not self._stop.is_set():
                self.end(self._sentence(still_s))
                return

    def _is_over(self) -> bool:
        """Wait until it is time to look, or there is nothing to look at any more."""
        before = time.monotonic()
        is_over = self._stop.wait(self._interval_s)
        if time.monotonic() - before > 3 * self._interval_s + 1:  # this process was stopped itself, as by Ctrl-Z
            self._position.moved = time.monotonic()
        return is_over

    def _is_stuck(self, still_s: float) -> bool:
        if self._num == 1:
            return still_s > self.timeout_s and self._position.late is not None and not self._patient
        waits = self._own().waits
        if self._patient:
            return waits and still_s > _BEFORE * collective_limit_s(self.timeout_s)
        states = [state for rank, state in self._known.items() if rank != self._rank]
        return still_s > self.timeout_s and not (waits and any(state.works(self.timeout_s) for state in states))

    def _own(self) -> RankState:
        at, collective, late = self._position, self._position.collective, ""
        still_s = time.monotonic() - at.moved
        # Only what NCCL's threads have completed is read: to ask a CUDA event keeps Python's lock, and stands still
        # while another thread holds CUDA's, in the very case that this is for.
        with contextlib.suppress(Exception):  # of the device; the main thread meets it too
            self._groups = self._given.state()
        if still_s > 2 * self._interval_s:
            with contextlib.suppress(Exception):  # the batch has just come
                late = f" ({at.late()})" if at.late is not None else ""
            # a host that moves is only ahead of its GPU
            if not collective and (unfinished := _first(self._groups)):
                collective = f"{unfinished} on the GPU"
        name = f"rank {self._rank}{f' (stage {self._stage})' if self._stage else ''} on host {socket.gethostname()}"
        what = f" ({collective})" if collective != "wait" else ""
        waits = f", waiting for other ranks{what}" if collective else ""
        place = f"{place_in_words(at.update, at.part, at.layer)}{late}{waits}"
        return RankState(name, place, at.update, bool(collective), still_s, self._count, self._groups)

    def _write(self) -> None:
        if self._store is None:
            return
        self._count += 1
        self._store.set(str(self._rank), json.dumps(asdict(self._own())))

    def _read(self) -> None:
        if self._store is None:
            return
        for rank, text in enumerate(self._store.multi_get([str(rank) for rank in range(self._num)])):
            state = RankState(**{**json.loads(text), "heard": time.monotonic()})
            if rank not in self._known or self._known[rank].count != state.count:
                self._known[rank] = state

    def _sentence(self, still_s: float) -> str:
        known = {**self._known, self._rank: self._own()}
        silence_s = 3 * self._interval_s + max(1.0, 2 * self._interval_s)
        return explain(self._rank, known, still_s, silence_s, self._num, "" if self._patient else " (--timeout)")


def _named(ranks: Sequence[int], known: Mapping[int, RankState]) -> str:
    parts = [known[rank].name if rank in known else f"rank {rank}" for rank in sorted(ranks)]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


STRETCH_S, STRETCH_UPDATES = 2.0, 10  # the work that is compared takes at least so long, and so many updates
RATIO = 1.3  # a slow rank works so many times as long as the median of the others
LOSS_SHARE = 0.1  # the share of an update that all other ranks must lose by it
# Stretches in which the same rank must be slow before it is named; then again after twice as many, and so on.
IN_A_ROW = 3


class SlowRanks:
    """Compares what the ranks need for the same number of samples, without their waits for each other. All ranks make
    it, and the same calls. A rank that is slow looks at what else its host does, which takes it 2 ms a time."""

    def __init__(self, ranks: Ranks) -> None:
        everyone = ranks.gather((ranks.sample_rank, socket.gethostname()))
        self._parts, self._hosts = [part for part, _ in everyone], [host for _, host in everyone]
        self._ranks = ranks
        self._watch: HostWatch | None = None  # of this rank's host since it is slow
        # Ranks that do the same work: those in the same place of their model groups.
        self._places: dict[int, list[int]] = defaultdict(list)
        for rank, part in enumerate(self._parts):
            self._places[self._parts[:rank].count(part)].append(rank)
        self._begin()
        # Who was slow in the last stretch, in how many in a row, and after how many it is said.
        self._slow: tuple[int | None, int, int] = (None, 0, IN_A_ROW)

    def _begin(self) -> None:
        self._seconds = [0.0] * len(self._parts)
        self._updates, self._took_s = 0, 0.0

    def look(self, own_s: Sequence[float], updates: int, took_s: float, division: Division) -> str | None:
        """Take up some updates, which took all ranks together `took_s`, and give a sentence if there is anything to
        say. `own_s` are seconds of every rank's own work in them.
        """
        if len(self._parts) == 1:
            return None
        self._seconds = [a + b for a, b in zip(self._seconds, own_s, strict=True)]
        self._updates += updates
        self._took_s += took_s
        if self._updates < STRETCH_UPDATES or self._took_s < STRETCH_S:
            return None
        update_s, update_of_all_s = [s / self._updates for s in self._seconds], self._took_s / self._updates
        self._begin()
        samples = [len(division.positions(part)) for part in self._parts]
        per_sample = [s / n if n else 0.0 for s, n in zip(update_s, samples, strict=True)]
        losses = []
        for place in self._places.values():
            busy = [rank for rank in place if samples[rank]]
            if len(busy) > 1:
                worst = max(busy, key=per_sample.__getitem__)
                middle = statistics.median_low(per_sample[rank] for rank in busy if rank != worst)
                losses.append(((per_sample[worst] - middle) * samples[worst], worst, middle))
        lost_s, slowest, median_s = max(losses, default=(0.0, 0, 0.0))
        if median_s == 0 or per_sample[slowest] < RATIO * median_s or lost_s < LOSS_SHARE * update_of_all_s:
            self._slow, self._watch = (None, 0, IN_A_ROW), None
            return None
        if slowest != self._ranks.rank:
            self._watch = None
        elif self._watch is None:
            self._watch = HostWatch()
        before, times, due = self._slow
        times, due = (times + 1, due) if before == slowest else (1, IN_A_ROW)
        self._slow = (slowest, times, 2 * due if times == due else due)
        if times < due:
            return None
        load = self._ranks.gather(None if self._watch is None else self._watch.read())[slowest]
        advice = "--shares auto gives it less"
        if load is not None and load.is_shared:
            advice = f"other processes there keep {load.occupation}"
        return (
            f"rank {slowest} on host {self._hosts[slowest]} is slow: {1e3 * update_s[slowest]:.3g} ms of an update, "
            f"{per_sample[slowest] / median_s:.2g} times as long as others for as much; {advice}"
        )
