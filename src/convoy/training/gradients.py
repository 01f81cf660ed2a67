"""The gradients of an update: how those of all ranks' passes become those of the global batch, on the network as this
rank's part of it; and losses and gradients that are not finite: which updates are skipped, and in which layer the
numbers begin.
"""

import math
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from convoy.comm.collectives import all_gather
from convoy.comm.ranks import Ranks
from convoy.engine.gradients.divided import WholeNorms, clip_grad_norm, global_norm
from convoy.engine.gradients.reducer import GradientReducer, LocalSgd
from convoy.engine.gradients.tree import TreeReducer
from convoy.engine.network import Network
from convoy.engine.parallelize import Options, take_part
from convoy.engine.stages import StagedNetwork
from convoy.errors import ConvoyError
from convoy.plans.place import Placement
from convoy.plans.plan import Plan
from convoy.training.division import Division
from convoy.training.recipe import Recipe


def divided_network(model: nn.Module, plan: Plan, example: Tensor, recipe: Recipe) -> Network:
    """Make the plain model, on its device, this rank's part of it, in place. All ranks call it; a ConvoyError says that
    a layer cannot be divided as the plan says. `example` are images of one microbatch; only shape, type and device
    matter."""
    options = Options(recipe.batch_norm, "part", recipe.seed, compile=recipe.compile, recompute=recipe.recompute)
    network = take_part(model, plan, example, options, devices=plan.mesh.num_devices)
    if network.counts_passes and plan.mesh.num_devices > 1:
        why = network.captured.partition(", as ")[2]
        raise ConvoyError(
            f"{why}, but how many passes an update has depends on the plan, so that results would too: take that "
            "out of forward, or train with convoy.parallelize in a loop of your own"
        )
    network.context.statistics.in_order = recipe.reproducible
    network.context.in_turns = True
    if isinstance(network, StagedNetwork):
        network.returns_memory = recipe.parallel.memory_limit is not None
    return network


class Exchange:
    """Adds the gradients of an update's passes over the ranks: as they are, in bf16, in the fixed tree over the
    microbatches of a reproducible run, or, with local SGD, only over ranks that have the same samples. All ranks make
    the same calls."""

    def __init__(self, network: Network, recipe: Recipe) -> None:
        self.network, self._recipe = network, recipe
        # The loss is to be the mean over this rank's own samples, and its optimizer's state its own: local SGD alone.
        self.local_mean = recipe.parallel.local_sgd is not None
        self.version = network.sample_rank if self.local_mean else 0  # which of the optimizer's states is this rank's
        self.is_due = False  # whether gradients of passes are there that no exchange has taken with it
        self._tree: TreeReducer | None = None
        self._local: LocalSgd | None = None
        parameters = network.model.named_parameters()
        self._split = [(p, tuple(sorted(network.layouts[name].split_axes))) for name, p in parameters]
        self._reduced = network.reduced(frozenset(network.sample_axes if self.local_mean else ()))
        compression = torch.bfloat16 if recipe.parallel.gradient_compression == "bf16" else None
        if network.reducer is not None and (recipe.reproducible or compression or self.local_mean):
            network.reducer.remove()
            network.reducer = None  # where the tree adds gradients, once it is known who has which microbatches
            if not recipe.reproducible:
                network.reducer = GradientReducer(self._reduced, network.groups, compress=compression)

    @property
    def divides_gradients(self) -> bool:
        """Whether ranks hold other gradients than each other, of parts or of their own samples."""
        return self.local_mean or any(axes for _, axes in self._split)

    def divide(self, division: Division, num_passes: int) -> None:
        """Divide the updates from the next on so, in so many passes each."""
        groups, axes, every = self.network.groups, self.network.sample_axes, self._recipe.parallel.local_sgd
        if self._tree is not None:
            self._tree.set_shares(division.counts, num_passes)
        elif self._recipe.reproducible:
            self._tree = TreeReducer(self._reduced, groups, sample_axes=axes, shares=division.counts, passes=num_passes)
        if every is not None:
            weight = len(division.positions(self.network.sample_rank))
            self._local = LocalSgd(list(self.network.model.parameters()), groups, axes, every=every, weight=weight)

    @contextmanager
    def in_pass(self, is_last: bool) -> Iterator[None]:
        """While entered, a backward pass runs. After the `last` one, gradients of all passes are added over the ranks,
        as they are: the loss is its pass's part of the global mean."""
        reducer = self.network.reducer
        is_last = is_last and self.network.context.postponed is None
        with nullcontext() if is_last or reducer is None else reducer.paused():
            yield
        self.is_due = reducer is not None and not is_last  # the last pass takes with it what those before have left

    def finish(self) -> None:
        """After the last pass: `.grad` and buffers become those of the global batch."""
        if self.is_due and self.network.reducer is not None:
            self.network.reducer.reduce()
        self.is_due = False
        if self._tree is not None:
            self._tree.finish()
        self.network.context.statistics.fold(self.network.groups)
        if isinstance(self.network, StagedNetwork):
            self.network.finish_update()

    def abandon(self) -> None:
        """Forget the passes of an update that broke off."""
        self.is_due = False
        self.network.abandon()
        if self._tree is not None:
            self._tree.abandon()

    def norm(self) -> Tensor:
        """The norm of the gradient, taken over the whole parameters."""
        gradients = [(p.new_zeros(0) if p.grad is None else p.grad, axes) for p, axes in self._split]
        return global_norm(gradients, self.network.groups)

    def clip(self, max_norm: float) -> None:
        """Scale the gradient down to a norm, taken over the whole parameters."""
        clip_grad_norm(self._split, self.network.groups, max_norm)

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """While entered, norms that the optimizer takes are those of whole tensors."""
        if type(optimizer).__module__.startswith("torch.") or not any(axes for _, axes in self._split):
            return nullcontext()
        return WholeNorms(self._split, self.network.groups)

    def updated(self, update: int) -> None:
        if self._local is not None:
            self._local.step(update)

    def synchronize(self) -> None:
        """Before an evaluation or a checkpoint: let all ranks have the same weights, where a method lets them drift."""
        if self._local is not None:
            self._local.average()

    def versions(self, whole: Tensor) -> list[Tensor]:
        """A whole as each sample rank has it, where a method lets them drift apart, else once."""
        axes = self.network.sample_axes if self.local_mean else ()
        return list(all_gather(whole.contiguous(), self.network.groups.of(axes)))


