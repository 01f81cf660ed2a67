"""When each task of a step runs: a simulation of streams with dependencies, meetings and contention.

A device begins a task when it is free and the host has issued it. Hosts issue the tasks of their rank one after the
other, and do not wait for the device. Messages take cycles from what computes on their rank, by their `cpu_share`;
messages on several streams of one rank share its way out evenly. A message to another stage takes cycles there too.

A search for cuts simulates stages as wholes (`pipeline_seconds`).
"""

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from convoy.plans.mesh import Axes, Mesh
from convoy.plans.schedule import Action, Schedule, in_order
from convoy.plans.timeline import Span, Task, Timeline


def simulate(tasks: Sequence[Task]) -> Timeline:
    """When the tasks of all ranks run, in one of many equal updates; a ValueError where some wait for each other for
    ever. Those of one stream of a rank are in their order.

    A host begins with an update when it is through with the one before, when the device may still be at that. It is
    ahead by so much as the device ends later than it; a device that is always behind never waits for its host.
    """
    issuing: dict[int, float] = defaultdict(float)
    for task in tasks:
        issuing[task.rank] += task.host
    ahead = dict.fromkeys(issuing, 0.0)
    timeline = _Simulation(tasks, ahead).run()
    for _ in range(_ROUNDS if any(issuing.values()) else 0):
        ahead = {rank: max(0.0, ahead[rank] + timeline.total - busy) for rank, busy in issuing.items()}
        timeline = _Simulation(tasks, ahead).run()
    return timeline


# After which a host is ahead as in all later updates: a device that is slower leaves it room in the first round
_ROUNDS = 2


class _Activity:
    __slots__ = ("is_message", "numbers", "ranks", "rate", "receivers", "remaining", "share", "since", "version")

    def __init__(self, numbers: list[int], tasks: Sequence[Task], now: float) -> None:
        self.numbers = numbers
        self.ranks = [tasks[number].rank for number in numbers]
        self.receivers = [tasks[number].peer for number in numbers if tasks[number].peer >= 0]
        self.remaining = max(tasks[number].seconds for number in numbers)
        self.share = max(tasks[number].cpu_share for number in numbers)
        self.is_message = tasks[numbers[0]].stream != "compute"
        self.since = now
        self.rate = 0.0
        self.version = 0


class _Simulation:
    def __init__(self, tasks: Sequence[Task], ahead: Mapping[int, float]) -> None:
        self.tasks = tasks
        hosts = {rank: -seconds for rank, seconds in ahead.items()}
        self.issued = [0.0] * len(tasks)
        self.now = 0.0
        self.waiting = [len(set(task.after)) for task in tasks]
        self.followers: list[list[int]] = [[] for _ in tasks]
        self.queues: dict[tuple[int, str], list[int]] = defaultdict(list)
        self.members: dict[int, list[int]] = defaultdict(list)
        for number, task in enumerate(tasks):
            self.issued[number] = hosts[task.rank] = hosts[task.rank] + task.host
            for before in set(task.after):
                self.followers[before].append(number)
            self.queues[task.rank, task.stream].append(number)
            if task.meeting >= 0:
                self.members[task.meeting].append(number)
        self.heads = dict.fromkeys(self.queues, 0)
        self.arrived: dict[int, int] = defaultdict(int)
        self.ready = [-1.0] * len(tasks)
        self.start = [0.0] * len(tasks)
        self.end = [-1.0] * len(tasks)
        self.active: dict[int, list[_Activity]] = defaultdict(list)
        self.received: dict[int, list[_Activity]] = defaultdict(list)
        self.finishing: list[tuple[float, int, int, _Activity | tuple[int, str]]] = []
        self.pushed = 0

    def run(self) -> Timeline:
        for queue in self.queues:
            self._look(queue)
        while self.finishing:
            time, _, version, activity = heapq.heappop(self.finishing)
            if isinstance(activity, tuple):  # the first task of a stream is issued
                self.now = time
                self._look(activity)
            elif version == activity.version:
                self.now = time
                self._finish(activity)
        if any(end < 0 for end in self.end):
            stuck = next(task for task, end in zip(self.tasks, self.end, strict=True) if end < 0)
            raise ValueError(f"tasks wait for each other: {stuck}")
        spans = zip(self.tasks, self.ready, self.start, self.end, strict=True)
        return Timeline(tuple(Span(*span) for span in spans))

    def _look(self, queue: tuple[int, str]) -> None:
        numbers, head = self.queues[queue], self.heads[queue]
        if head > 0 and self.end[numbers[head - 1]] < 0:
            return
        if head == len(numbers) or self.waiting[numbers[head]]:
            return
        number = numbers[head]
        if self.ready[number] < 0:
            self.ready[number] = self.now
            if self.issued[number] > self.now:
                self.pushed += 1
                heapq.heappush(self.finishing, (self.issued[number], self.pushed, 0, queue))
        if self.issued[number] > self.now:
            return
        self.heads[queue] += 1
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
        for rank in activity.receivers:
            self.received[rank].append(activity)
        self._set_rates([*activity.ranks, *activity.receivers])

    def _finish(self, activity: _Activity) -> None:
        activity.version += 1
        for number, rank in zip(activity.numbers, activity.ranks, strict=True):
            self.end[number] = self.now
            self.active[rank].remove(activity)
        for rank in activity.receivers:
            self.received[rank].remove(activity)
        self._set_rates([*activity.ranks, *activity.receivers])
        queues: dict[tuple[int, str], None] = {}
        for number in activity.numbers:
            queues[self.tasks[number].rank, self.tasks[number].stream] = None
            for follower in self.followers[number]:
                self.waiting[follower] -= 1
                queues[self.tasks[follower].rank, self.tasks[follower].stream] = None
        for queue in queues:
            self._look(queue)

    def _set_rates(self, ranks: Sequence[int]) -> None:
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
        coming = self.received[rank]
        shares = (sum(other.share for other in group) / len(group) for group in (messages, coming) if group)
        return max(0.0, 1.0 - sum(shares))


