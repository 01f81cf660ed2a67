"""The live objects of one run, and what they do together: batches, updates, evaluations."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from convoy import models
from convoy.comm.ranks import Ranks
from convoy.data import Batch, DataSet, Order, training_batches
from convoy.engine import Probe
from convoy.engine.recorded import Recorded, graph_on
from convoy.engine.uncaptured import Uncaptured
from convoy.planner import Scored
from convoy.planner.cost.store import ProfileStore
from convoy.plans.plan import Plan
from convoy.training.build import is_recorded, why_not_recorded
from convoy.training.classification import InputPipeline
from convoy.training.code import Code
from convoy.training.derived import Quantities
from convoy.training.division import Division
from convoy.training.evaluate import Evaluation, evaluate
from convoy.training.finite import FiniteGuard
from convoy.training.parallel import TrainedNetwork
from convoy.training.recipe import Recipe
from convoy.training.records import Derived, StageRecord
from convoy.training.state import RunState
from convoy.training.step import TrainingStep


@dataclass
class Prepared:
    """What a session is made of, whatever the plan."""

    recipe: Recipe
    data: DataSet
    quantities: Quantities
    model: nn.Module  # the plain network; a session makes it its own
    probe: Probe  # what the network has shown when it was tried out
    device: torch.device
    ranks: Ranks
    profiles: ProfileStore | None  # learns what was measured; None keeps nothing
    derived: list[Derived]  # what follows from the recipe, for the log and the report
    code: Code  # what the plain network computes

    def new_pipeline(self) -> InputPipeline:
        """What takes the data's pictures to the device."""
        memory_format = torch.channels_last if self.recipe.channels_last else torch.contiguous_format
        return InputPipeline(self.data, self.device, memory_format)

    def batches_of(
        self,
        positions: range,
        first_update: int,
        num_updates: int,
        workers: int | None = None,
    ) -> Generator[Batch, None, None]:
        """The samples at some positions of the batches of some updates, made by as many `workers` as the recipe says,
        or as are said here."""
        config = self.recipe.data if workers is None else self.recipe.data.model_copy(update={"workers": workers})
        return training_batches(
            self.data,
            config,
            Order(len(self.data.train), self.recipe.batch, self.recipe.seed),
            first_update=first_update,
            num_updates=num_updates,
            seed=self.recipe.seed,
            positions=positions,
            pin_memory=self.device.type == "cuda",
        )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return self.data.channels, self.data.image_size, self.data.image_size

    @property
    def why_not_recorded(self) -> str | None:
        """Why updates cannot be recorded and replayed on any GPU; None where that is tried."""
        return why_not_recorded(self.recipe, self.probe, self.ranks.num, self.device, self.ranks.group)

    @property
    def is_recorded(self) -> bool:
        """Whether updates are recorded and replayed here."""
        return is_recorded(self.recipe, self.device, self.why_not_recorded)


@dataclass
class Session(Prepared):
    """The live objects of one run."""

    plan: Plan  # how the ranks divide the work
    division: Division  # which microbatches are whose
    network: TrainedNetwork  # the model as it is trained under the plan
    counts: models.Counts  # parameters and FLOPs of the whole model
    pipeline: InputPipeline
    state: RunState
    merge: int  # microbatches that run in one pass; 1 where the network needs them one by one
    notes: list[str]  # sentences about what was decided, for the log and the report
    scored: Scored | None = None  # what was predicted of the plan; None where nothing was
    # Predicted seconds of an update on one device; None where nothing was, or one runs.
    one_device_s: float | None = None
    stages: list[StageRecord] = field(default_factory=list)  # of the network; none where it is in one piece
    workers: int = 0  # processes of this rank that make pictures ready

    @property
    def normed_samples(self) -> int:
        """Samples over which batch norm takes its statistics; 0 where that is no microbatch."""
        return self.division.sizes[0] if self.recipe.batch_norm == "microbatch" else 0

    @property
    def why_unwatched(self) -> str | None:
        """Why the calls of the network cannot be watched; None where they can."""
        if isinstance(self.network.engine, Uncaptured):
            return "layers are not watched in a network that is not seen as one graph"
        return "layers are not watched in a compiled network" if self.recipe.compile else None

    @property
    def plan_with_cuts(self) -> Plan:
        """The plan that runs, with the layers at which stages begin, whether somebody has said these or not."""
        stages = self.network.stages
        return self.plan if stages is None else replace(self.plan, stages=stages.stages.begins)

    def evaluate(self, is_asked_to_stop: Callable[[], bool] = lambda: False) -> Evaluation:
        """Evaluate what the run would deliver now, with averaged weights if there are any, on all of the test split.
        `is_asked_to_stop` is called before each batch, the same on all ranks, and ends in a StoppedError; nothing has
        changed then.
        """
        self.network.synchronize()
        announce = partial(setattr, self.network.engine, "samples")
        size, num_classes = self.evaluation_batch(), len(self.data.classes)
        with self.state.delivered() as model:
            return evaluate(
                model, self.pipeline, self.recipe, num_classes, size, self.ranks, announce, is_asked_to_stop
            )

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

    def guard(self) -> FiniteGuard:
        """What looks at every update before it is made."""
        return FiniteGuard(self.network, self.ranks, gradients=not self.state.scaler.is_enabled())

    def step(self) -> TrainingStep:
        """The function that does one weight update. All ranks call it."""
        recipe = self.recipe
        passes = self.division.passes(self.merge, late=not recipe.reproducible)
        self.network.divide(self.division, len(passes))
        step = TrainingStep(
            recipe,
            self.state,
            self.pipeline,
            self.quantities.schedule,
            passes,
            rank=self.ranks.sample_rank,
            reseed=self.probe.draws,
            last_waits=recipe.reproducible and self.ranks.num > 1,
            guard=self.guard() if recipe.on_nan == "skip" else None,
        )
        graph = graph_on(self.device)
        if graph is not None and self.is_recorded:
            context, abandon = self.network.context, self.network.abandon
            step.recorded = Recorded(
                step.to_record, self.model, context, graph, agree=self.ranks.first_of, abandon=abandon
            )
        return step

    @property
    def why_not_recorded(self) -> str | None:
        """Why updates cannot be recorded and replayed on any GPU; None where that is tried."""
        if self.network.stages is not None:
            return "the plan has stages, which send to each other"
        return super().why_not_recorded
