"""One clock for the updates of a run: a record of each, and of some when every call of the network began; and the first
ones beside what was predicted of them, by parts, layers and stages.

Updates are timed from when their data is asked for to their end. A few of the first ones are watched call by call, and
a few others are watched while their gradients wait until the backward pass is done, so that the time of each call is
its own: these teach the profile store, which also predicts a plan that was not chosen but set. Nothing that is computed
changes. One of those that are watched as they are is kept as a trace, with the prediction beside.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_low
from typing import Any, NamedTuple

from convoy.comm.position import current
from convoy.data.batch import Batch
from convoy.engine.stages import StagedNetwork
from convoy.engine.watched import DeviceClock, WatchedUpdate
from convoy.files import to_json, write_text
from convoy.launch.host import HostLoad, HostWatch, beside_others
from convoy.planner.comparison import Both, Comparison, Group, groups_beside, of_all_stages, parts_beside, stages_beside
from convoy.planner.cost.costs import Times, mean
from convoy.planner.cost.local_op import LocalOp
from convoy.planner.cost.prediction import Scored
from convoy.planner.layers import busiest_ranks
from convoy.planner.store import ProfileStore, measured_ops, recalled, remember_run
from convoy.plans.place import Placement
from convoy.plans.timeline import Summary, Timeline, trace
from convoy.training.session import Session
from convoy.training.step import StepPart, TrainingStep, Update, wait_for
from convoy.training.workloads import measuring

WARM_UP = 3  # updates that are slower than all that follow


class Numbers(NamedTuple):
    """Which updates are watched as they are, and which with gradients sent after the backward pass; after `last` none
    is compared with a prediction any more."""

    watched: tuple[int, ...]
    separate: tuple[int, ...]
    last: int = 64


EARLY = Numbers((12, 28, 44), (20, 36, 52))
RECORDED = Numbers((5, 7, 9), (6, 8, 10))  # where updates are recorded after that: nobody sees the parts of a replay
REMEMBERED = 100  # updates of a run; whoever looks at it does so after so many
# Looks at a run, on all ranks at the same time: after so many updates and the last one, or (True) once it is saved.
Look = Callable[[bool], None]


class Recorder:
    """Makes records of one process's updates of a run, by the clock of the session's device; all ranks make the same
    calls. The times of the last `remembered` updates are kept, or of all."""

    def __init__(
        self,
        session: Session,
        numbers: Numbers | None = None,
        remembered: int | None = REMEMBERED,
        clock: DeviceClock | None = None,
    ) -> None:
        self.session = session
        self.numbers = numbers or (RECORDED if session.is_recorded else EARLY)
        self.num = 0  # updates so far
        self.recent = deque[tuple[float, float, float]](maxlen=remembered)  # their waits, own work and seconds
        self.host = HostWatch() if session.keeps_times else None  # what else the machine does meanwhile
        self.clock = clock or DeviceClock(session.device)
        # Of the first updates, beginning and end of those that were only timed, and those that were watched.
        self.timed: list[tuple[Any, Any]] = []
        self.watched: list[WatchedUpdate] = []
        self.separate: list[WatchedUpdate] = []
        self._count = 0
        self._asked = 0.0
        self._now: WatchedUpdate | None = None
        self._began: Any = None  # by the device's clock; None where the update is not among the first

    @property
    def done(self) -> bool:
        """Whether enough was watched."""
        return self._count > self.numbers.last

    @property
    def has_watched(self) -> bool:
        """Whether from this update on only times are taken."""
        return self._count > max(*self.numbers.watched, *self.numbers.separate)

    def ask(self, update: int, does_more: bool = False) -> None:
        """The batch of an update is asked for; one that does more than others is not watched."""
        current.update = update
        current.to("data")
        self._asked = time.perf_counter()
        self._now = self._began = None
        if does_more:
            return
        self._count += 1
        if self._count in (*self.numbers.watched, *self.numbers.separate):
            self._now = WatchedUpdate(self.clock)
            self._now.mark("input")
        elif WARM_UP < self._count <= self.numbers.last:
            self._began = self.clock.now()

    def update(self, step: TrainingStep, batch: Batch, number: int, waits: bool = False) -> Update:
        """Do an update whose batch is there; one that `waits` ends when the device has done it."""
        wait_s = time.perf_counter() - self._asked
        began, waited_s = time.perf_counter(), current.waited_s
        with contextlib.nullcontext() if self._now is None else self._watching(step, self._now):
            update = step(batch, number)
        if self.session.device.type == "cpu":
            update.own_s = time.perf_counter() - began - (current.waited_s - waited_s)
        if self._began is not None:
            self.timed.append((self._began, self.clock.now()))
        if waits:
            wait_for(self.session.device)
        update.wait_s = wait_s
        update.unreadable = [(number, sample, reason) for sample, reason in batch.bad]
        update.seconds = time.perf_counter() - self._asked
        self.num += 1
        self.recent.append((update.wait_s, update.own_s, update.seconds))
        return update

    @contextlib.contextmanager
    def _watching(self, step: TrainingStep, watched: WatchedUpdate) -> Iterator[None]:
        engine, sees_calls = step.network, self.session.why_unwatched is None
        parameters = list(step.network.model.parameters()) if sees_calls else []
        separate = self._count in self.numbers.separate

        def mark(part: StepPart) -> None:
            current.to(part)
            watched.mark(part)

        step.mark, step.separate = mark, separate and sees_calls
        engine.watch = watched.of_pass if sees_calls else None
        if isinstance(engine, StagedNetwork):
            engine.watch_wait = watched.wait
        try:
            with watched.parameters(parameters):
                yield
            watched.mark("rest")
        finally:
            step.mark, step.separate, engine.watch = current.to, False, None
            if isinstance(engine, StagedNetwork):
                engine.watch_wait = contextlib.nullcontext
        (self.separate if separate else self.watched).append(watched)

    def forget(self) -> None:
        """What was seen of the first updates is not needed any more, and none is watched."""
        self.timed, self.watched, self.separate = [], [], []
        self._count = self.numbers.last + 1


_FROM_STORE = (
    "predicted from times that this machine keeps of earlier plans and runs (convoy profile), without the input, "
    "and as if nothing else ran here"
)
_NOT_PREDICTED = (
    "nothing was predicted: the plan was given, and the profile store does not know all of it; --plan auto does"
)


@dataclass(frozen=True)
class _RankTimes:
    """Seconds on one rank: of updates that were only timed, of those that were watched, of the parts of the median one
    of these, and of every operation by itself.
    """

    timed: list[float]
    watched: list[float]
    parts: Summary | None
    local_ops: dict[LocalOp, Times]
    load: HostLoad | None  # of its host meanwhile


def compare(
    recorder: Recorder, scored: Scored | None, store: ProfileStore | None, trace_file: Path | None = None
) -> Comparison:
    """Compare what the ranks have recorded with what was predicted of the plan (None: nothing). All ranks call it.

    The store learns what the pieces took; the file keeps one of the watched updates of all ranks, if there was any.
    None keeps nothing.
    """
    session, ranks, recipe = recorder.session, recorder.session.ranks, recorder.session.recipe

    timelines = [update.timeline(ranks.rank, ranks.num == 1) for update in recorder.watched]
    times = _RankTimes(
        [recorder.clock.between(*ends) for ends in recorder.timed],
        [timeline.total for timeline in timelines],
        Summary.median([timeline.summary(ranks.rank) for timeline in timelines]) if timelines else None,
        measured_ops(recorder.separate, ranks.rank, recipe.batch_norm, session.normed_samples, session.typed),
        recorder.host.read() if recorder.host is not None else None,
    )
    placements = recorder.watched[0].placements if timelines else []
    placement = session.typed(placements[0]) if placements else None
    recorder.forget()
    everyone = ranks.gather(times)
    middle: list[Timeline] = []
    if timelines and trace_file is not None:
        middle = ranks.gather(timelines[middle_update([rank.watched for rank in everyone])])

    def first() -> Comparison:
        notes = [session.why_unwatched] if session.why_unwatched is not None else []
        prediction = scored
        if prediction is None and placement is not None and store is not None:
            prediction = _recalled(session, store, placement)
            notes.append(_NOT_PREDICTED if prediction is None else _FROM_STORE)
        if middle and trace_file is not None:
            predicted = {"predicted": prediction.timeline} if prediction is not None else {}
            measured = Timeline(tuple(span for timeline in middle for span in timeline.spans))
            with contextlib.suppress(OSError):  # a full disk is no reason to stop a training
                write_text(trace_file, to_json(trace(**predicted, measured=measured)))
        disturbed = beside_others([rank.load for rank in everyone if rank.load is not None])
        notes += disturbed
        return _compared(recorder, everyone, prediction, placement, None if disturbed else store, notes)

    return ranks.first(first)


def middle_update(lengths: Sequence[Sequence[float]]) -> int:
    """Which of some updates is the median one, by seconds of every update of each rank; an update is as long as on the
    slowest rank.
    """
    slowest = [max(seconds) for seconds in zip(*lengths, strict=True)]
    return slowest.index(median_low(slowest))


def _recalled(session: Session, store: ProfileStore, placement: Placement) -> Scored | None:
    """What the store predicts of the plan, before it learns more."""
    recipe, passes = session.recipe, session.passes
    machine = measuring(recipe, session.device, session.ranks.on_host)
    staging = session.staging(placement)
    training = {"batch_norm": recipe.batch_norm, "microbatch": session.normed_samples, "recorded": session.is_recorded}
    return recalled(store, machine, recipe.optimizer.name, session.plan, placement, len(passes), staging, **training)


def _compared(
    recorder: Recorder,
    everyone: Sequence[_RankTimes],
    scored: Scored | None,
    placement: Placement | None,
    store: ProfileStore | None,
    notes: list[str],
) -> Comparison:
    """What rank 0 makes of it; the store learns the mean of the ranks that had an operation."""
    session = recorder.session
    recipe, mesh = session.recipe, session.plan.mesh
    machine = measuring(recipe, session.device, session.ranks.on_host)
    local_ops: dict[LocalOp, list[Times]] = {}
    for of_rank in everyone:
        for local_op, times in of_rank.local_ops.items():
            local_ops.setdefault(local_op, []).append(times)
    learned = 0
    if store is not None and local_ops:
        with contextlib.suppress(OSError):  # a full disk is no reason to stop a training
            store.put(machine, {local_op: mean(times) for local_op, times in local_ops.items()}, "run")
            learned = len(local_ops)
    if scored is not None:
        of_stages, rank = busiest_ranks(scored), scored.timeline.busiest
    else:
        summaries = [of_rank.parts for of_rank in everyone]
        computing = [part.parts["forward"] + part.parts["backward"] if part is not None else 0.0 for part in summaries]
        stages = ([r for r in range(mesh.num_devices) if mesh.stage_of(r) == s] for s in range(session.plan.num_stages))
        of_stages = tuple(max(members, key=computing.__getitem__) for members in stages)
        rank = max(of_stages, key=computing.__getitem__)
    busiest = everyone[rank]
    before = [scored.timeline.summary(member) for member in (rank, *of_stages)] if scored is not None else []
    after = [parts for parts in (everyone[member].parts for member in (rank, *of_stages)) if parts is not None]
    update_s = max(median(of_rank.timed) for of_rank in everyone) if busiest.timed else None
    if store is not None and update_s is not None and busiest.parts is not None:
        without_input_s = update_s - busiest.parts.parts.get("input", 0.0)
        remember_run(store, machine, recipe.model.name, recipe.batch, session.plan, without_input_s)
    if busiest.parts is None:
        notes = [f"the run was too short to be watched: that takes {recorder.numbers.watched[0]} updates"]
    elif len(of_stages) > 1:
        names = f"{', '.join(map(str, of_stages[:-1]))} and {of_stages[-1]}"
        notes = [*notes, f"rank {rank} runs stage {mesh.stage_of(rank) + 1}; the layers are those of ranks {names}"]
    both = of_all_stages(before), of_all_stages(after)
    groups: tuple[Group, ...] = ()
    if placement is not None:
        staged = session.network.staged(placement)
        groups = groups_beside(placement, *both, () if staged is None else staged.stages)
    return Comparison(
        model=recipe.model.name,
        plan=str(session.plan),
        devices=session.ranks.num,
        batch=recipe.batch,
        rank=rank,
        timed=len(busiest.timed),
        watched=len(busiest.watched),
        learned=learned,
        update=Both(scored.seconds if scored is not None else None, update_s),
        parts=parts_beside(*both),
        groups=groups,
        stages=stages_beside(before[1:], after[1:]) if len(of_stages) > 1 and len(after) > len(of_stages) else (),
        notes=tuple(notes),
        one_device_s=session.chosen.one_device_s,
    )
