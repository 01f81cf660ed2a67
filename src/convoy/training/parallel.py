"""What the trainer asks of the network that it trains, on one device and on several."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from convoy.engine import GradientTree, StepContext
from convoy.errors import ConvoyError
from convoy.plans.mesh import Axes
from convoy.plans.plan import Plan
from convoy.training.devices import Devices
from convoy.training.division import Pass


class Network(Protocol):
    """A network whose updates are those of the global batch, wherever its parts are computed.

    Its parameters are `model.parameters()`; where a plan divides them, each rank holds its own part under the serial
    name. An update is, for every pass: `enter`, `forward`, the backward pass, `passed`; then `finish_update`. All
    ranks do the same.
    """

    model: nn.Module
    sample_axes: Axes
    """Axes of the mesh that divide the samples."""
    joint: bool
    """Whether passes exchange between sample ranks, so that those without samples must run them too."""

    def enter(self, update: int, piece: Pass) -> None:
        """Announce a training pass, with the samples of all ranks."""

    def enter_evaluation(self, parts: tuple[int, ...]) -> None:
        """Announce a pass in evaluation mode: how many samples each sample rank has."""

    def forward(self, images: Tensor) -> Any:
        """The outputs for this rank's samples, perhaps none.

        The loss of the trainer is a part of the global mean already, so gradients are added over the ranks as they
        are.
        """

    def paused(self) -> AbstractContextManager[None]:
        """While entered, backward passes leave their gradients on this rank: it is not the last pass."""

    def passed(self) -> None:
        """A backward pass is done."""

    def finish_update(self) -> None:
        """After the last pass: `.grad` and buffers become those of the global batch."""

    def clip(self, max_norm: float) -> None:
        """Scale the gradient down to a norm, taken over the whole parameters."""

    def synchronise(self) -> None:
        """Before an evaluation or a checkpoint: let all ranks have the same weights, where a method lets them drift."""

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of something that lies as the parameter or buffer `name` does. All ranks call it."""

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of such a whole."""


@dataclass
class Approximation:
    """Methods that change the result; none unless asked for.

    Attributes:
        compression: type in which gradients are sent.
        local_updates: updates that every rank makes by itself before the weights are averaged.
    """

    compression: torch.dtype | None = None
    local_updates: int = 1


def build_network(
    model: nn.Module,
    context: StepContext,
    plan: Plan,
    devices: Devices,
    device: torch.device,
    *,
    tree: bool,
    forward: Callable[..., Any],
    approximation: Approximation,
) -> Network:
    """Make a prepared model run under a plan.

    Args:
        model: whole, on its device, prepared by `convoy.engine.prepare`.
        context: its step context.
        plan: for as many devices as there are.
        devices: the ranks.
        device: this rank's.
        tree: add gradients in the fixed tree over the microbatches; every pass is then one microbatch.
        forward: the model, perhaps compiled.
        approximation: methods that the recipe asks for.

    Raises:
        ConvoyError: the plan cannot be.
    """
    if devices.num == 1:
        return OneDevice(model, context, device, forward, tree)
    if set(plan.mesh.names) != {"sample"}:
        raise ConvoyError(f"the plan {plan} is not built yet: use sample={devices.num}")
    return _Samples(model, context, device, forward, tree, devices, approximation)


class OneDevice:
    """A plain network."""

    joint = False
    sample_axes: Axes = ()

    def __init__(
        self, model: nn.Module, context: StepContext, device: torch.device, forward: Callable[..., Any], tree: bool
    ) -> None:
        self.model = model
        self.context = context
        self.device = device
        self.forward = forward
        self._tree = GradientTree(list(model.parameters())) if tree else None

    def enter(self, update: int, piece: Pass) -> None:
        """Announce a pass to the layers."""
        self.context.enter(update, piece.parts[0].start, piece.sizes, self.device)

    def enter_evaluation(self, parts: tuple[int, ...]) -> None:
        """Nothing to announce."""

    def paused(self) -> AbstractContextManager[None]:
        """Nothing to pause."""
        return contextlib.nullcontext()

    def passed(self) -> None:
        """Put the microbatch's gradient into the tree."""
        if self._tree is not None:
            self._tree.add()

    def finish_update(self) -> None:
        """Take the sum out of the tree."""
        if self._tree is not None:
            self._tree.finish()

    def clip(self, max_norm: float) -> None:
        """Scale the gradient."""
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def synchronise(self) -> None:
        """Nobody drifts."""

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor


class _Samples(OneDevice):
    """Whole weights on every rank, gradients added over all of them: only until the engine is there."""

    def __init__(
        self,
        model: nn.Module,
        context: StepContext,
        device: torch.device,
        forward: Callable[..., Any],
        tree: bool,
        devices: Devices,
        approximation: Approximation,
    ) -> None:
        super().__init__(model, context, device, self._forward, False)
        self.sample_axes = (0,)
        self._run = forward
        self.devices = devices
        self.approximation = approximation
        self._leaves: list[list[Tensor | None]] | None = [] if tree else None
        self._samples = 0

    def enter(self, update: int, piece: Pass) -> None:
        rank = self.devices.sample_rank
        self._samples = len(piece.parts[rank])
        self.context.enter(update, piece.parts[rank].start, piece.microbatches[rank], self.device)

    def _forward(self, images: Tensor) -> Any:
        if len(images) == 0:
            return (next(self.model.parameters()).sum() * 0).expand(0, 1)
        return self._run(images)

    def passed(self) -> None:
        if self._leaves is not None:
            if self._samples:
                self._leaves.append([p.grad for p in self.model.parameters()])
            for parameter in self.model.parameters():
                parameter.grad = None

    def finish_update(self) -> None:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if self._leaves is not None:
            everyone = self.devices.gather(self._leaves)
            self._leaves = []
            adding = GradientTree(list(self.model.parameters()))
            for leaf in (leaf for leaves in everyone for leaf in leaves):
                for parameter, gradient in zip(self.model.parameters(), leaf, strict=True):
                    parameter.grad = gradient
                adding.add()
            adding.finish()
        else:
            for parameter in parameters:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                kind = self.approximation.compression or gradient.dtype
                sent = gradient.to(kind)
                dist.all_reduce(sent)
                parameter.grad = sent.to(gradient.dtype)
        for buffer in _floating(self.model.buffers()):  # not what the engine does: its statistics are exact
            dist.all_reduce(buffer)
            buffer /= self.devices.num


def _floating(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    return (tensor for tensor in tensors if tensor.is_floating_point())
