"""What the trainer asks of the network that it trains, on one device and on several."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from convoy.engine import GradientTree, StepContext
from convoy.plans.mesh import Axes
from convoy.training.ranks.division import Division, Pass


class TrainedNetwork(Protocol):
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
    local_mean: bool
    """Whether the loss is to be the mean over this rank's own samples: approximate methods alone."""
    version: int
    """Which of the optimiser's states is this rank's, where a method lets them drift apart, else 0."""

    def leaves_out(self, update: int, piece: Pass) -> bool:
        """Whether this rank leaves out a pass without samples that is not the last: no other needs it there."""

    def enter(self, update: int, piece: Pass) -> None:
        """Announce a training pass, with the samples of all ranks."""

    def enter_evaluation(self, parts: tuple[int, ...]) -> None:
        """Announce a pass in evaluation mode: how many samples each sample rank has."""

    def forward(self, images: Tensor) -> Any:
        """The outputs for this rank's samples, perhaps none.

        The loss of the trainer is a part of the global mean already, so gradients are added over the ranks as they
        are.
        """

    def share(self, optimizer: Optimizer) -> Optimizer:
        """The optimiser with its work divided over ranks that have the same weights, where that is faster."""

    def divide(self, division: Division, num_passes: int) -> None:
        """Divide the updates from the next on so, in so many passes each. All ranks call it."""

    def paused(self) -> AbstractContextManager[None]:
        """While entered, backward passes leave their gradients on this rank: it is not the last pass."""

    def passed(self) -> None:
        """A backward pass is done."""

    def finish_update(self) -> None:
        """After the last pass: `.grad` and buffers become those of the global batch."""

    def own_gradients(self) -> list[Tensor]:
        """The gradients that this rank's part of the update will use, after `finish_update`."""

    def clip(self, max_norm: float) -> None:
        """Scale the gradient down to a norm, taken over the whole parameters."""

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """While entered, norms that the optimiser takes are those of whole tensors."""

    def updated(self) -> None:
        """The optimiser has changed the weights."""

    def synchronise(self) -> None:
        """Before an evaluation or a checkpoint: let all ranks have the same weights, where a method lets them drift."""

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of something that lies as the parameter or buffer `name` does. All ranks call it."""

    def versions(self, name: str, tensor: Tensor) -> list[Tensor]:
        """The whole as each sample rank has it, where a method lets them drift apart, else once. All ranks call it."""

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of such a whole."""


class OneDevice:
    """A plain network."""

    sample_axes: Axes = ()
    joint = False
    local_mean = False
    version = 0

    def __init__(
        self, model: nn.Module, context: StepContext, device: torch.device, forward: Callable[..., Any], tree: bool
    ) -> None:
        self.model = model
        self.context = context
        self.device = device
        self.forward = forward
        self._tree = GradientTree(list(model.parameters())) if tree else None

    def leaves_out(self, update: int, piece: Pass) -> bool:
        """One device has samples in every pass."""
        return False

    def enter(self, update: int, piece: Pass) -> None:
        """Announce a pass to the layers."""
        self.context.enter(update, piece.parts[0].start, piece.sizes, self.device)

    def enter_evaluation(self, parts: tuple[int, ...]) -> None:
        """Nothing to announce."""

    def share(self, optimizer: Optimizer) -> Optimizer:
        """Nobody to share with."""
        return optimizer

    def divide(self, division: Division, num_passes: int) -> None:
        """Nothing to divide."""

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

    def own_gradients(self) -> list[Tensor]:
        """All."""
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def clip(self, max_norm: float) -> None:
        """Scale the gradient."""
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """Tensors are whole."""
        return contextlib.nullcontext()

    def updated(self) -> None:
        """Nothing to do."""

    def synchronise(self) -> None:
        """Nobody drifts."""

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def versions(self, name: str, tensor: Tensor) -> list[Tensor]:
        """The tensor alone."""
        return [tensor]

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor
