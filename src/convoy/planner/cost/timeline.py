"""The engine's own time in a predicted update, apart from the optimizer's.

The tasks of a step: what runs on which stream of which rank, for how long, and after what.

When each task of a step runs: a simulation of streams with dependencies, meetings and contention.

Messages take cycles from what computes on their rank, by their `cpu_share`; messages on several streams of one rank
share its way out evenly.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

Stream = Literal["compute", "transfers", "gradients"]
"""`transfers` carries what layers wait for, `gradients` what is added while others compute."""

Kind = Literal["around", "forward", "backward", "copy", "transfer", "gradient", "update"]
"""What a task is for. `around`: input and loss, outside of the network. `copy`: packing and adding on the rank itself,
for the sake of what is sent. `transfer` and `gradient` are messages."""


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work. The tasks of a stream run in the order of the list that they stand in.

    Attributes:
        rank: that does it.
        layer: whose it is, empty where it belongs to none.
        name: of the call, the value or the parameter.
        seconds: that it takes while nobody is in its way.
        after: places in the list of the tasks that must be done before it begins.
        meeting: tasks of several ranks with one number are one collective: they begin when all ranks are there, and
            end together. -1 for what a rank does by itself.
        cpu_share: the part of the rank's computing that it takes while it runs.
        num_bytes: that it is about, for messages.
    """

    rank: int
    stream: Stream
    kind: Kind
    layer: str
    name: str
    seconds: float
    after: tuple[int, ...] = ()
    meeting: int = -1
    cpu_share: float = 0.0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """When a task ran.

    Attributes:
        ready: when it could have begun, as far as its rank goes: from here on it waits for other ranks.
    """

    task: Task
    ready: float
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step, in seconds from its beginning.

    Attributes:
        spans: in the order of the tasks.
    """

    spans: tuple[Span, ...]

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that were simulated, one of each sort."""
        return tuple(sorted({span.task.rank for span in self.spans}))

    @cached_property
    def busiest(self) -> int:
        """The rank that computes longest."""
        busy: dict[int, float] = defaultdict(float)
        for span in self.spans:
            busy[span.task.rank] += span.task.seconds if span.task.stream == "compute" else 0.0
        return max(busy, key=lambda rank: (busy[rank], -rank), default=0)

    def exposed(self, rank: int | None = None) -> dict[str, float]:
        """Seconds in which a rank has nothing to compute because it exchanges or waits for others, by layer.

        Args:
            rank: by default the busiest.
        """
        found: dict[str, float] = defaultdict(float)
        for span, seconds in self.exposed_spans(rank):
            found[span.task.layer] += seconds
        return dict(found)

    def exposed_spans(self, rank: int | None = None) -> list[tuple[Span, float]]:
        """The same for every message that keeps the rank waiting."""
        rank = self.busiest if rank is None else rank
        own = [span for span in self.spans if span.task.rank == rank]
        busy = sorted((span.start, span.end) for span in own if span.task.stream == "compute")
        messages = sorted((span for span in own if span.task.stream != "compute"), key=lambda span: span.end)
        found = []
        here = 0.0
        for start, end in [*busy, (self.total, self.total)]:
            for span in messages if start > here else ():
                left, right = max(here, span.ready), min(span.end, start)
                if right > left:
                    found.append((span, right - left))
                    here = right
            here = max(here, end)
        return found

    def by_kind(self, rank: int | None = None) -> dict[str, float]:
        """Where a rank's time goes: seconds of every kind of computing, `exposed` communication, and `idle`.

        The seconds add up to the total; computing is as long as it took, slowed down by messages where it was.
        """
        rank = self.busiest if rank is None else rank
        found: dict[str, float] = defaultdict(float)
        for span in self.spans:
            if span.task.rank == rank and span.task.stream == "compute":
                found[span.task.kind] += span.end - span.start
        found["exposed"] = sum(self.exposed(rank).values())
        found["idle"] = max(0.0, self.total - sum(found.values()))
        return dict(found)

    def contention(self, rank: int | None = None) -> float:
        """Seconds by which messages have made a rank's computing longer."""
        rank = self.busiest if rank is None else rank
        own = (span for span in self.spans if span.task.rank == rank and span.task.stream == "compute")
        return sum(span.end - span.start - span.task.seconds for span in own)

    def messages(self, kind: Kind, rank: int | None = None) -> float:
        """Seconds in which messages of a kind run on a rank, hidden or not."""
        rank = self.busiest if rank is None else rank
        own = (s for s in self.spans if s.task.rank == rank and s.task.kind == kind and s.task.stream != "compute")
        return sum(span.end - span.start for span in own)


def simulate(tasks: Sequence[Task]) -> Timeline:
    """When the tasks run.

    Args:
        tasks: of all ranks; those of one stream of a rank in their order.

    Raises:
        ValueError: some tasks wait for each other for ever.
    """
    return _Simulation(tasks).run()


class _Activity:
    """A task that runs, or the tasks of a meeting."""

    __slots__ = ("is_message", "numbers", "ranks", "rate", "remaining", "share", "since", "version")

    def __init__(self, numbers: list[int], tasks: Sequence[Task], now: float) -> None:
        self.numbers = numbers
        self.ranks = [tasks[number].rank for number in numbers]
        self.remaining = max(tasks[number].seconds for number in numbers)
        self.share = max(tasks[number].cpu_share for number in numbers)
        self.is_message = tasks[numbers[0]].stream != "compute"
        self.since = now
        self.rate = 0.0
        self.version = 0