def rank_classes(mesh: Mesh, work: Sequence[Hashable], axes: Iterable[Axes]) -> list[int]:
    """For every rank the first one that does the same, and meets ranks that do the same as those it meets.

    `work` is what each rank does by itself, `axes` those over which ranks meet. Colors are refined until they are
    stable (Weisfeiler and Leman, 1968): ranks of one color then have equal timelines, because they begin alike and
    everything they wait for is alike.
    """
    groups = [list(mesh.groups(a)) for a in sorted(set(axes))]
    colors = _numbered(work)
    while True:
        met: list[list[tuple[int, ...]]] = [[] for _ in work]
        for kind in groups:
            for group in kind:
                together = tuple(sorted(colors[rank] for rank in group))
                for rank in group:
                    met[rank].append(together)
        finer = _numbered([(color, *neighbors) for color, neighbors in zip(colors, met, strict=True)])
        if len(set(finer)) == len(set(colors)):
            first: dict[int, int] = {}
            return [first.setdefault(color, rank) for rank, color in enumerate(finer)]
        colors = finer


def _numbered(values: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a stage."""

    forward: float  # of one pass; likewise `backward`
    backward: float
    sends: float = 0.0  # a pass's activations to the next stage
    returns: float = 0.0  # a pass's gradients to the stage before
    once: float = 0.0  # after the last pass: exchange of gradients and optimizer
    weights: float = 0.0  # the part of `backward` that zero-bubble postpones: gradients of weights


def pipeline_seconds(stages: Sequence[StageTimes], passes: int, schedule: Schedule) -> float:
    """Seconds of an update, stage by stage; each sends one message after the other, beside its computing.

    Four equal stages and eight passes take as long as eleven passes through one of them:

    >>> pipeline_seconds([StageTimes(1.0, 2.0)] * 4, 8, "1f1b")
    33.0
    >>> pipeline_seconds([StageTimes(1.0, 2.0, weights=1.0)] * 4, 8, "zero-bubble")
    27.0
    """
    count, postpones = len(stages), schedule == "zero-bubble"
    free, way_out, computed = [0.0] * count, [0.0] * count, [-1] * count
    arrived: dict[tuple[int, Action], float] = {}
    for stage, action in in_order(schedule, passes, count):
        (kind, number), times = action, stages[stage]
        if kind == "weights":
            free[stage] += times.weights * (number - computed[stage])
            computed[stage] = number
            continue
        seconds = times.forward if kind == "forward" else times.backward - postpones * times.weights
        free[stage] = max(free[stage], arrived.get((stage, action), 0.0)) + seconds
        target = stage + 1 if kind == "forward" else stage - 1
        if 0 <= target < count:
            way_out[stage] = max(free[stage], way_out[stage]) + (times.sends if kind == "forward" else times.returns)
            arrived[target, action] = way_out[stage]
    return max(end + stage.once for end, stage in zip(free, stages, strict=True))
