"""Looks at a run's updates: how long they take and wait, where the time goes beside what was predicted, and what the
host does meanwhile.

Updates are timed from when their data is asked for to their end. A few of the first ones are watched call by call, and
a few others are watched while their gradients wait until the backward pass is done, so that the time of each call is
its own: these teach the profile store. Nothing that is computed changes. One of those that are watched as they are is
kept as a trace, with the predicted update beside it.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean, median, median_low
from typing import Any

from convoy import resources
from convoy.data import num_workers
from convoy.data.loader import batch_maker, first_workers
from convoy.data.sources import EncodedSource
from convoy.data.workers import samples_ahead
from convoy.doctor.facts import Facts, Pictures, RankFacts
from convoy.engine.stages import StagedNetwork
from convoy.engine.uncaptured import Uncaptured
from convoy.engine.watched import DeviceClock, WatchedUpdate
from convoy.files import to_json, write_text
from convoy.launch.host import HostLoad, HostWatch, beside_others, network_place
from convoy.ops.registry import under_autocast
from convoy.planner import Scored
from convoy.planner.comparison import Both, Comparison, Group, groups_beside, of_all_stages, parts_beside, stages_beside
from convoy.planner.cost.costs import Times
from convoy.planner.cost.local_op import LocalOp
from convoy.planner.cost.pipeline import Staging
from convoy.planner.cost.store import ProfileStore
from convoy.planner.layers import busiest_ranks
from convoy.planner.profiling import mean
from convoy.planner.remembered import measured_ops, recalled, remember_run
from convoy.planner.text import trace
from convoy.plans.place import Placement
from convoy.plans.schedule import bubble
from convoy.plans.timeline import Summary, Timeline
from convoy.training.derived import num_threads
from convoy.training.precision import lowered
from convoy.training.session import Session
from convoy.training.step import StepResult, TrainingStep, unmarked
from convoy.training.workloads import measuring

WARM_UP = 3  # updates that are slower than all that follow
# Numbers of the updates that are watched as they are, and with gradients sent after the backward pass.
WATCHED, SEPARATE = (12, 28, 44), (20, 36, 52)
# Where updates are recorded after that: nobody sees the parts of a replay.
RECORDED_WATCHED, RECORDED_SEPARATE = (5, 7, 9), (6, 8, 10)
LAST = 64  # the update after which none is watched any more
UPDATES = 100  # after so many updates a run says what holds it back, by these
LEAST = 10  # fewer updates say nothing
# Between two looks at the host, at least: each takes some milliseconds, 15 beside a thousand processes.
_SELDOM_S = 10.0
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


class Observation:
    """Of one process's updates of a run. All ranks make the same calls: `ask` for a batch, `got` it, `update` around
    the step, and `add` what it gave.

    The clock is that of the session's device. The updates numbered `watched` are watched as they are, those in
    `separate` with gradients sent after the backward pass; by default early ones, where updates are recorded after
    that. After update `last` none is watched any more. With `gpu` `nvidia-smi` is asked as well, which may take
    seconds. The last updates are `remembered`, so many of them or, with None, all.
    """

    def __init__(
        self,
        session: Session,
        clock: DeviceClock | None = None,
        watched: Sequence[int] | None = None,
        separate: Sequence[int] | None = None,
        last: int = LAST,
        gpu: bool = False,
        remembered: int | None = UPDATES,
    ) -> None:
        by_default = (RECORDED_WATCHED, RECORDED_SEPARATE) if session.is_recorded else (WATCHED, SEPARATE)
        self._numbers = by_default[0] if watched is None else watched
        self._separate_numbers = by_default[1] if separate is None else separate
        self._session, self._last, self._gpu, self._remembered = session, last, gpu, remembered
        self._clock = clock or DeviceClock(session.device)
        self._unseen = _why_unseen(session)
        self._count = 0
        self._timed: list[tuple[Any, Any]] = []
        self._watched: list[WatchedUpdate] = []
        self._separate: list[WatchedUpdate] = []
        self._began: Any = None
        self._first_load = HostWatch()
        self._now: WatchedUpdate | None = None
        # Processes of this rank that make pictures ready, by now.
        self.workers = first_workers(session.recipe.data, num_workers(session.data, session.recipe.data)[0])
        self.begin()

    def begin(self) -> None:
        """Forget the updates so far: those that are remembered count from now on."""
        self.num = 0  # updates seen
        self._seconds, self._waits, self._own = (deque[float](maxlen=self._remembered) for _ in range(3))
        self._watch: HostWatch | None = None
        with suppress(Exception):  # a look at the machine is no reason to stop a training
            self._watch = HostWatch(self._session.device if self._gpu else None)
        self._load: HostLoad | None = None
        self._looked = time.perf_counter()
        self._asked = self._waited_s = 0.0

    @property
    def done(self) -> bool:
        """Whether enough was watched."""
        return self._count > self._last

    @property
    def has_watched(self) -> bool:
        """Whether from the next update on only times are taken."""
        return self._count >= max((*self._numbers, *self._separate_numbers), default=0)

    def ask(self, counts: bool = True) -> None:
        """The batch of the next update is asked for. One that does not count is not among the first: it is neither
        watched nor compared with a prediction."""
        self._asked = time.perf_counter()
        self._count += counts
        self._now = None
        if self.done or not counts:
            return
        if self._count in self._numbers or self._count in self._separate_numbers:
            self._now = WatchedUpdate(self._clock)
            self._now.mark("input")
        else:
            self._began = self._clock.now()

    def got(self) -> float:
        """The batch is there: the seconds for which it was waited for."""
        self._waited_s = time.perf_counter() - self._asked
        return self._waited_s

    @contextmanager
    def update(self, step: TrainingStep) -> Iterator[None]:
        """Around an update."""
        if self._now is not None:
            separate = self._count in self._separate_numbers
            with self._watching(step, self._now, separate):
                yield
            (self._separate if separate else self._watched).append(self._now)
            return
        yield
        if WARM_UP < self._count <= self._last:
            self._timed.append((self._began, self._clock.now()))

    def add(self, result: StepResult) -> None:
        """The update is done."""
        self.num += 1
        self._seconds.append(time.perf_counter() - self._asked)
        self._waits.append(self._waited_s)
        self._own.append(result.own_s)

    @contextmanager
    def _watching(self, step: TrainingStep, update: WatchedUpdate, separate: bool) -> Iterator[None]:
        network = step.network
        engine = network.engine if self._unseen is None else None
        parameters = list(network.model.parameters()) if engine is not None else []
        step.mark, step.timed = update.mark, separate and engine is not None
        if engine is not None:
            engine.watch = update.of_pass
        if isinstance(engine, StagedNetwork):
            engine.watch_wait = update.wait
        try:
            with update.parameters(parameters):
                yield
            update.mark("rest")
        finally:
            step.mark, step.timed = unmarked, False
            if engine is not None:
                engine.watch = None
            if isinstance(engine, StagedNetwork):
                engine.watch_wait = contextlib.nullcontext

    def look(self) -> HostLoad | None:
        """What the host has done since the look before, while the processes that make pictures are there to be counted.

        The first look is at all since the beginning. One that comes too soon finds what the one before found.
        """
        now = time.perf_counter()
        if self._watch is not None and (self._load is None or now - self._looked >= _SELDOM_S):
            self._looked = now
            with suppress(Exception):  # as in `begin`
                self._load = self._watch.read()
        return self._load

    def _typed(self, placement: Placement) -> Placement:
        precision = lowered(self._session.recipe)
        return replace(placement, graph=under_autocast(placement.graph, precision, self._session.device.type))

    def conclude(self, scored: Scored | None, store: ProfileStore | None, trace_file: Path | None = None) -> Comparison:
        """Compare what the ranks have seen with what was predicted of the plan (None: nothing). All ranks call it.

        The store learns what the pieces took, and predicts a plan that was not chosen but set; the file keeps one of
        the watched updates of all ranks, if there was any. None keeps nothing.
        """
        session, ranks = self._session, self._session.ranks
        batch_norm = session.recipe.batch_norm
        microbatch = session.quantities.sizes[0] if batch_norm == "microbatch" else 0
        timelines = [update.timeline(ranks.rank, ranks.num == 1) for update in self._watched]
        times = _RankTimes(
            [self._clock.between(*ends) for ends in self._timed],
            [timeline.total for timeline in timelines],
            Summary.median([timeline.summary(ranks.rank) for timeline in timelines]) if timelines else None,
            measured_ops(self._separate, ranks.rank, batch_norm, microbatch, self._typed),
        )
        placements = self._watched[0].placements if timelines else []
        placement = self._typed(placements[0]) if placements else None
        self._watched, self._separate, self._timed = [], [], []
        self._count = self._last + 1
        everyone, loads = ranks.gather(times), ranks.gather(self._first_load.read())
        shown: list[Timeline] = []
        if timelines and trace_file is not None:
            shown = ranks.gather(timelines[middle_update([rank.watched for rank in everyone])])

        def first() -> Comparison:
            notes = [self._unseen] if self._unseen is not None else []
            prediction = scored
            if prediction is None and placement is not None and store is not None:
                prediction = _recalled(session, store, placement)
                notes.append(_NOT_PREDICTED if prediction is None else _FROM_STORE)
            if shown and trace_file is not None:
                predicted = {"predicted": prediction.timeline} if prediction is not None else {}
                measured = Timeline(tuple(span for timeline in shown for span in timeline.spans))
                with suppress(OSError):  # a full disk is no reason to stop a training
                    write_text(trace_file, to_json(trace(**predicted, measured=measured)))
            disturbed = beside_others(loads) if store is not None else []
            notes += disturbed
            return _compared(session, everyone, prediction, placement, None if disturbed else store, notes)

        return ranks.first(first)

    def facts(self, comparison: Comparison, since: int = 0) -> Facts:
        """What all ranks have seen, and what the last look at their hosts showed. The first `since` of the remembered
        updates do not count: the batches of a training's first ones were made before it. All ranks call it.
        """
        session = self._session
        recipe, quantities, ranks, network = session.recipe, session.quantities, session.ranks, session.network
        samples = len(session.division.positions(ranks.sample_rank))
        waits, own, seconds = (fmean(islice(each, since, None)) for each in (self._waits, self._own, self._seconds))
        source = session.data.train
        in_memory = batch_maker(session.data, recipe.data, source, recipe.seed).vectorised
        everyone = ranks.gather((RankFacts(samples, waits, own, self._load), seconds, self.workers, network_place()))
        of_ranks, of_updates, workers, places = zip(*everyone, strict=True)
        waiting = 0.0
        if network.stages is not None:
            waiting = bubble(network.schedule, len(session.division.passes(session.merge)), session.plan.num_stages)
        return Facts(
            model=recipe.model.name,
            data=str(recipe.data.path),
            devices=ranks.num,
            plan=str(session.plan),
            batch=recipe.batch,
            update_s=max(of_updates),
            parts={name: both.measured_s for name, both in comparison.parts.items() if both.measured_s},
            ranks=of_ranks,
            workers=max(workers),
            cores=resources.own_share(),
            threads=num_threads(recipe) if session.device.type == "cpu" else 0,
            microbatches=len(quantities.sizes),
            pictures=Pictures(in_memory=True) if in_memory else None,
            can_pack=isinstance(source, EncodedSource) and not source.is_packed,
            evaluate_every=quantities.evaluate_every,
            test_samples=-(-len(session.data.test) // ranks.num_sample_ranks),
            ahead=samples_ahead(max(1, samples)) / max(1, samples),
            checkpoint_every=quantities.checkpoint_every,
            updates_per_epoch=quantities.updates_per_epoch,
            total_updates=quantities.total_updates,
            mtbf_s=recipe.checkpoint.mtbf.seconds,
            hosts=tuple(name for name, _ in dict.fromkeys(places)) if ranks.num > 1 else (),
            bubble=waiting,
        )


def middle_update(lengths: Sequence[Sequence[float]]) -> int:
    """Which of some updates is the median one, by seconds of every update of each rank; an update is as long as on the
    slowest rank.
    """
    slowest = [max(seconds) for seconds in zip(*lengths, strict=True)]
    return slowest.index(median_low(slowest))


def _why_unseen(session: Session) -> str | None:
    """Why the calls of the network cannot be watched; None where they can."""
    if isinstance(session.network.engine, Uncaptured):
        return "layers are not watched in a network that is not seen as one graph"
    return "layers are not watched in a compiled network" if session.recipe.compile else None


def _recalled(session: Session, store: ProfileStore, placement: Placement) -> Scored | None:
    """What the store predicts of the plan, before it learns more."""
    passes = session.division.passes(session.merge)
    recipe, network = session.recipe, session.network
    staging = None
    if network.stages is not None:
        samples = tuple(len(piece.positions) for piece in passes)
        staging = Staging(session.plan.mesh, network.stages.staged(placement), samples, network.schedule)
    microbatch = session.division.sizes[0] if recipe.batch_norm == "microbatch" else 0
    machine = measuring(recipe, session.device, session.ranks.on_host)
    costs = recipe.batch_norm, microbatch, session.is_recorded
    return recalled(store, machine, recipe.optimizer.name, session.plan, placement, len(passes), *costs, staging)


def _compared(
    session: Session,
    everyone: Sequence[_RankTimes],
    scored: Scored | None,
    placement: Placement | None,
    store: ProfileStore | None,
    notes: list[str],
) -> Comparison:
    """What rank 0 makes of it; the store learns the mean of the ranks that had an operation."""
    recipe, mesh, network = session.recipe, session.plan.mesh, session.network
    machine = measuring(recipe, session.device, session.ranks.on_host)
    local_ops: dict[LocalOp, list[Times]] = {}
    for of_rank in everyone:
        for local_op, times in of_rank.local_ops.items():
            local_ops.setdefault(local_op, []).append(times)
    learned = 0
    if store is not None and local_ops:
        with suppress(OSError):  # a full disk is no reason to stop a training
            store.put(machine, {local_op: mean(times) for local_op, times in local_ops.items()}, "run")
            learned = len(local_ops)
    if scored is not None:
        of_stages, rank = busiest_ranks(scored), scored.timeline.busiest
    else:
        seen = [of_rank.parts for of_rank in everyone]
        computing = [parts.parts["forward"] + parts.parts["backward"] if parts is not None else 0.0 for parts in seen]
        stages = ([r for r in range(mesh.num_devices) if mesh.stage_of(r) == s] for s in range(session.plan.num_stages))
        of_stages = tuple(max(members, key=computing.__getitem__) for members in stages)
        rank = max(of_stages, key=computing.__getitem__)
    shown = everyone[rank]
    before = [scored.timeline.summary(one) for one in (rank, *of_stages)] if scored is not None else []
    after = [parts for parts in (everyone[one].parts for one in (rank, *of_stages)) if parts is not None]
    update_s = max(median(of_rank.timed) for of_rank in everyone) if shown.timed else None
    if store is not None and update_s is not None and shown.parts is not None:
        without_input_s = update_s - shown.parts.parts.get("input", 0.0)
        remember_run(store, machine, recipe.model.name, recipe.batch, session.plan, without_input_s)
    if shown.parts is None:
        first, *_ = RECORDED_WATCHED if session.is_recorded else WATCHED
        notes = [f"the run was too short to be watched: that takes {first} updates"]
    elif len(of_stages) > 1:
        names = f"{', '.join(map(str, of_stages[:-1]))} and {of_stages[-1]}"
        notes = [*notes, f"rank {rank} runs stage {mesh.stage_of(rank) + 1}; the layers are those of ranks {names}"]
    both = of_all_stages(before), of_all_stages(after)
    groups: tuple[Group, ...] = ()
    if placement is not None:
        stage_of = network.stages.staged(placement).stages if network.stages is not None else ()
        groups = groups_beside(placement, *both, stage_of)
    return Comparison(
        model=recipe.model.name,
        plan=str(session.plan),
        devices=session.ranks.num,
        batch=recipe.batch,
        rank=rank,
        timed=len(shown.timed),
        watched=len(shown.watched),
        learned=learned,
        update=Both(scored.seconds if scored is not None else None, update_s),
        parts=parts_beside(*both),
        groups=groups,
        stages=stages_beside(before[1:], after[1:]) if len(of_stages) > 1 and len(after) > len(of_stages) else (),
        notes=tuple(notes),
        one_device_s=session.one_device_s,
    )
