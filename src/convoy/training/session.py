"""The live objects of one run, and what they do together: batches, updates, evaluations."""

import copy
import operator
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial

import torch

from convoy import models
from convoy.comm.ranks import Ranks
from convoy.data.batch import Batch
from convoy.data.dataset import DataSet
from convoy.data.imbalance import class_weights
from convoy.data.loader import training_batches
from convoy.data.order import Order
from convoy.engine.network import Network
from convoy.engine.recorded import Recorded, graph_on
from convoy.engine.stages import StagedNetwork
from convoy.engine.uncaptured import Uncaptured
from convoy.ops.registry import under_autocast
from convoy.planner.cost.prediction import Scored
from convoy.planner.cost.step import Staging
from convoy.planner.store import ProfileStore
from convoy.plans.compression import rounds_of
from convoy.plans.place import Placement
from convoy.plans.plan import Plan
from convoy.plans.schedule import Schedule
from convoy.recipe.schema import in_words
from convoy.run.records import Derived, StageRecord
from convoy.tasks.metric import Metric
from convoy.tasks.task import Evaluation, Task
from convoy.training.build import TriedNetwork, has_batch_norm
from convoy.training.derived import Quantities
from convoy.training.division import Division, Pass, soonest, text
from convoy.training.evaluation import InputPipeline, evaluate
from convoy.training.finite import FiniteGuard
from convoy.training.gradients import noise_interval
from convoy.training.precision import lowered
from convoy.training.resume import Code
from convoy.training.state import RunState
from convoy.training.step import TrainingStep
from convoy.units import plural


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
    thaws: dict[str, int]  # tensors that are frozen at first, each with the update from which on it is trained

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
    frozen: set[str] | None = None  # those that are frozen by now; None before the first update

    @property
    def plan(self) -> Plan:
        return self.chosen.plan

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
        """Why updates are not recorded and replayed here; None where they are."""
        return self.why_not_recorded(self.ranks.num, self.ranks.group, self.plan.num_stages)

    @property
    def is_recorded(self) -> bool:
        return self.reason_not_recorded is None

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
        return 0 if self.why_no_noise else noise_interval(self.division, self.plan.num_stages, self.is_recorded)

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