class Origin:
    """Looks at all that the calls of a network give, and keeps the first layer whose output is not finite, or the
    gradient of it; see `convoy.engine.program.Watch`."""

    def __init__(self) -> None:
        self.first: tuple[bool, int, str] | None = None  # whether it is the gradient; the pass, from 0; the layer
        self._pass = -1

    def of_pass(self, placement: Placement) -> "Origin":
        """A pass through the network begins."""
        self._pass += 1
        return self

    def before(self, name: str) -> None:
        """A call begins."""

    def after(self, name: str, results: Sequence[Any]) -> None:
        """A call has given its results; those between calls have no name."""
        for result in results if name else ():
            if isinstance(result, Tensor) and result.is_floating_point():
                self._look(name, False, result)
                if result.requires_grad:
                    result.register_hook(partial(self._look, name, True))

    def _look(self, name: str, is_gradient: bool, x: Tensor) -> None:
        if self.first is None and not bool(torch.isfinite(x).all()):
            self.first = is_gradient, self._pass, name.partition("#")[0]


ADVICE = "lower optimizer.lr, lengthen schedule.warmup or set clip_norm"
SKIP = ", or leave such updates out (--set on_nan=skip)"


class NotFiniteError(ConvoyError):
    """Loss or weights are not finite; every rank raises it, with what happened after how many weight updates, and what
    is saved to go back to.
    """

    def __init__(self, what: str, by: int, saved: str) -> None:
        super().__init__(f"{what} by update {by:,}: {ADVICE}{SKIP} ({saved})")
        self.what, self.by, self.saved = what, by, saved


class FiniteGuard:
    """Looks at every update before the weights are changed. All ranks make the same calls.

    Losses and gradients are those of the global batch, so that whatever the devices are the same updates are left out.
    A scale of the loss lets gradients overflow, and copes with it: then `gradients` is False.
    """

    def __init__(self, network: Network, ranks: Ranks, gradients: bool) -> None:
        self._network, self._ranks, self._gradients = network, ranks, gradients
        self._buffers: list[Tensor] = []

    def begin(self) -> None:
        """An update begins: keep what it changes before the weights."""
        self._buffers = [buffer.clone() for buffer in self._network.model.buffers()]

    def passes(self, losses: Sequence[Tensor]) -> bool:
        """Whether the update may be made; `losses` are those of this rank's passes."""
        numbers = list(losses)
        if self._gradients:
            parameters = self._network.model.parameters()
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None and parameter.numel()]
            # not their squares, whose sum overflows where no number does
            numbers += torch._foreach_norm(gradients, math.inf) if gradients else []
        # one read of the device, whatever the number of layers
        fine = not numbers or bool(torch.isfinite(torch.stack(numbers)).all())
        return not self._ranks.any(not fine)

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what the update has changed."""
        for buffer, before in zip(self._network.model.buffers(), self._buffers, strict=True):
            buffer.copy_(before)

    def explain(self, update: int, losses: Sequence[Tensor], again: Callable[[], object]) -> str:
        """What is not finite in an update, counted from 0, and in which layer on which ranks that begins, the same on
        every rank; `again` does its passes again, on all ranks, and leaves nothing behind."""
        origin, network = Origin(), self._network
        watch, network.watch = network.watch, origin.of_pass  # of a network that is not captured nothing is seen
        try:
            again()
        finally:
            network.watch = watch
        loss_share = sum(float(loss) for loss in losses)
        reports = self._ranks.gather((origin.first, loss_share, socket.gethostname()))
        loss = sum(self._ranks.gather_samples(loss_share))
        what = f"the loss is {loss}" if not math.isfinite(loss) else "the gradient is not finite"
        sentence = f"{what} in update {update + 1:,}"
        origins = [first for first, _, _ in reports if first is not None]
        if not origins:
            return sentence
        earliest = min(origins, key=itemgetter(0, 1))
        sentence += f", first in the {'gradient' if earliest[0] else 'output'} of layer {earliest[2]}"
        ranks = [f"rank {rank} on host {host}" for rank, (first, _, host) in enumerate(reports) if first == earliest]
        return sentence + (f" on {', '.join(ranks)}" if len(reports) > 1 else "")
