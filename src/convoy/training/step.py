"""One weight update of the global batch: passes over its microbatches, gradients, optimizer."""

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from convoy.comm.collectives import all_reduce
from convoy.comm.position import current
from convoy.comm.ranks import Ranks
from convoy.data.batch import Batch
from convoy.data.transforms import mix
from convoy.engine.profiling import steady
from convoy.engine.recorded import Recorded
from convoy.engine.stage import Flight
from convoy.engine.stages import StagedNetwork
from convoy.errors import ConvoyError
from convoy.ops.random_bits import fold
from convoy.plans.schedule import Action
from convoy.plans.schedule import Schedule as StageOrder
from convoy.recipe.optim import Schedule
from convoy.recipe.recipe import Recipe
from convoy.tasks.task import Task
from convoy.training.division import Pass
from convoy.training.evaluation import InputPipeline
from convoy.training.finite import FiniteGuard
from convoy.training.gradients import GradientNoise
from convoy.training.optimizer import set_rates
from convoy.training.precision import autocast_of
from convoy.training.state import RunState


def wait_for(device: torch.device) -> None:
    """Until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


StepPart = Literal["input", "forward", "backward", "gradient", "update", "rest"]
# Images and targets of a pass, and, where a loss is no mean over samples, the pass's share in that of the global batch.
_Inputs = Callable[[Pass], tuple[Tensor, ...]]
_WARM_UP, _MEASURED = 3, 5  # passes over the batch before microbatches are timed, and those in which they are


@dataclass
class _RunningPass:
    """A pass between its forward and its backward pass; the loss and outputs are None in all stages but the last."""

    loss: Tensor | None
    outputs: Any
    targets: Tensor
    flight: Flight | None  # on its way through this rank's stage, if there are any


@dataclass
class Update:
    """The record of one update on this rank, which whoever looks at a training reads; the last four are the recorder's.

    Losses and scores are scalars on the device, which add up, over all ranks, to the mean loss and the task's score of
    all samples, as the number of right answers. They are not added here: on small networks every operation counts.
    """

    images: int  # of the global batch
    losses: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    bad: str | None = None  # why the weights were left as they are; None where they were changed
    seconds: float = 0.0  # from asking for its batch to its end
    wait_s: float = 0.0  # for its batch
    # Work by the clock of the host, without waits for other ranks; 0 on a GPU, which that clock does not see.
    own_s: float = 0.0
    unreadable: list[tuple[int, int, str]] = field(default_factory=list)  # pictures: update, sample and reason


@dataclass
class TrainingStep:
    """Computes the gradient of the mean loss over the global batch and updates the weights."""

    recipe: Recipe
    task: Task
    state: RunState
    pipeline: InputPipeline
    schedule: Schedule
    passes: list[Pass]  # those of an update
    rank: int  # this rank's place among the parts of each pass
    reseed: bool  # torch's generators before each pass, for networks that draw numbers by themselves
    order: StageOrder = "1f1b"  # of passes through stages
    guard: FiniteGuard | None = None  # leaves out updates that are not finite; None makes all
    separate: bool = False  # exchange gradients after the passes, not meanwhile
    mark: Callable[[StepPart], None] = current.to  # told of the parts of an update as they begin
    recorded: Recorded | None = None  # replays the passes; None where they run as ever
    records: bool = False  # the passes are to be recorded
    noise: GradientNoise | None = None  # samples some updates

    def __post_init__(self) -> None:
        self.exchange, self.optimizer, self.scaler = self.state.exchange, self.state.optimizer, self.state.scaler
        self.network = self.exchange.network
        self._stage = self.network if isinstance(self.network, StagedNetwork) else None
        self.num_samples = self.recipe.batch
        self._mixing = self.recipe.data.mix if self.recipe.data.mix.on else None
        self._autocast = autocast_of(self.recipe, self.pipeline.device)
        self._own_mean = False  # the loss is the mean over this rank's own samples, not those of the global batch
        self._recorded_as: Any = None  # height and width of the pictures of the recording, and whose mean it takes

    def __call__(self, batch: Batch, update: int) -> Update:
        """Do weight update number `update` (counted from 0) with this rank's samples of a global batch."""
        current.update = update
        self.mark("rest")
        undo = self._undoing() if self.guard is not None else None
        noise = self.noise if self.noise is not None and self.noise.due(update) else None
        small = self._microbatch_norm(noise, batch, update) if noise is not None else 0.0
        result = self._whole_gradient(batch, update)
        set_rates(self.optimizer, self.schedule.lr(update), update)
        if self.guard is not None and undo is not None and not self.guard.passes(result.losses):
            undo()
            bad = self.guard.explain(update, result.losses, lambda: self._whole_gradient(batch, update, replays=False))
            undo()
            self.exchange.updated(update, self.schedule.lr(update))
            return Update(self.num_samples, bad=bad)
        if noise is not None:
            noise.add(small, self._squared_norm())
        self.mark("gradient")
        self.exchange.merge(update)
        set_rates(self.optimizer, self.schedule.lr(update), update)  # what comes late may be of a group that ended
        self.mark("rest")
        if self.recipe.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            self.exchange.clip(self.recipe.clip_norm)
        self.mark("update")
        with self.exchange.stepping(self.optimizer):
            self.scaler.step(self.optimizer)
        self.mark("rest")
        self.scaler.update()
        self.exchange.updated(update, self.schedule.lr(update))
        if self.state.averaged is not None:
            self.state.averaged.update(self.network.model)
        return result

    def _microbatch_norm(self, noise: GradientNoise, batch: Batch, update: int) -> float:
        """The squared norm of the mean gradient of the first microbatch, by a pass that changes nothing."""
        undo, passes = self._undoing(), self.passes
        self.passes = noise.one.passes(1)
        self.exchange.divide(noise.one, 1)
        self._whole_gradient(batch, update, replays=False)
        set_rates(self.optimizer, self.schedule.lr(update), update)
        norm = self._squared_norm() * (self.num_samples / noise.one.sizes[0]) ** 2
        undo()
        self.passes = passes
        self.exchange.divide(noise.division, len(passes))
        return norm

    def _squared_norm(self) -> float:
        return (float(self.exchange.norm()) / (self.scaler.get_scale() if self.scaler.is_enabled() else 1.0)) ** 2

    def _undoing(self) -> Callable[[], None]:
        """What puts back all that passes change from now on: buffers and gradients."""
        kept = [buffer.clone() for buffer in self.network.model.buffers()]

        @torch.no_grad()
        def undo() -> None:
            for buffer, before in zip(self.network.model.buffers(), kept, strict=True):
                buffer.copy_(before)
            self.optimizer.zero_grad(set_to_none=True)

        return undo

    def microbatch_seconds(self, ranks: Ranks) -> list[float]:
        """Seconds of a microbatch on the slowest rank of each part of the batch, by passes that change nothing. All
        ranks call it.

        Gradients are exchanged apart from it; in the tree of a reproducible run that begins with the last backward
        pass, which is left out. What layers exchange is in it, so under plans that divide layers, or with batch norm
        over the global batch, ranks that wait for others look slower than they are.
        """
        undo, batch = self._undoing(), random_batch(self)
        last_part = "backward" if self.recipe.reproducible else "gradient"
        ends: list[float] = []

        def mark(part: StepPart) -> None:
            current.to(part)
            if part == last_part:
                wait_for(self.pipeline.device)
                ends.append(time.perf_counter())

        seconds = []
        self.separate, self.mark = True, mark
        for number in range(_WARM_UP + _MEASURED):
            began = time.perf_counter()
            self._whole_gradient(batch, number)
            seconds.append(ends[-1] - began)
        self.separate, self.mark = False, current.to
        undo()
        microbatches = sum(len(piece.microbatches[self.rank]) for piece in self.passes)
        medians = ranks.gather((ranks.sample_rank, statistics.median(seconds[_WARM_UP:]) / max(1, microbatches)))
        return [max(s for part, s in medians if part == number) for number in range(ranks.num_sample_ranks)]

    def _whole_gradient(self, batch: Batch, update: int, replays: bool = True) -> Update:
        """Leave the gradient of the global batch in the parameters."""
        self.optimizer.zero_grad(set_to_none=True)
        targets, self._own_mean = self.pipeline.targets(batch), self.exchange.is_local(update)
        inputs = partial(self._input, batch, targets, self._global_count(targets), update)
        if self.recorded is None or not (replays and self.records) or self.separate:
            return self._passes(update, inputs)
        if self._recorded_as != (form := (batch.images.shape[2:], self._own_mean)):
            self._recorded_as = form
            self.recorded.record_anew()
        tensors = [tensor for piece in self.passes for tensor in inputs(piece)]
        self.mark("forward")
        losses, scores = self.recorded(update, tensors)
        self.mark("rest")
        return Update(self.num_samples, list(losses.unbind()), list(scores.unbind()))

    def to_record(self, update: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The passes of an update as one function of the inputs of each: their losses and scores."""
        of_each = len(inputs) // len(self.passes)
        by_pass = {piece: tuple(inputs[n * of_each : (n + 1) * of_each]) for n, piece in enumerate(self.passes)}
        result = self._passes(update, by_pass.__getitem__)
        nothing = inputs[0].new_zeros(0)
        return [torch.stack(tensors) if tensors else nothing for tensors in (result.losses, result.scores)]

    def _passes(self, update: int, inputs: _Inputs) -> Update:
        result, stage = Update(self.num_samples), self._stage
        *earlier, final = self.passes
        passes = [piece for piece in earlier if piece.parts[self.rank] or not self._leaves_out(update, piece)]
        passes.append(final)
        samples = [tuple(map(len, piece.parts)) for piece in passes]
        in_turn: list[Action] = [action for n in range(len(passes)) for action in (("forward", n), ("backward", n))]
        running: dict[int, _RunningPass] = {}
        for kind, number in in_turn if stage is None else stage.begin_update(self.order, len(passes)):
            is_last = number == len(passes) - 1 and not self.separate
            if kind == "forward":
                running[number] = self._forward(inputs, update, passes[number], samples[number:])
            elif kind == "backward":
                self._backward(running.pop(number), running.values(), is_last, result)
            elif stage is not None:
                self.mark("backward")
                stage.compute_weight_gradients(number, is_last)
                self.exchange.is_due = not is_last
                self.mark("rest")
        self.mark("gradient")
        self.exchange.finish()
        self.mark("rest")
        return result

    def _announce(self, update: int, piece: Pass) -> None:
        self.network.context.enter(update, piece.positions, piece.sizes, self.pipeline.device)

    def _leaves_out(self, update: int, piece: Pass) -> bool:
        """Whether this rank leaves out a pass without samples that is not the last: no other needs it there.

        Through GoogLeNet a pass without images takes a device of 0.3 of a core a tenth of a second. Batch norm then
        gets the positions of the others' microbatches, on which the weights of this rank's own depend.
        """
        if self.recipe.reproducible or not self.network.silent:
            return False
        self._announce(update, piece)
        owners = [rank for rank, sizes in enumerate(piece.microbatches) for _ in sizes]
        self.network.context.statistics.record_left_out(self.network.context.starts, owners)
        return True

    def _forward(self, inputs: _Inputs, update: int, piece: Pass, samples: Sequence[tuple[int, ...]]) -> _RunningPass:
        """Run a pass; `samples` are those of every sample rank in it, and in the passes after it."""
        self.mark("input")
        images, targets, *share = inputs(piece)
        self.mark("rest")
        self.network.samples = samples[0]
        self._announce(update, piece)
        if self.reseed:
            torch.manual_seed(fold(self.recipe.seed, update, piece.parts[self.rank].start))
        flight = None
        with self._autocast:
            self.mark("forward")
            if self._stage is None:
                outputs = self.network.model(images)
            else:
                flight = self._stage.forward_pass((images,), samples[0], then=samples[1:])
                outputs = self._stage.output_of(flight) if self._stage.is_last else None
            self.mark("rest")
            loss = None if outputs is None else self._part_of_mean(outputs, targets, *share)
        return _RunningPass(loss, outputs, targets, flight)

    def _backward(self, running: _RunningPass, later: Collection[_RunningPass], is_last: bool, result: Update) -> None:
        loss, stage = running.loss, self._stage
        self.mark("backward")
        with _deterministic(), self.exchange.in_pass(is_last):
            if loss is not None:
                self.scaler.scale(loss).backward()
            if stage is not None and running.flight is not None:
                if loss is not None:
                    stage.send_gradients(running.flight)
                else:
                    flights = [piece.flight for piece in later if piece.flight is not None]
                    stage.backward_pass(running.flight, then=flights)
        self.mark("rest")
        if loss is not None and len(running.targets):
            result.losses.append(loss.detach() * self._share if self._own_mean else loss.detach())
            score = self.task.score(running.outputs, running.targets)
            if score is not None:
                result.scores.append(score)

    @property
    def _share(self) -> float:
        return sum(len(piece.parts[self.rank]) for piece in self.passes) / self.num_samples

    def _global_count(self, targets: Tensor) -> Tensor | None:
        """How much the loss of the global batch is the mean over, of this rank's targets alone where it takes its own
        mean; None where that is the number of samples. All ranks call it."""
        count = self.task.counted(targets) if self._mixing is None else None
        if count is None:
            return None
        axes = () if self._own_mean else self.network.sample_axes
        return all_reduce(count.double(), self.network.groups.of(axes))

    def _input(
        self, batch: Batch, targets: Tensor, global_count: Tensor | None, update: int, piece: Pass
    ) -> tuple[Tensor, ...]:
        """The inputs of a pass, of this rank's batch."""
        part, sizes = piece.parts[self.rank], piece.microbatches[self.rank]
        start = part.start - self.passes[0].parts[self.rank].start
        end = start + len(part)
        images, targets = self.pipeline(batch, start, end), targets[start:end]
        if global_count is not None and (count := self.task.counted(targets)) is not None:
            whole, own = self.task.weighed(global_count), self.task.weighed(count)
            return images, targets, torch.where(whole > 0, own / whole, 0)
        if self._mixing is None:
            return images, targets
        return mix(
            images,
            targets,
            num_classes=len(self.pipeline.data.classes),
            config=self._mixing,
            sizes=list(sizes),
            keys=[fold(self.recipe.seed, update, part.start + sum(sizes[:i])) for i in range(len(sizes))],
        )

    def _part_of_mean(self, outputs: Any, targets: Tensor, share: Tensor | None = None) -> Tensor:
        """What these samples add to the mean loss over the global batch."""
        if len(targets) == 0:  # nothing, but with an edge to the network, whose other ranks compute
            return torch.stack([logits.sum() for logits in self.task.heads(outputs)]).sum() * 0
        loss = self.task.loss(outputs, targets)
        if share is not None:
            return loss * share.to(loss.dtype)
        whole = self.num_samples * self._share if self._own_mean else self.num_samples
        return loss * (len(targets) / whole) if len(targets) < whole else loss


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Say what to do where `reproducible` asks for a backward pass that torch has no deterministic version of."""
    try:
        yield
    except RuntimeError as error:
        name, is_known, _ = str(error).partition(" does not have a deterministic implementation")
        if not is_known:
            raise
        raise ConvoyError(
            f"reproducible: torch has no deterministic {name}, which this network needs on this device: leave "
            "reproducible away, train on the CPU (--device cpu), or use another layer"
        ) from error


_IN_A_ROW = 100  # updates of one measurement, at most


def update_seconds(
    step: TrainingStep,
    ranks: Ranks,
    *,
    enough: int = 3,
    most: int = 8,
    least_s: float = 0.0,
    patience_s: float = math.inf,
) -> float:
    """Seconds of an update of the slowest rank, of random images that are ready. All ranks call it.

    It ends when `enough` measurements are near the fastest, after `most` in any case, and after two once rank 0 has
    seen `patience_s`. All but the first measurement take at least `least_s`, by more updates in a row.
    """
    batch, device = random_batch(step), step.pipeline.device
    updates, in_a_row, measured_s = itertools.count(), updates_in_a_row(device), list[float]()

    def measure() -> float:
        nonlocal in_a_row
        ranks.barrier()
        began = time.perf_counter()
        for _ in range(in_a_row):
            step(batch, next(updates))
        wait_for(device)
        seconds = (time.perf_counter() - began) / in_a_row
        slowest: float = max(ranks.gather(seconds))  # all know the same, and end together
        measured_s.append(slowest)
        in_a_row = max(in_a_row, math.ceil(least_s / max(slowest, least_s / _IN_A_ROW)) if least_s else 1)
        return slowest

    counted = steady(measure, float, ranks.broadcast, enough=enough, most=most, patience_s=patience_s)
    if len(counted) < enough:  # they vary: the fastest of some is not what a run has
        counted = measured_s[len(measured_s) // 2 :]
    return statistics.median(counted)


def random_batch(step: TrainingStep) -> Batch:
    """A rank's samples of a global batch, of random images."""
    data, samples = step.pipeline.data, sum(len(piece.parts[step.rank]) for piece in step.passes)
    images = torch.randint(0, 256, (samples, data.channels, data.image_size, data.image_size), dtype=torch.uint8)
    targets = step.task.example(samples, data.image_size)
    batch = Batch(images, targets, torch.arange(samples))
    return batch.pin_memory() if step.pipeline.device.type == "cuda" else batch  # as in training


def updates_in_a_row(device: torch.device) -> int:
    """Updates between two looks at the clock: the host of a GPU is ahead of it in all but the first."""
    return 4 if device.type == "cuda" else 1
