"""The network of a run: the engine, as the trainer asks for it."""

import contextlib
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from convoy.comm.collectives import all_gather
from convoy.engine.gradients.local_sgd import LocalSgd
from convoy.engine.gradients.norms import WholeNorms, clip_grad_norm
from convoy.engine.gradients.reducer import GradientReducer
from convoy.engine.gradients.tree import TreeReducer
from convoy.engine.parallelize import Options, take_part
from convoy.engine.stage import Flight
from convoy.engine.stages import StagedNetwork
from convoy.errors import ConvoyError
from convoy.ops.memory import memory_in_stages, what_is_recomputed
from convoy.ops.registry import under_autocast
from convoy.plans.explain import rows_of_stages
from convoy.plans.place import Placement
from convoy.plans.plan import Plan
from convoy.plans.schedule import Action, Schedule, in_flight
from convoy.training.division import Division, Pass
from convoy.training.precision import lowered
from convoy.training.recipe import Recipe
from convoy.training.records import StageRecord

_IN_TURN: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")


class TrainedNetwork:
    """A network whose updates are those of the global batch, under a plan for any number of devices.

    Its parameters are `model.parameters()`; where the plan divides them, each rank holds its own part under the serial
    name. An update is, for every pass, in the order that `order` says: `enter`, `forward`, and `backward`; then
    `finish_update`. All ranks do the same.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, example: Tensor, recipe: Recipe, schedule: Schedule = "1f1b"
    ) -> None:
        """Make the plain model, on its device, this rank's part of it, in place. All ranks call it; a ConvoyError says
        that a layer cannot be divided as the plan says. `example` are images of one microbatch; only shape, type and
        device matter. Passes go through stages by `schedule`.
        """
        self.model, self.schedule = model, schedule
        self.engine = take_part(
            model,
            plan,
            example,
            Options(recipe.batch_norm, "part", recipe.seed, compile=recipe.compile, recompute=recipe.recompute),
            devices=plan.mesh.num_devices,
        )
        if self.engine.counts_passes and plan.mesh.num_devices > 1:
            why = self.engine.captured.partition(", as ")[2]
            raise ConvoyError(
                f"{why}, but how many passes an update has depends on the plan, so that results would too: take that "
                "out of forward, or train with convoy.parallelize in a loop of your own"
            )
        # Gradients are added in the fixed tree over the microbatches; every pass is then one microbatch of each rank.
        self._adds_in_tree = recipe.reproducible
        # Approximate: the type in which gradients are sent, and updates of a rank before the weights are averaged.
        self._compression = torch.bfloat16 if recipe.parallel.gradient_compression == "bf16" else None
        self._local_updates = recipe.parallel.local_sgd
        self.context = self.engine.context  # of the step, for all layers
        self.context.statistics.in_order = self._adds_in_tree
        self.context.in_turns = True
        # The same network, if its plan has stages: this rank runs one of them.
        self.stages = self.engine if isinstance(self.engine, StagedNetwork) else None
        if self.stages is not None:
            self.stages.returns_memory = recipe.parallel.memory_limit is not None
        self._sizes: deque[tuple[int, ...]] = deque()  # of the passes through stages to come
        self._running: deque[Flight] = deque()
        # The loss is to be the mean over this rank's own samples: local SGD alone.
        self.local_mean = self._local_updates is not None
        # Which of the optimizer's states is this rank's.
        self.version = self.engine.sample_rank if self.local_mean else 0
        self._device, self._precision = example.device, lowered(recipe)
        self._tree: TreeReducer | None = None
        self._local: LocalSgd | None = None
        self._left_over = False
        self._update = 0
        layouts = {name: self.engine.layouts[name] for name, _ in model.named_parameters()}
        self._divided = [(p, tuple(sorted(layouts[name].split_axes))) for name, p in model.named_parameters()]
        apart = frozenset(self.engine.sample_axes if self.local_mean else ())
        self._reduced = [
            (p, tuple(sorted(layouts[name].copied - apart)))
            for name, p in model.named_parameters()
            if self.engine.owns(name)
        ]
        if self.engine.reducer is not None and not self._reduces_plainly:
            self.engine.reducer.remove()
            self.engine.reducer = None
            if not self._adds_in_tree:
                self.engine.reducer = GradientReducer(self._reduced, self.engine.groups, compress=self._compression)

    @property
    def _reduces_plainly(self) -> bool:
        return not (self._adds_in_tree or self._compression or self.local_mean)

    @property
    def divides_gradients(self) -> bool:
        """Whether ranks hold other gradients than each other, of parts or of their own samples."""
        return self.local_mean or any(axes for _, axes in self._divided)

    def leaves_out(self, update: int, piece: Pass) -> bool:
        """Whether this rank leaves out a pass without samples that is not the last: no other needs it there."""
        if self._adds_in_tree or not self.engine.silent:
            return False
        self._announce(update, piece)
        owners = [rank for rank, own in enumerate(piece.microbatches) for _ in own]
        self.context.statistics.record_left_out(self.context.starts, owners)
        return True

    def enter(self, update: int, piece: Pass) -> None:
        """Announce a training pass, with the samples of all ranks."""
        self._update = update
        self.engine.samples = tuple(map(len, piece.parts))
        self._announce(update, piece)

    def _announce(self, update: int, piece: Pass) -> None:
        self.context.enter(update, piece.positions, piece.sizes, self._device)

    def what_is_recomputed(self, passes: Sequence[Pass]) -> str | None:
        """A sentence on the activations that are computed again, for the largest of an update's passes, and what that
        saves."""
        if not self.engine.recomputes:
            return None
        placement = self.largest(passes)
        return what_is_recomputed(placement, self.engine.staged(placement), self._in_flight(len(passes)))

    def largest(self, passes: Sequence[Pass]) -> Placement:
        """The network at the samples of the largest pass, with the types that autocast gives its values."""
        most = max((tuple(map(len, piece.parts)) for piece in passes), key=max)
        placement = self.engine.example_placement(True, most)
        return replace(placement, graph=under_autocast(placement.graph, self._precision, self._device.type))

    def describe(self, passes: Sequence[Pass]) -> list[StageRecord]:
        """The stages, if there are any, for the largest pass."""
        if self.stages is None:
            return []
        placement = self.largest(passes)
        staged = self.stages.staged(placement)
        memory = memory_in_stages(placement, staged, self._in_flight(len(passes)))
        records = []
        for row in rows_of_stages(placement, staged):
            held = max((memory[rank] for rank in row.ranks), key=lambda each: each.total)
            sent = {"forward": row.received_bytes.forward, "backward": row.received_bytes.backward}
            kept = {name: getattr(held, name) for name in ("parameters", "gradients", "activations")}
            records.append(StageRecord(layer=row.begins, ranks=list(row.ranks), takes=list(row.takes), **sent, **kept))
        return records

    def _in_flight(self, passes: int) -> Sequence[int]:
        """For each stage, the passes whose activations it keeps at once."""
        number = 0 if self.stages is None else self.stages.stages.number
        return [in_flight(self.schedule, passes, stage, number) for stage in range(number)]

    def divide(self, division: Division, num_passes: int) -> None:
        """Divide the updates from the next on so, in so many passes each. All ranks call it."""
        engine = self.engine
        if self._tree is not None:
            self._tree.set_shares(division.counts, num_passes)
        elif self._adds_in_tree:
            axes, shares = engine.sample_axes, division.counts
            self._tree = TreeReducer(self._reduced, engine.groups, sample_axes=axes, shares=shares, passes=num_passes)
        if self._local_updates is not None:
            weight, axes = len(division.positions(engine.sample_rank)), engine.sample_axes
            parameters = list(self.model.parameters())
            self._local = LocalSgd(parameters, engine.groups, axes, every=self._local_updates, weight=weight)

    def order(self, passes: Sequence[Pass]) -> list[Action]:
        """What this rank does of an update's passes, in which order."""
        if self.stages is None:
            return [(kind, number) for number in range(len(passes)) for kind in _IN_TURN]
        self._running.clear()
        self._sizes = deque(tuple(map(len, piece.parts)) for piece in passes)
        return self.stages.begin_update(self.schedule, len(passes))

    def forward(self, images: Tensor) -> Any:
        """The outputs for this rank's samples, perhaps none; None where they are those of another rank's stage."""
        if self.stages is None:
            return self.model(images)
        sizes = self._sizes.popleft()
        flight = self.stages.forward_pass((images,), sizes, then=list(self._sizes))
        self._running.append(flight)
        return self.stages.output_of(flight) if self.stages.is_last else None

    def backward(self, loss: Tensor | None, last: bool) -> None:
        """Run the backward pass of the earliest pass that has none yet. After the `last` one, gradients of all passes
        are added over the ranks, as they are: the loss is this pass's part of the global mean, or None where the
        outputs are those of another rank's stage.
        """
        reducer = self.engine.reducer
        last = last and self.context.postponed is None
        with contextlib.nullcontext() if last or reducer is None else reducer.paused():
            flight = self._running.popleft() if self.stages is not None else None
            if loss is not None:
                loss.backward()
            if self.stages is not None and flight is not None:
                if loss is not None:
                    self.stages.send_gradients(flight)
                else:
                    self.stages.backward_pass(flight, then=list(self._running))
        self._left_over = reducer is not None and not last  # the last pass takes with it what those before have left

    def compute_weight_gradients(self, piece: int, last: bool) -> None:
        """Compute what backward passes up to that of a pass have left for later; `last` as for `backward`."""
        assert self.stages is not None
        self.stages.compute_weight_gradients(piece, last)
        self._left_over = not last

    def finish_update(self) -> None:
        """After the last pass: `.grad` and buffers become those of the global batch."""
        if self._left_over and self.engine.reducer is not None:
            self.engine.reducer.reduce()
        self._left_over = False
        if self._tree is not None:
            self._tree.finish()
        self.context.statistics.fold(self.engine.groups)
        if self.stages is not None:
            self.stages.finish_update()

    def abandon(self) -> None:
        """Forget the passes of an update that broke off before `finish_update`. All ranks call it."""
        self._left_over = False
        self.engine.abandon()
        if self._tree is not None:
            self._tree.abandon()

    def own_gradients(self) -> list[Tensor]:
        """The gradients that this rank's part of the update will use, after `finish_update`."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def clip(self, max_norm: float) -> None:
        """Scale the gradient down to a norm, taken over the whole parameters."""
        if self.divides_gradients:
            clip_grad_norm(self._divided, self.engine.groups, max_norm)
        else:  # to the bit the same, and no other rank is asked
            parameters = list(self.model.parameters())
            norm = nn.utils.get_total_norm([p.new_zeros(0) if p.grad is None else p.grad for p in parameters])
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """While entered, norms that the optimizer takes are those of whole tensors."""
        if type(optimizer).__module__.startswith("torch.") or not any(axes for _, axes in self._divided):
            return contextlib.nullcontext()
        return WholeNorms(self._divided, self.engine.groups)

    def updated(self) -> None:
        """The optimizer has changed the weights."""
        if self._local is not None:
            self._local.step(self._update)

    def synchronize(self) -> None:
        """Before an evaluation or a checkpoint: let all ranks have the same weights, where a method lets them drift."""
        if self._local is not None:
            self._local.average()

    def versions(self, name: str, tensor: Tensor) -> list[Tensor]:
        """The whole as each sample rank has it, where a method lets them drift apart, else once. All ranks call it."""
        whole = self.engine.whole(name, tensor)
        axes = self.engine.sample_axes if self.local_mean else ()
        return list(all_gather(whole.contiguous(), self.engine.groups.of(axes)))