class _Simulation:
    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.now = 0.0
        self.waiting = [len(set(task.after)) for task in tasks]
        self.followers: list[list[int]] = [[] for _ in tasks]
        self.queues: dict[tuple[int, str], list[int]] = defaultdict(list)
        self.members: dict[int, list[int]] = defaultdict(list)
        for number, task in enumerate(tasks):
            for before in set(task.after):
                self.followers[before].append(number)
            self.queues[task.rank, task.stream].append(number)
            if task.meeting >= 0:
                self.members[task.meeting].append(number)
        self.heads = dict.fromkeys(self.queues, 0)
        self.arrived: dict[int, int] = defaultdict(int)
        self.ready = [0.0] * len(tasks)
        self.start = [0.0] * len(tasks)
        self.end = [-1.0] * len(tasks)
        self.active: dict[int, list[_Activity]] = defaultdict(list)
        self.finishing: list[tuple[float, int, int, _Activity]] = []
        self.pushed = 0

    def run(self) -> Timeline:
        for queue in self.queues:
            self._look(queue)
        while self.finishing:
            time, _, version, activity = heapq.heappop(self.finishing)
            if version == activity.version:
                self.now = time
                self._finish(activity)
        if any(end < 0 for end in self.end):
            stuck = next(task for task, end in zip(self.tasks, self.end, strict=True) if end < 0)
            raise ValueError(f"tasks wait for each other: {stuck}")
        spans = zip(self.tasks, self.ready, self.start, self.end, strict=True)
        return Timeline(tuple(Span(*span) for span in spans))

    def _look(self, queue: tuple[int, str]) -> None:
        """Begin the first task of a stream, if it can."""
        numbers, head = self.queues[queue], self.heads[queue]
        if head == len(numbers) or self.waiting[numbers[head]]:
            return
        number = numbers[head]
        self.heads[queue] += 1
        self.ready[number] = self.now
        meeting = self.tasks[number].meeting
        if meeting < 0:
            self._begin([number])
            return
        self.arrived[meeting] += 1
        if self.arrived[meeting] == len(self.members[meeting]):
            self._begin(self.members[meeting])

    def _begin(self, numbers: list[int]) -> None:
        activity = _Activity(numbers, self.tasks, self.now)
        for number in numbers:
            self.start[number] = self.now
            self.active[self.tasks[number].rank].append(activity)
        self._pace(activity.ranks)

    def _finish(self, activity: _Activity) -> None:
        activity.version += 1
        for number, rank in zip(activity.numbers, activity.ranks, strict=True):
            self.end[number] = self.now
            self.active[rank].remove(activity)
        self._pace(activity.ranks)
        queues: dict[tuple[int, str], None] = {}
        for number in activity.numbers:
            queues[self.tasks[number].rank, self.tasks[number].stream] = None
            for follower in self.followers[number]:
                self.waiting[follower] -= 1
                queues[self.tasks[follower].rank, self.tasks[follower].stream] = None
        for queue in queues:
            numbers, head = self.queues[queue], self.heads[queue]
            if head == 0 or self.end[numbers[head - 1]] >= 0:
                self._look(queue)

    def _pace(self, ranks: Sequence[int]) -> None:
        """Give everything that runs on these ranks its speed from now on."""
        touched = {id(activity): activity for rank in ranks for activity in self.active[rank]}
        for activity in touched.values():
            rate = min(self._rate(activity, rank) for rank in activity.ranks)
            if rate == activity.rate and activity.version:
                continue
            activity.remaining = max(0.0, activity.remaining - activity.rate * (self.now - activity.since))
            activity.since, activity.rate = self.now, rate
            activity.version += 1
            if rate > 0 or activity.remaining == 0:
                end = self.now + (activity.remaining / rate if rate > 0 else 0.0)
                self.pushed += 1
                heapq.heappush(self.finishing, (end, self.pushed, activity.version, activity))

    def _rate(self, activity: _Activity, rank: int) -> float:
        messages = [other for other in self.active[rank] if other.is_message]
        if activity.is_message:
            return 1.0 / len(messages)
        return max(0.0, 1.0 - sum(other.share for other in messages) / max(1, len(messages)))


ENGINE = "the engine itself"


def is_engine(task: Task) -> bool:
    """Whether it is what `apart` has made of the engine's time."""
    return task.kind == "around" and task.name == ENGINE


def apart(timeline: Timeline, fixed: float) -> Timeline:
    """The same timeline, where what an update takes beside the optimizer's work has a span of its own.

    Args:
        fixed: seconds once in an update: `convoy.planner.cost.gradients.Update.fixed`.
    """
    if fixed <= 0:
        return timeline
    spans: list[Span] = []
    engines: list[Span] = []  # at the end, so that the places of all other tasks stay as they are
    for span in timeline.spans:
        if span.task.kind != "update":
            spans.append(span)
            continue
        optimizer, engine = _divided(span, fixed)
        spans.append(optimizer)
        engines.append(engine)
    return Timeline((*spans, *engines))


def _divided(span: Span, fixed: float) -> tuple[Span, Span]:
    task = span.task
    own = min(fixed, task.seconds)
    middle = span.end - (span.end - span.start) * own / task.seconds
    return (
        replace(span, task=replace(task, seconds=task.seconds - own), end=middle),
        Span(replace(task, kind="around", name=ENGINE, seconds=own), middle, middle, span.end),
    )
