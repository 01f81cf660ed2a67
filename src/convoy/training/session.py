"""The live objects of one run: put together under a plan, with what is said of that to the user; and what they do
together: batches, updates, evaluations.
"""

import copy
import operator
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from convoy import models
from convoy.comm.ranks import Ranks
from convoy.data import Batch, DataSet, Order, num_workers, training_batches
from convoy.data.imbalance import class_weights
from convoy.engine.coupling import microbatch_sizes
from convoy.engine.network import Network
from convoy.engine.recorded import Recorded, graph_on
from convoy.engine.stages import StagedNetwork
from convoy.engine.uncaptured import Uncaptured
from convoy.errors import ConvoyError, TooLargeError
from convoy.ops.memory import memory_in_stages, what_is_recomputed
from convoy.ops.registry import under_autocast
from convoy.planner.cost.calibrated import Calibrated
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.prediction import Scored, rank_memory
from convoy.planner.cost.prediction import most as most_of
from convoy.planner.cost.step import Staging
from convoy.planner.store import ProfileStore
from convoy.planner.workload import memory_of_updates
from convoy.plans.compression import rounds_of
from convoy.plans.fit import note_on_hosts
from convoy.plans.place import Placement
from convoy.plans.plan import Plan
from convoy.plans.schedule import PARTS_PER_STAGE, Schedule, bubble
from convoy.plans.traffic import rows_of_stages
from convoy.recipe.optim import learning_rate
from convoy.recipe.recipe import Recipe
from convoy.recipe.schema import in_words
from convoy.run.records import Derived, StageRecord
from convoy.tasks.metric import Metric
from convoy.tasks.task import Evaluation, Task
from convoy.training.build import TriedNetwork, has_batch_norm
from convoy.training.derived import Quantities, derive
from convoy.training.division import Division, Pass, divide, soonest, text
from convoy.training.evaluation import InputPipeline, evaluate
from convoy.training.finite import FiniteGuard
from convoy.training.gradients import Exchange, divided_network
from convoy.training.noise import interval
from convoy.training.optimizer import create_optimizer, thaws
from convoy.training.precision import Scaler, lowered
from convoy.training.resume import Code
from convoy.training.state import AveragedWeights, MovingAverage, RunState, SlowWeights
from convoy.training.step import TrainingStep
from convoy.units import plural, rough_percent, size


@dataclass(frozen=True)
class ChosenPlan:
    """The plan that runs; where the planner chose it, sentences about that, and what it predicted."""

    plan: Plan
    notes: tuple[str, ...] = ()
    scored: Scored | None = None
    # Microbatches of each part of the batch with which devices end at the same time that are not equally fast; None: as
    # even as can be, or as the recipe says.
    shares: tuple[int, ...] | None = None
    staging: Staging | None = None  # in which passes, and in which order, it goes through the stages
    one_device_s: float | None = None  # predicted seconds of an update on one device


@dataclass
class Prepared(TriedNetwork):
    """What a session is made of, whatever the plan."""

    data: DataSet
    task: Task
    quantities: Quantities
    ranks: Ranks
    keeps_times: bool  # what is measured is kept for later plans, and what is kept is used
    derived: list[Derived]  # what follows from the recipe, for the log and the report
    notes: list[str]  # sentences about what was decided, likewise
    code: Code  # what the plain network computes

    @property
    def profiles(self) -> ProfileStore | None:
        """What learns from measurements; None keeps nothing."""
        return ProfileStore() if self.keeps_times else None

    def new_pipeline(self) -> InputPipeline:
        """What takes the data's pictures to the device."""
        memory_format = torch.channels_last if self.recipe.channels_last else torch.contiguous_format
        return InputPipeline(self.data, self.device, memory_format)

    def order(self) -> Order:
        """The order of the training samples."""
        labels, section = self.data.train.labels, self.recipe.data
        weights = None
        if section.sampling is not None:
            weights = class_weights(section.sampling, labels, self.data.classes, "data.sampling")
        return Order(len(labels), self.recipe.batch, self.recipe.seed, section.repeats, weights, labels)

    def batches_of(self, positions: range, first_update: int, num_updates: int) -> Generator[Batch, None, None]:
        """The samples at some positions of the batches of some updates."""
        return training_batches(
            self.data,
            self.recipe.data,
            self.order(),
            first_update=first_update,
            num_updates=num_updates,
            seed=self.recipe.seed,
            positions=positions,
            pin_memory=self.device.type == "cuda",
        )


