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
from convoy.engine.parallelize import take_part
from convoy.engine.stage import Flight
from convoy.engine.stages import StagedNetwork
from convoy.errors import ConvoyError
from convoy.ops.registry import under_autocast
from convoy.planner.cost.pipeline import Staging
from convoy.plans.place import Placement
from convoy.plans.plan import Plan
from convoy.plans.schedule import Action, Schedule
from convoy.training.division import Division, Pass
from convoy.training.precision import lowered
from convoy.training.recipe import Recipe

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
        engine = take_part(
            model,
            plan,
            example,
            batch_norm=recipe.batch_norm,
            loss="part",
            seed=recipe.seed,
            compile=recipe.compile,
            recompute=recipe.recompute,
            devices=plan.mesh.num_devices,
        )
        if engine.counts_passes and plan.mesh.num_devices > 1:
            why = engine.captured.partition(", as ")[2]
            raise ConvoyError(
                f"{why}, but how many passes an update has depends on the plan, so that results would too: take that "
                "out of forward, or train with convoy.parallelize in a loop of your own"
            )
        self.model, self.engine, self.schedule, self._recipe = model, engine, schedule, recipe
        self.context = engine.context  # of the step, for all layers
        self.context.statistics.in_order = recipe.reproducible
        self.context.in_turns = True
        # The same network, if its plan has stages: this rank runs one of them.
        self.stages = engine if isinstance(engine, StagedNetwork) else None
        if self.stages is not None:
            self.stages.returns_memory = recipe.parallel.memory_limit is not None
        self._to_come: deque[tuple[int, ...]] = deque()  # samples of the passes of an update that have not begun
        self._running: deque[Flight] = deque()  # through stages
        # The loss is to be the mean over this rank's own samples, and its optimizer's state its own: local SGD alone.
        self.local_mean = recipe.parallel.local_sgd is not None
        self.version = engine.sample_rank if self.local_mean else 0  # which of the optimizer's states is this rank's
        self._tree: TreeReducer | None = None
        self._local: LocalSgd | None = None
        self._left_over = False  # gradients of passes that no exchange has taken with it
        layouts = {name: engine.layouts[name] for name, _ in model.named_parameters()}
        self._split = [(p, tuple(sorted(layouts[name].split_axes))) for name, p in model.named_parameters()]
        unreduced = frozenset(engine.sample_axes if self.local_mean else ())
        self._reduced = [
            (p, tuple(sorted(layouts[name].copied - unreduced)))
            for name, p in model.named_parameters()
            if engine.owns(name)
        ]
        compression = torch.bfloat16 if recipe.parallel.gradient_compression == "bf16" else None
        if engine.reducer is not None and (recipe.reproducible or compression or self.local_mean):
            engine.reducer.remove()
            engine.reducer = None  # where the tree adds gradients, once it is known who has which microbatches
            if not recipe.reproducible:
                engine.reducer = GradientReducer(self._reduced, engine.groups, compress=compression)

    @property
    def divides_gradients(self) -> bool:
        """Whether ranks hold other gradients than each other, of parts or of their own samples."""
        return self.local_mean or any(axes for _, axes in self._split)

    def largest(self, passes: Sequence[Pass]) -> Placement:
        """The network at the samples of the largest pass, with the types that autocast gives its values."""
        most = max((tuple(map(len, piece.parts)) for piece in passes), key=max)
        return self.typed(self.engine.example_placement(True, most))

    def typed(self, placement: Placement) -> Placement:
        """The same with the types that autocast gives its values."""
        return replace(placement, graph=under_autocast(placement.graph, lowered(self._recipe), self.engine.device.type))

    def staging(self, placement: Placement, passes: Sequence[Pass]) -> Staging | None:
        """How the passes of an update go through the stages, if there are any."""
        if self.stages is None:
            return None
        samples = tuple(len(piece.positions) for piece in passes)
        return Staging(placement.mesh, self.stages.staged(placement), samples, self.schedule)

    def divide(self, division: Division, num_passes: int) -> None:
        """Divide the updates from the next on so, in so many passes each. All ranks call it."""
        engine, axes = self.engine, self.engine.sample_axes
        if self._tree is not None:
            self._tree.set_shares(division.counts, num_passes)
        elif self._recipe.reproducible:
            self._tree = TreeReducer(
                self._reduced, engine.groups, sample_axes=axes, shares=division.counts, passes=num_passes
            )
        if self._recipe.parallel.local_sgd is not None:
            weight = len(division.positions(engine.sample_rank))
            self._local = LocalSgd(
                list(self.model.parameters()), engine.groups, axes, every=self._recipe.parallel.local_sgd, weight=weight
            )

    def order(self, passes: Sequence[Pass]) -> list[Action]:
        """What this rank does of an update's passes, in which order."""
        if self.stages is None:
            return [(kind, number) for number in range(len(passes)) for kind in _IN_TURN]
        self._running.clear()
        self._to_come = deque(tuple(map(len, piece.parts)) for piece in passes)
        return self.stages.begin_update(self.schedule, len(passes))

    def leaves_out(self, update: int, piece: Pass) -> bool:
        """Whether this rank leaves out a pass without samples that is not the last: no other needs it there.

        Through GoogLeNet a pass without images takes a device of 0.3 of a core a tenth of a second. Batch norm then
        gets the positions of the others' microbatches, on which the weights of this rank's own depend.
        """
        if self._recipe.reproducible or not self.engine.silent:
            return False
        self._announce(update, piece)
        owners = [rank for rank, sizes in enumerate(piece.microbatches) for _ in sizes]
        self.context.statistics.record_left_out(self.context.starts, owners)
        return True

    def enter(self, update: int, piece: Pass) -> None:
        """Announce a training pass, with the samples of all ranks."""
        self.engine.samples = tuple(map(len, piece.parts))
        self._announce(update, piece)

    def _announce(self, update: int, piece: Pass) -> None:
        self.context.enter(update, piece.positions, piece.sizes, self.engine.device)

    def forward(self, images: Tensor) -> Any:
        """The outputs for this rank's samples, perhaps none; None where they are those of another rank's stage."""
        if self.stages is None:
            return self.model(images)
        samples = self._to_come.popleft()
        flight = self.stages.forward_pass((images,), samples, then=list(self._to_come))
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

    def clip(self, max_norm: float) -> None:
        """Scale the gradient down to a norm, taken over the whole parameters."""
        clip_grad_norm(self._split, self.engine.groups, max_norm)

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """While entered, norms that the optimizer takes are those of whole tensors."""
        if type(optimizer).__module__.startswith("torch.") or not any(axes for _, axes in self._split):
            return contextlib.nullcontext()
        return WholeNorms(self._split, self.engine.groups)

    def updated(self, update: int) -> None:
        """The optimizer has changed the weights in an update."""
        if self._local is not None:
            self._local.step(update)

    def synchronize(self) -> None:
        """Before an evaluation or a checkpoint: let all ranks have the same weights, where a method lets them drift."""
        if self._local is not None:
            self._local.average()

    def versions(self, whole: Tensor) -> list[Tensor]:
        """A whole as each sample rank has it, where a method lets them drift apart, else once. All ranks call it."""
        axes = self.engine.sample_axes if self.local_mean else ()
        return list(all_gather(whole.contiguous(), self.engine.groups.of(axes)))
