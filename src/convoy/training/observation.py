"""Looks at some of a run's first updates: how long they take, and where the time goes, beside what was predicted.

Updates are timed from when their data is asked for to their end. A few of them are watched call by call, and a few
others are watched while their gradients wait until the backward pass is done, so that the time of each call is its own:
these teach the profile store. Nothing that is computed changes, and after the last of them nobody looks any more.
One of those that are watched as they are is kept as a trace, with the predicted update beside it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, median_low
from typing import Any

from convoy.engine.clock import DeviceClock
from convoy.engine.stages import StagedNetwork
from convoy.engine.uncaptured import Uncaptured
from convoy.engine.watched import WatchedUpdate
from convoy.files import to_json, write_text
from convoy.launch.host import HostWatch, beside_others
from convoy.ops.precision import under_autocast
from convoy.planner import Scored
from convoy.planner.comparison import Both, Comparison, groups_beside, of_all_stages, parts_beside, stages_beside
from convoy.planner.cost.costs import Times
from convoy.planner.cost.local_op import LocalOp
from convoy.planner.cost.pipeline import Staging
from convoy.planner.cost.store import Device, ProfileStore
from convoy.planner.layers import busiest_ranks
from convoy.planner.profiling import mean
from convoy.planner.remembered import measured_ops, recalled, remember_run
from convoy.planner.text import trace
from convoy.plans.place import Placement
from convoy.plans.timeline import Summary, Timeline
from convoy.training.parallel import StagedTraining
from convoy.training.precision import lowered
from convoy.training.session import Session
from convoy.training.step import TrainingStep, unmarked
from convoy.training.workloads import measuring

WARM_UP = 3  # updates that are slower than all that follow
# Numbers of the updates that are watched as they are, and with gradients sent after the backward pass.
WATCHED, APART = (12, 28, 44), (20, 36, 52)
# Where updates are recorded after that: nobody sees the parts of a replay.
RECORDED_WATCHED, RECORDED_APART = (5, 7, 9), (6, 8, 10)
LAST = 64  # the update after which nobody looks any more
_HOW = {
    True: "predicted from times that this machine keeps of earlier plans and runs (convoy profile), without the input, "
    "and as if nothing else ran here",
    False: "nothing was predicted: the plan was given, and the profile store does not know all of it; --plan auto does",
}


@dataclass(frozen=True)
class _Seen:
    """What a rank has seen: seconds of updates, of the other ones those of the median update `whole`, and its
    pieces.
    """

    updates: list[float]
    watched: list[float]
    whole: Summary | None
    local_ops: dict[LocalOp, Times]


class Observation:
    """Of one process's updates of a run; all ranks make the same calls.

    The clock is that of the session's device. The updates numbered `watched` are watched as they are, those in `apart`
    with gradients sent after the backward pass; by default early ones, where updates are recorded after that. After
    update `last` nobody looks any more.
    """

    def __init__(
        self,
        session: Session,
        clock: DeviceClock | None = None,
        watched: Sequence[int] | None = None,
        apart: Sequence[int] | None = None,
        last: int = LAST,
    ) -> None:
        self._numbers = watched if watched is not None else RECORDED_WATCHED if session.is_recorded else WATCHED
        self._numbers_apart = apart if apart is not None else RECORDED_APART if session.is_recorded else APART
        self._last = last
        self._session = session
        self._clock = clock or DeviceClock(session.device)
        self._unseen = _why_unseen(session)
        self._count = 0
        self._timed: list[tuple[Any, Any]] = []
        self._watched: list[WatchedUpdate] = []
        self._apart: list[WatchedUpdate] = []
        self._began: Any = None
        self._watch = HostWatch()
        self._now: WatchedUpdate | None = None

    @property
    def done(self) -> bool:
        """Whether enough has been seen."""
        return self._count > self._last

    @property
    def has_watched(self) -> bool:
        """Whether from the next update on only times are taken."""
        return self._count >= max((*self._numbers, *self._numbers_apart), default=0)

    def begin(self) -> None:
        """The data of the next update is asked for."""
        self._count += 1
        if self.done:
            return
        self._now = None
        if self._count in self._numbers or self._count in self._numbers_apart:
            self._now = WatchedUpdate(self._clock)
            self._now.mark("input")
        else:
            self._began = self._clock.now()

    @contextmanager
    def update(self, step: TrainingStep) -> Iterator[None]:
        """Around an update."""
        if self.done:
            yield
        elif self._now is None:
            yield
            if self._count > WARM_UP:
                self._timed.append((self._began, self._clock.now()))
        else:
            apart = self._count in self._numbers_apart
            with self._watching(step, self._now, apart):
                yield
            (self._apart if apart else self._watched).append(self._now)

    @contextmanager
    def _watching(self, step: TrainingStep, update: WatchedUpdate, apart: bool) -> Iterator[None]:
        network = step.network
        engine = network.engine if self._unseen is None else None
        parameters = list(network.model.parameters()) if engine is not None else []
        step.mark, step.timed = update.mark, apart and engine is not None
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

    def _typed(self, placement: Placement) -> Placement:
        precision = lowered(self._session.recipe)
        return replace(placement, graph=under_autocast(placement.graph, precision, self._session.device.type))

    def conclude(self, scored: Scored | None, store: ProfileStore | None, trace_file: Path | None = None) -> Comparison:
        """Compare what the ranks have seen with what was predicted of the plan (None: nothing). All ranks call it.

        The store learns what the pieces took, and predicts a plan that was not chosen but set; the file keeps one of
        the watched updates of all ranks, if there was any. None keeps nothing.
        """
        session = self._session
        recipe, ranks = session.recipe, session.ranks
        size = session.quantities.sizes[0] if recipe.batch_norm == "microbatch" else 0
        timelines = [one.timeline(ranks.rank, ranks.num == 1) for one in self._watched]
        seen = _Seen(
            [self._clock.between(*both) for both in self._timed],
            [one.total for one in timelines],
            Summary.median([one.summary(ranks.rank) for one in timelines]) if timelines else None,
            measured_ops(self._apart, ranks.rank, recipe.batch_norm, size, self._typed),
        )
        placement = self._typed(self._watched[0].placements[0]) if timelines and self._watched[0].placements else None
        self._watched, self._apart, self._timed = [], [], []
        self._count = self._last + 1
        everyone, loads = ranks.gather(seen), ranks.gather(self._watch.read())
        step: list[Timeline] = []
        if timelines and trace_file is not None:
            step = ranks.gather(timelines[middle_update([one.watched for one in everyone])])

        def first() -> Comparison:
            notes = [self._unseen] if self._unseen is not None else []
            before = scored
            if before is None and placement is not None and store is not None:
                before = _known(session, store, placement)
                notes.append(_HOW[before is not None])
            if step and trace_file is not None:
                _keep(trace_file, before, step)
            disturbed = beside_others(loads) if store is not None else []
            return _compared(session, everyone, before, placement, None if disturbed else store, [*notes, *disturbed])

        return ranks.first(first)


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
    if session.recipe.compile:
        return "layers are not watched in a compiled network"
    return None


def _known(session: Session, store: ProfileStore, placement: Placement) -> Scored | None:
    """What the store predicts of the plan, before it learns more."""
    passes = session.division.passes(session.merge)
    recipe, network = session.recipe, session.network
    staging = None
    if isinstance(network, StagedTraining):
        samples = tuple(len(piece.positions) for piece in passes)
        staging = Staging(session.plan.mesh, network.engine.staged(placement), samples, network.schedule)
    by_microbatch = recipe.batch_norm == "microbatch"
    microbatch = session.division.sizes[0] if by_microbatch else 0
    machine = measuring(recipe, session.device, session.ranks.on_host)
    costs = recipe.batch_norm, microbatch, session.is_recorded
    return recalled(store, machine, recipe.optimizer.name, session.plan, placement, len(passes), *costs, staging)


def _keep(path: Path, scored: Scored | None, step: Sequence[Timeline]) -> None:
    """Write an update of all ranks as a trace, with the predicted one, if there is one."""
    predicted = {"predicted": scored.timeline} if scored is not None else {}
    measured = Timeline(tuple(span for own in step for span in own.spans))
    with contextlib.suppress(OSError):  # a full disk is no reason to stop a training
        write_text(path, to_json(trace(**predicted, measured=measured)))


def _compared(
    session: Session,
    everyone: Sequence[_Seen],
    scored: Scored | None,
    placement: Placement | None,
    store: ProfileStore | None,
    notes: Sequence[str],
) -> Comparison:
    """What rank 0 makes of it; the store learns."""
    recipe = session.recipe
    machine = measuring(recipe, session.device, session.ranks.on_host)
    learned = _learn(everyone, machine, store)
    wholes = [one.whole for one in everyone]
    computing = [one.parts["forward"] + one.parts["backward"] if one is not None else 0.0 for one in wholes]
    mesh = session.plan.mesh
    if scored is not None:
        of_stages, rank = busiest_ranks(scored), scored.timeline.busiest
    else:
        stages = ([r for r in range(mesh.num_devices) if mesh.stage_of(r) == s] for s in range(session.plan.num_stages))
        of_stages = tuple(max(own, key=computing.__getitem__) for own in stages)
        rank = max(of_stages, key=computing.__getitem__)
    own = everyone[rank]
    before = [scored.timeline.summary(one) for one in (rank, *of_stages)] if scored is not None else []
    after = [one for one in (wholes[one] for one in (rank, *of_stages)) if one is not None]
    update_s = max(median(one.updates) for one in everyone) if own.updates else None
    if store is not None and update_s is not None and own.whole is not None:
        remember_run(
            store, machine, recipe.model.name, recipe.batch, session.plan, update_s - own.whole.parts.get("input", 0.0)
        )
    if own.whole is None:
        first, *_ = RECORDED_WATCHED if session.is_recorded else WATCHED
        notes = [f"the run was too short to be watched: that takes {first} updates"]
    elif len(of_stages) > 1:
        shown = f"{', '.join(map(str, of_stages[:-1]))} and {of_stages[-1]}"
        notes = [*notes, f"rank {rank} runs stage {mesh.stage_of(rank) + 1}; the layers are those of ranks {shown}"]
    return Comparison(
        model=recipe.model.name,
        plan=str(session.plan),
        devices=session.ranks.num,
        batch=recipe.batch,
        rank=rank,
        timed=len(own.updates),
        watched=len(own.watched),
        learned=learned,
        update=Both(
            scored.seconds if scored is not None else None,
            update_s,
        ),
        parts=parts_beside(of_all_stages(before), of_all_stages(after)),
        groups=groups_beside(placement, of_all_stages(before), of_all_stages(after), _stages(session, placement))
        if placement is not None
        else (),
        stages=stages_beside(before[1:], after[1:]) if len(of_stages) > 1 and len(after) > len(of_stages) else (),
        notes=tuple(notes),
        one_device_s=session.one_device_s,
    )


def _stages(session: Session, placement: Placement) -> tuple[int, ...]:
    """Of the calls; none where the network is in one piece."""
    network = session.network
    return network.engine.staged(placement).stages if isinstance(network, StagedTraining) else ()


def _learn(everyone: Sequence[_Seen], here: Device, store: ProfileStore | None) -> int:
    """Tell the store what the pieces took, the mean of the ranks that had them; how many there were."""
    found: dict[LocalOp, list[Times]] = {}
    for one in everyone:
        for local_op, times in one.local_ops.items():
            found.setdefault(local_op, []).append(times)
    if store is None or not found:
        return 0
    with contextlib.suppress(OSError):  # a full disk is no reason to stop a training
        store.put(here, {local_op: mean(times) for local_op, times in found.items()}, "run")
        return len(found)
    return 0