@dataclass
class Session(Prepared):
    """The live objects of one run."""

    chosen: ChosenPlan  # how the ranks divide the work
    division: Division  # which microbatches are whose
    schedule: Schedule  # of passes through stages
    counts: models.Counts  # parameters and FLOPs of the whole model
    pipeline: InputPipeline
    state: RunState
    merge: int  # microbatches that run in one pass; 1 where the network needs them one by one
    stages: list[StageRecord]  # of the network; none where it is in one piece
    workers: int  # processes of this rank that make pictures ready, by now
    thaws: dict[str, int]  # tensors that are frozen at first, each with the update from which on it is trained
    frozen: set[str] | None = None  # those that are frozen by now; None before the first update

    @property
    def plan(self) -> Plan:
        return self.chosen.plan

    @property
    def scored(self) -> Scored | None:
        """What was predicted of the plan; None where nothing was."""
        return self.chosen.scored

    @property
    def plan_with_cuts(self) -> Plan:
        """The plan that runs, with the layers at which stages begin, whether somebody has said these or not: as on
        other devices the cuts are others, they are kept here, and the recipe asks for none."""
        network = self.network
        return replace(self.plan, stages=network.stages.begins) if isinstance(network, StagedNetwork) else self.plan

    @property
    def network(self) -> Network:
        """The model as it is trained under the plan."""
        return self.state.exchange.network

    @property
    def passes(self) -> list[Pass]:
        """Those of an update."""
        return self.division.passes(self.merge, late=not self.recipe.reproducible)

    def typed(self, placement: Placement) -> Placement:
        """A placement with the types that autocast gives its values."""
        return replace(placement, graph=under_autocast(placement.graph, lowered(self.recipe), self.device.type))

    def staging(self, placement: Placement) -> Staging | None:
        """How the passes of an update go through the stages, if there are any."""
        staged, samples = self.network.staged(placement), tuple(len(piece.positions) for piece in self.passes)
        return None if staged is None else Staging(placement.mesh, staged, samples, self.schedule)

    @property
    def normed_samples(self) -> int:
        """Samples over which batch norm takes its statistics; 0 where that is no microbatch."""
        return self.division.sizes[0] if self.recipe.batch_norm == "microbatch" else 0

    @property
    def why_unwatched(self) -> str | None:
        """Why the calls of the network cannot be watched; None where they can."""
        if isinstance(self.network, Uncaptured):
            return "layers are not watched in a network that is not seen as one graph"
        return "layers are not watched in a compiled network" if self.recipe.compile else None

    @property
    def reason_not_recorded(self) -> str | None:
        """Why updates cannot be recorded and replayed on any GPU; None where that is tried."""
        if isinstance(self.network, StagedNetwork):
            return "the plan has stages, which send to each other"
        return self.why_not_recorded(self.ranks.num, self.ranks.group)

    @property
    def is_recorded(self) -> bool:
        """Whether updates are recorded and replayed here."""
        return self.are_recorded(self.reason_not_recorded)

    @property
    def why_no_noise(self) -> str:
        """Why the gradient noise scale cannot be measured; empty where it can."""
        recipe, joint = self.recipe, self.recipe.batch_norm != "microbatch" and has_batch_norm(self.model)
        reasons = {
            "as said": not recipe.noise_scale,
            "an update is one microbatch, and it takes two: lower --microbatch": len(self.division.sizes) < 2,
            f"batch_norm={recipe.batch_norm} lets the samples of all microbatches depend on each other": joint,
            "a device's gradient is not that of the batch": recipe.parallel.approximate is not None,
            "one microbatch alone would be another program": recipe.compile or isinstance(self.network, Uncaptured),
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    @property
    def noise_every(self) -> int:
        """Every how many updates the gradient noise scale is sampled; 0 where it is not."""
        return 0 if self.why_no_noise else interval(self.division, self.plan.num_stages, self.is_recorded)

    @property
    def metric(self) -> Metric:
        """The one that says which weights are best."""
        return self.task.metrics[0] if self.recipe.best is None else self.task.metric(self.recipe.best)

    def evaluate(self, is_asked_to_stop: Callable[[], bool] = lambda: False, at_end: bool = False) -> Evaluation:
        """Evaluate what the run would deliver now, with averaged weights if there are any, on all of the split that is
        evaluated while it trains, or at its end. `is_asked_to_stop` is called before each batch, the same on all ranks,
        and ends in a StoppedError; nothing has changed then.
        """
        announce = partial(setattr, self.network, "samples")
        size, pipeline = self.evaluation_batch(), copy.copy(self.pipeline)
        pipeline.data = self.data.at_end() if at_end else self.data
        with self.state.delivered() as model:
            return evaluate(model, pipeline, self.recipe, self.task, size, self.ranks, announce, is_asked_to_stop)

    def evaluation_batch(self) -> int:
        """Samples of a pass: as many as in training, but no more than a rank's even share."""
        num, merge = len(self.quantities.sizes), self.merge
        largest = sum(self.quantities.sizes[: -(-num // -(-num // merge))])
        if self.recipe.reproducible:
            return largest
        if self.probe.by_batch:  # the same on any number of devices
            return self.quantities.sizes[0]
        return max(1, min(largest, -(-len(self.data.test) // self.ranks.num_sample_ranks)))

    def batches(self, first_update: int, num_updates: int) -> Generator[Batch, None, None]:
        """This rank's samples of the batches of some updates."""
        return self.batches_of(self.division.positions(self.ranks.sample_rank), first_update, num_updates)

    def divide_by_speed(self) -> str | None:
        """With `shares=auto`, let the slowest rank end soonest, and say so. All ranks call it, before an update.

        It is measured here, not by the planner, which has measured no call of a plan that is given.
        """
        ranks, sizes = self.ranks, self.division.sizes
        if self.recipe.parallel.shares != "auto" or ranks.num_sample_ranks == 1:
            return None
        seconds = self.step().microbatch_seconds(ranks)
        self.division = Division(sizes, soonest(len(sizes), seconds))
        times = ", ".join(f"{1e3 * time:.3g}" for time in seconds)
        shares = f"shares {text(self.division.counts)} of {len(sizes)} microbatches"
        return f"{shares}, by measured times of {times} ms a microbatch"

    def choose_interval(self) -> str | None:
        """With `local_sgd=auto`, say how often weights are averaged from now on: so that this takes no more than a
        fifth of the time, or, while devices go on meanwhile, no more than they compute. All ranks call it, before an
        update.
        """
        exchange, ranks = self.state.exchange, self.ranks
        if self.recipe.parallel.local_sgd != "auto" or exchange.every is not None:
            return None
        microbatch_s = self.step().microbatch_seconds(ranks)
        update_s = max(map(operator.mul, microbatch_s, self.division.counts))
        averaging_s = max(ranks.gather(exchange.averaging_seconds()))
        exchange.every = rounds_of(averaging_s / update_s, self.recipe.parallel.averaging.staleness)
        every = f"weights are averaged every {plural(exchange.every, 'update')}"
        return f"{every}, as that takes {in_words(averaging_s)}, and an update {in_words(update_s)} without it"

    def guard(self) -> FiniteGuard:
        """What looks at every update before it is made."""
        return FiniteGuard(self.network, self.ranks, gradients=not self.state.scaler.is_enabled())

    def train_in(self, update: int, recorded: Recorded | None = None) -> None:
        """Freeze the layers that an update is not to train, and no others; what is `recorded` of earlier ones is then
        recorded anew. All ranks call it before every update."""
        if self.thaws and (self.frozen is None or update in self.thaws.values()):
            was, self.frozen = self.frozen or set(), {name for name, end in self.thaws.items() if update < end}
            self.state.exchange.train_others(self.frozen - was, was - self.frozen)
            if recorded is not None:
                recorded.record_anew()

    def step(self) -> TrainingStep:
        """The function that does one weight update. All ranks call it."""
        recipe, passes = self.recipe, self.passes
        self.state.exchange.divide(self.division, len(passes))
        step = TrainingStep(
            recipe,
            self.task,
            self.state,
            self.pipeline,
            self.quantities.schedule,
            passes,
            rank=self.ranks.sample_rank,
            reseed=self.probe.draws,
            order=self.schedule,
            guard=self.guard() if recipe.on_nan == "skip" else None,
        )
        graph = graph_on(self.device)
        if graph is not None and self.is_recorded:
            context, abandon = self.network.context, self.state.exchange.abandon
            step.recorded = Recorded(
                step.to_record, self.model, context, graph, agree=self.ranks.first_of, abandon=abandon
            )
        return step


def assemble(ready: Prepared, chosen: ChosenPlan) -> Session:
    """The session under a plan, with the planner's shares and stages where the recipe gives none; a TooLargeError where
    it is predicted to need more memory than is allowed. All ranks call it."""
    recipe, data, ranks, model, plan = ready.recipe, ready.data, ready.ranks, ready.model, chosen.plan
    staging = chosen.staging if plan.num_stages > 1 else None
    sizes = ready.quantities.sizes
    if staging is not None:  # microbatches small enough for as many passes as the planner has found
        sizes, _ = ready.divisible_sizes(plan.parts, plan.parts * len(staging.samples))
    counts = models.count(model, ready.image_shape)
    example = torch.empty(sizes[0], *ready.image_shape, device=ready.device)
    schedule = recipe.parallel.schedule or (staging.schedule if staging is not None else "1f1b")
    network = divided_network(model.train(), plan, example, recipe)
    exchange = Exchange(network, recipe, ready.quantities.average_from)
    ranks.follow(plan.mesh, network.sample_axes)
    num_passes = 1
    if plan.num_stages > 1:
        of_part = len(staging.samples) if staging is not None else PARTS_PER_STAGE * plan.num_stages
        num_passes = of_part * ranks.num_sample_ranks
    sharing = ranks.num // ranks.num_sample_ranks
    merge, why_merged = ranks.broadcast(ready.microbatches_in_pass(sizes, sharing, num_passes))
    ready.check_coupling(ranks)
    shares = recipe.parallel.shares if ranks.num_sample_ranks > 1 else None
    given_shares = shares if isinstance(shares, tuple) else None
    if chosen.shares is not None and given_shares is None:
        division = Division(sizes, chosen.shares)
    else:
        division = divide(sizes, ranks.num_sample_ranks, given_shares)
    exchange.weigh(division)
    workers, why = num_workers(data, recipe.data)
    samples = [len(division.positions(part)) for part in range(ranks.num_sample_ranks)]
    quantities = replace(ready.quantities, sizes=sizes)
    numbers = derive(recipe, quantities, len(data.train), samples=samples, workers=(workers, why))
    in_one_pass = Derived("microbatches in one pass", merge, why_merged, "tried before training: docs/numerics.md")
    scaler = Scaler(ready.device, recipe.precision, ranks.any if exchange.divides_gradients else None)
    averaged: AveragedWeights | None = MovingAverage(model, recipe.ema.decay) if recipe.ema else None
    if recipe.lookahead is not None:
        averaged = SlowWeights(model, recipe.lookahead, ready.quantities.total_updates)
    optimizer = create_optimizer(model, recipe.optimizer, ready.quantities.lr, ready.quantities.group_ends)
    session = Session(
        **vars(ready) | {"quantities": quantities, "derived": [*numbers, *ready.derived, in_one_pass]},
        chosen=chosen,
        division=division,
        schedule=schedule,
        counts=counts,
        pipeline=ready.new_pipeline(),
        state=RunState(exchange, optimizer, scaler, averaged),
        merge=merge,
        stages=[],
        workers=workers,
        thaws=thaws(model, recipe.optimizer.freeze, ready.quantities.updates),
    )
    session.notes = [*recipe.notes(), *data.notes, *ready.notes, *chosen.notes, *_notes(session)]
    session.derived += _rows(session)
    _check_sizes(session)
    return session


def _check_sizes(session: Session) -> None:
    """Refuse a plan that cannot have pictures of all sizes that training and evaluation show, before either begins."""
    data, network, section = session.data, session.network, session.recipe.data
    growing = section.progressive.sizes(data.image_size) if section.progressive is not None else set()
    of_evaluation = {data.evaluation_size} - {None, data.image_size}
    samples = max(tuple(map(len, piece.parts)) for piece in session.passes)
    for training, sizes in ((True, growing - {data.image_size}), (False, of_evaluation)):
        for side in sorted(filter(None, sizes)) if not isinstance(network, Uncaptured) else ():
            try:
                network.staged(network.example_placement(training, samples, (side, side)))
            except ConvoyError as error:
                key = "progressive" if training else "evaluation_size"
                raise ConvoyError(
                    f"pictures of {side}×{side} pixels (data.{key}) cannot run under the plan {session.plan}: {error}: "
                    "choose another size, plan or network"
                ) from error


def _notes(session: Session) -> Iterator[str]:
    """Sentences on what follows from the plan; the session has its stages after that."""
    recipe, plan, network, passes = session.recipe, session.plan, session.network, session.passes
    yield from note_on_hosts(plan, session.ranks.on_host)
    if recipe.data.progressive is not None:
        side = session.data.image_size
        yield f"training pictures grow to {side}×{side} pixels: what is predicted is an update of the largest"
    if session.thaws:
        parts = ", ".join(part for part in recipe.optimizer.freeze if ":" in part)
        yield f"frozen at first: {parts}; what is predicted is an update after that"
    if recipe.parallel.shares is not None and session.ranks.num_sample_ranks == 1:
        yield "--shares has no effect: the plan does not divide the batch"
    limit = recipe.parallel.memory_bytes
    is_staged, is_captured = isinstance(network, StagedNetwork), not isinstance(network, Uncaptured)
    if is_captured and (limit is not None or is_staged or network.recomputes):
        most = max((tuple(map(len, piece.parts)) for piece in passes), key=max)
        placement = session.typed(network.example_placement(True, most))  # of the largest pass
        staging = session.staging(placement)
        in_flight = [] if staging is None else [staging.in_flight(stage) for stage in range(staging.number)]
        if staging is not None:
            session.stages = _stages(placement, staging, in_flight)
            yield _cuts(session, len(passes))
        if limit is not None:
            _check_memory(session, placement, staging, limit)
        recomputation = None
        if network.recomputes:
            recomputation = what_is_recomputed(placement, network.staged(placement), in_flight)
        if recomputation is not None:
            yield recomputation
    elif limit is not None:
        yield "--memory-limit has no effect: the memory of a network that cannot be captured is not predicted"
    if not is_staged and recipe.parallel.schedule is not None:
        yield "--schedule has no effect: the plan has no stages"


def _stages(placement: Placement, staging: Staging, in_flight: list[int]) -> list[StageRecord]:
    memory = memory_in_stages(placement, staging.staged, in_flight)
    records = []
    for row in rows_of_stages(placement, staging.staged):
        held = max((memory[rank] for rank in row.ranks), key=lambda of_rank: of_rank.total)
        sent = {"forward": row.received_bytes.forward, "backward": row.received_bytes.backward}
        kept = {name: getattr(held, name) for name in ("parameters", "gradients", "activations")}
        records.append(StageRecord(layer=row.begins, ranks=list(row.ranks), takes=list(row.takes), **sent, **kept))
    return records


def _check_memory(session: Session, placement: Placement, staging: Staging | None, limit: float) -> None:
    update = memory_of_updates(partial(optimizer_for, recipe=session.recipe))
    costs = Costs(Calibrated({}), update=update, on_cpu=session.device.type == "cpu")
    needed = most_of(rank_memory(placement, costs, staging)).total
    if needed > limit:
        raise TooLargeError(
            f"the plan {session.plan} needs {size(needed)} on a device for weights, gradients, optimizer and "
            f"activations, and --memory-limit is {session.recipe.parallel.memory_limit}: let --plan auto look for one "
            "that fits, or add --recompute or smaller microbatches"
        )


def optimizer_for(parameters: list[nn.Parameter], recipe: Recipe) -> Optimizer:
    """That of a recipe, for some parameters."""
    return create_optimizer(
        nn.ParameterList(parameters), recipe.optimizer, learning_rate(recipe.optimizer, recipe.batch)
    )


def _cuts(session: Session, passes: int) -> str:
    """Where the stages begin, how the batch goes through them, and what to do where they wait for much of the time."""
    recipe, plan, schedule = session.recipe, session.plan, session.schedule
    begins = ", ".join(f"stage {number} from {stage.layer}" for number, stage in enumerate(session.stages, 1))
    waiting = bubble(schedule, passes, plan.num_stages)
    sentence = f"{begins}; {plural(passes, 'pass', 'passes')}, {schedule}, stages wait about {rough_percent(waiting)} "
    sentence += "of the time"
    finest = min(PARTS_PER_STAGE * plan.num_stages, recipe.batch // plan.parts)
    if waiting < 0.25:
        return sentence
    if recipe.batch_norm != "microbatch":
        every = f"batch_norm={recipe.batch_norm} takes all microbatches at once"
        return f"{sentence}: {every}, and batch_norm=microbatch one after the other"
    if finest <= passes:
        return f"{sentence}: a larger --batch can have more microbatches"
    normed = " (another training, as batch norm is of each microbatch)" if has_batch_norm(session.model) else ""
    fewer = rough_percent(bubble(schedule, finest, plan.num_stages))
    return f"{sentence}: with --microbatches {finest * plan.parts} about {fewer}{normed}"


def _rows(session: Session) -> Iterator[Derived]:
    """Rows for the log and the report about devices and plan."""
    every, why = session.noise_every, session.why_no_noise or "1 % of the time at most"
    yield Derived("gradient noise scale", f"every {plural(every, 'update')}" if every else "not measured", why)
    section, plan, division, num_devices = session.recipe.parallel, session.plan, session.division, session.ranks.num
    if session.stages:
        through = f"through {plan.num_stages} stages"
        yield Derived("passes in an update", len(session.passes), through, "docs/plans.md")
        predicted = "predicted to be faster" if session.chosen.staging is not None else "the default"
        why = "as said" if section.schedule is not None else predicted
        yield Derived("schedule", session.schedule, why, "changes no result: docs/plans.md")
    if num_devices == 1:
        return
    yield Derived("devices", num_devices, f"plan {plan}", "no part of the experiment: docs/numerics.md")
    parts = len(division.counts)
    if parts > 1:
        if section.shares is not None:
            shared = "measured" if section.shares == "auto" else "in the shares given"
        elif division.counts == microbatch_sizes(len(division.sizes), parts):
            shared = "as even as can be"
        else:
            shared = "by the speeds that the planner measured"
        formula = f"{len(division.sizes)} over {parts}, {shared}"
        source = "each computes its own samples; the sum is that of one device"
        yield Derived("microbatches of each part", text(division.counts), formula, source)
    approximate = section.approximation(plan)
    if approximate is not None:
        yield Derived("approximate", approximate, "as said", "the result depends on the devices")
