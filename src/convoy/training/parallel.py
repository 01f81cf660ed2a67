"""The network of a run: the engine, as the trainer asks for it."""

import contextlib
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from convoy.comm.collectives import all_gather
from convoy.engine.gradients import GradientReducer, TreeReducer
from convoy.engine.gradients.norms import WholeNorms, clip_grad_norm
from convoy.engine.gradients.reducer import LocalSgd
from convoy.engine.optimizers import divide_update
from convoy.engine.parallelize import BatchNorm, take_part
from convoy.engine.stage import Flight
from convoy.engine.stages import StagedNetwork
from convoy.errors import ConvoyError
from convoy.ops.memory import memory_in_stages, what_is_recomputed
from convoy.ops.recompute import Recompute
from convoy.ops.registry import under_autocast
from convoy.plans.explain import rows_of_stages
from convoy.plans.mesh import Axes
from convoy.plans.place import Placement
from convoy.plans.plan import Plan
from convoy.plans.schedule import Action, Schedule, actions, in_flight
from convoy.training.division import Division, Pass
from convoy.training.records import StageRecord


@dataclass(frozen=True)
class Method:
    """How gradients become an update of all ranks."""

    # Add them in the fixed tree over the microbatches; every pass is then one microbatch of each rank.
    tree: bool = False
    compression: torch.dtype | None = None  # approximate: the type in which they are sent
    # Approximate: updates that every rank makes by itself before the weights are averaged.
    local_updates: int | None = None


class TrainedNetwork:
    """A network whose updates are those of the global batch, under a plan for any number of devices.

    Its parameters are `model.parameters()`; where the plan divides them, each rank holds its own part under the serial
    name. An update is, for every pass, in the order that `order` says: `enter`, `forward`, and `backward`; then
    `finish_update`. All ranks do the same.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        example: Tensor,
        *,
        batch_norm: BatchNorm,
        seed: int,
        method: Method,
        compile: bool = False,
        recompute: Recompute = False,
    ) -> None:
        """Make the plain model, on its device, this rank's part of it, in place. All ranks call it; a ConvoyError says
        that a layer cannot be divided as the plan says. `example` are images of one microbatch; only shape, type and
        device matter. With `compile`, what lies between the exchanges is compiled.
        """
        self.model = model
        self.engine = take_part(
            model,
            plan,
            example,
            batch_norm=batch_norm,
            loss="part",
            seed=seed,
            compile=compile,
            recompute=recompute,
            devices=plan.mesh.num_devices,
        )
        if self.engine.counts_passes and plan.mesh.num_devices > 1:
            why = self.engine.captured.partition(", as ")[2]
            raise ConvoyError(
                f"{why}, but how many passes an update has depends on the plan, so that results would too: take that "
                "out of forward, or train with convoy.parallelize in a loop of your own"
            )
        self.context = self.engine.context  # of the step, for all layers
        self.context.statistics.in_order = method.tree
        self.context.in_turns = True
        self.sample_axes = self.engine.sample_axes  # axes of the mesh that divide the samples
        # The loss is to be the mean over this rank's own samples: approximate methods alone.
        self.local_mean = method.local_updates is not None
        # Which of the optimizer's states is this rank's.
        self.version = self.engine.sample_rank if self.local_mean else 0
        self._method = method
        self._device = example.device
        self._places = {id(p): self.engine.layouts[name] for name, p in self.model.named_parameters()}
        self._tree: TreeReducer | None = None
        self._local: LocalSgd | None = None
        self._left_over = False
        self._update = 0
        if self.engine.reducer is not None and (method.tree or method.compression or self.local_mean):
            self.engine.reducer.remove()
            self.engine.reducer = None
            if not method.tree:
                self.engine.reducer = GradientReducer(self._reduced(), self.engine.groups, compress=method.compression)

    @property
    def divides_gradients(self) -> bool:
        """Whether ranks hold other gradients than each other, of parts or of their own samples."""
        scattered = self.engine.reducer is not None and self.engine.reducer.scatter
        return self.local_mean or scattered or any(axes for _, axes in self._divided())

    def leaves_out(self, update: int, piece: Pass) -> bool:
        """Whether this rank leaves out a pass without samples that is not the last: no other needs it there."""
        if self._method.tree or not self.engine.silent:
            return False
        self._announce(update, piece)
        owners = [rank for rank, own in enumerate(piece.microbatches) for _ in own]
        self.engine.context.statistics.record_left_out(self.engine.context.starts, owners)
        return True

    def enter(self, update: int, piece: Pass) -> None:
        """Announce a training pass, with the samples of all ranks."""
        self._update = update
        self.engine.samples = tuple(map(len, piece.parts))
        self._announce(update, piece)

    def _announce(self, update: int, piece: Pass) -> None:
        self.engine.context.enter(update, piece.positions, piece.sizes, self._device)

    def what_is_recomputed(self, passes: Sequence[Pass], precision: torch.dtype | None) -> str | None:
        """A sentence on the activations that are computed again, for the largest of an update's passes, and what that
        saves, where autocast computes in `precision` (None: it is off).
        """
        if not self.engine.recomputes:
            return None
        placement = self.largest(passes, precision)
        return what_is_recomputed(placement, self.engine.staged(placement), self._in_flight(len(passes)))

    def largest(self, passes: Sequence[Pass], precision: torch.dtype | None) -> Placement:
        """The network at the samples of the largest pass; arguments as for `what_is_recomputed`."""
        most = max((tuple(map(len, piece.parts)) for piece in passes), key=max)
        placement = self.engine.example_placement(True, most)
        return replace(placement, graph=under_autocast(placement.graph, precision, self._device.type))

    def _in_flight(self, passes: int) -> Sequence[int]:
        """For each stage, the passes whose activations it keeps at once."""
        return ()

    def enter_evaluation(self, parts: tuple[int, ...]) -> None:
        """Announce a pass in evaluation mode: how many samples each sample rank has."""
        self.engine.samples = parts

    def forward(self, images: Tensor) -> Any:
        """The outputs for this rank's samples, perhaps none; None where they are those of another rank's stage."""
        return self.model(images)

    @property
    def shares_updates(self) -> bool:
        """Whether ranks with the same weights may divide the optimizer's work and state."""
        return not (self._method.tree or self._method.compression or self.local_mean)

    def share(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer with its work divided over ranks that have the same weights, where that is faster."""
        return divide_update(self.model, optimizer) if self.shares_updates else optimizer

    def divide(self, division: Division, num_passes: int) -> None:
        """Divide the updates from the next on so, in so many passes each. All ranks call it."""
        if self._method.tree and self._tree is None:
            self._tree = TreeReducer(
                self._reduced(),
                self.engine.groups,
                sample_axes=self.sample_axes,
                shares=division.counts,
                passes=num_passes,
            )
        elif self._tree is not None:
            self._tree.set_shares(division.counts, num_passes)
        if self._method.local_updates is not None:
            self._local = LocalSgd(
                list(self.model.parameters()),
                self.engine.groups,
                self.sample_axes,
                every=self._method.local_updates,
                weight=len(division.positions(self.engine.sample_rank)),
            )

    def order(self, passes: Sequence[Pass]) -> list[Action]:
        """What this rank does of an update's passes, in which order."""
        return actions("1f1b", len(passes), stage=0, stages=1)

    def backward(self, loss: Tensor | None, last: bool) -> None:
        """Run the backward pass of the earliest pass that has none yet. After the `last` one, gradients of all passes
        are added over the ranks, as they are: the loss is this pass's part of the global mean, or None where the
        outputs are those of another rank's stage.
        """
        reducer = self.engine.reducer
        last = last and self.engine.context.postponed is None
        with contextlib.nullcontext() if last or reducer is None else reducer.paused():
            self._run_backward(loss)
        self._left_over = reducer is not None and not last  # the last pass takes with it what those before have left

    def _run_backward(self, loss: Tensor | None) -> None:
        assert loss is not None
        loss.backward()

    def compute_weight_gradients(self, piece: int, last: bool) -> None:
        """Compute what backward passes up to that of a pass have left for later; `last` as for `backward`."""

    def finish_update(self) -> None:
        """After the last pass: `.grad` and buffers become those of the global batch."""
        if self._left_over and self.engine.reducer is not None:
            self.engine.reducer.reduce()
        self._left_over = False
        if self._tree is not None:
            self._tree.finish()
        self.engine.context.statistics.fold(self.engine.groups)

    def abandon(self) -> None:
        """Forget the passes of an update that broke off before `finish_update`. All ranks call it."""
        self._left_over = False
        self.engine.abandon()
        if self._tree is not None:
            self._tree.abandon()

    def own_gradients(self) -> list[Tensor]:
        """The gradients that this rank's part of the update will use, after `finish_update`."""
        own = self.engine.reducer.own_gradients() if self.engine.reducer is not None else {}
        return [own[p][0] if p in own else p.grad for p in self.model.parameters() if p.grad is not None]

    def clip(self, max_norm: float) -> None:
        """Scale the gradient down to a norm, taken over the whole parameters."""
        own = self.engine.reducer.own_gradients() if self.engine.reducer is not None else {}
        clip_grad_norm(self._divided(), self.engine.groups, max_norm, own)

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """While entered, norms that the optimizer takes are those of whole tensors."""
        divided = self._divided()
        if type(optimizer).__module__.startswith("torch.") or not any(axes for _, axes in divided):
            return contextlib.nullcontext()
        return WholeNorms(divided, self.engine.groups)

    def updated(self) -> None:
        """The optimizer has changed the weights."""
        if self._local is not None:
            self._local.step(self._update)

    def synchronize(self) -> None:
        """Before an evaluation or a checkpoint: let all ranks have the same weights, where a method lets them drift."""
        if self._local is not None:
            self._local.average()

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of something that lies as the parameter or buffer `name` does. All ranks call it."""
        return self.engine.whole(name, tensor)

    def versions(self, name: str, tensor: Tensor) -> list[Tensor]:
        """The whole as each sample rank has it, where a method lets them drift apart, else once. All ranks call it."""
        whole = self.whole(name, tensor)
        axes = self.sample_axes if self.local_mean else ()
        return list(all_gather(whole.contiguous(), self.engine.groups.of(axes)))

    def _reduced(self) -> list[tuple[nn.Parameter, Axes]]:
        apart = frozenset(self.sample_axes if self.local_mean else ())
        return [
            (p, tuple(sorted(self._places[id(p)].copied - apart)))
            for name, p in self.model.named_parameters()
            if self.engine.owns(name)
        ]

    def _divided(self) -> list[tuple[nn.Parameter, Axes]]:
        return [(p, tuple(sorted(self._places[id(p)].split_axes))) for p in self.model.parameters()]


class StagedTraining(TrainedNetwork):
    """A model of which this rank runs one stage."""

    engine: StagedNetwork

    def __init__(self, *args: Any, schedule: Schedule = "1f1b", returns_memory: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.schedule = schedule  # the order of the passes: `convoy.plans.schedule`
        self.engine.returns_memory = returns_memory
        self._sizes: deque[tuple[int, ...]] = deque()  # of the passes to come
        self._running: deque[Flight] = deque()

    def describe(self, passes: Sequence[Pass], precision: torch.dtype | None) -> list[StageRecord]:
        """The stages, for the largest pass; arguments as for `what_is_recomputed`."""
        placement = self.largest(passes, precision)
        staged = self.engine.staged(placement)
        memory = memory_in_stages(placement, staged, self._in_flight(len(passes)))
        found = []
        for row in rows_of_stages(placement, staged):
            held = max((memory[rank] for rank in row.ranks), key=lambda each: each.total)
            sent = row.received
            found.append(
                StageRecord(
                    layer=row.layer,
                    ranks=list(row.ranks),
                    takes=list(row.takes),
                    forward=sent.forward,
                    backward=sent.backward,
                    parameters=held.parameters,
                    gradients=held.gradients,
                    activations=held.activations,
                )
            )
        return found

    def _in_flight(self, passes: int) -> Sequence[int]:
        number = self.engine.stages.number
        return [in_flight(self.schedule, passes, stage, number) for stage in range(number)]

    def order(self, passes: Sequence[Pass]) -> list[Action]:
        self._running.clear()
        self._sizes = deque(tuple(map(len, piece.parts)) for piece in passes)
        return self.engine.begin_update(self.schedule, len(passes))

    def forward(self, images: Tensor) -> Any:
        sizes = self._sizes.popleft()
        flight = self.engine.forward_pass((images,), sizes, then=list(self._sizes))
        self._running.append(flight)
        return self.engine.output_of(flight) if self.engine.is_last else None

    def _run_backward(self, loss: Tensor | None) -> None:
        flight = self._running.popleft()
        if loss is None:
            self.engine.backward_pass(flight, then=list(self._running))
        else:
            loss.backward()
            self.engine.send_gradients(flight)

    def compute_weight_gradients(self, piece: int, last: bool) -> None:
        self.engine.compute_weight_gradients(piece, last)
        self._left_over = not last

    def finish_update(self) -> None:
        super().finish_update()
        self.engine.finish_update()

    @property
    def shares_updates(self) -> bool:
        return False
