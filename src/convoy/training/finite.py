"""Losses and gradients that are not finite: which updates are skipped, and in which layer the numbers begin."""

import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from convoy.comm.ranks import Ranks
from convoy.errors import ConvoyError
from convoy.plans.place import Placement
from convoy.training.parallel import TrainedNetwork


@dataclass(frozen=True)
class NonFiniteLayer:
    """Where numbers are not finite: a layer's output, or the gradient of that."""

    of: Literal["output", "gradient"]
    layer: str
    run: int  # the pass through the network, from 0


class Origin:
    """Looks at all that the calls of a network give, and keeps the first that is not finite; see
    `convoy.engine.program.Watch`."""

    def __init__(self) -> None:
        self.first: NonFiniteLayer | None = None
        self._run = -1

    def of_pass(self, placement: Placement) -> "Origin":
        """A pass through the network begins."""
        self._run += 1
        return self

    def before(self, name: str) -> None:
        """A call begins."""

    def after(self, name: str, results: Sequence[Any]) -> None:
        """A call has given its results; those between calls have no name."""
        for result in results if name else ():
            if isinstance(result, Tensor) and result.is_floating_point():
                self._see("output", name, result)
                if result.requires_grad:
                    result.register_hook(partial(self._see, "gradient", name))

    def _see(self, of: Literal["output", "gradient"], name: str, x: Tensor) -> None:
        if self.first is None and not bool(torch.isfinite(x).all()):
            self.first = NonFiniteLayer(of, name.partition("#")[0], self._run)


ADVICE = "lower optimizer.lr, lengthen schedule.warmup or set clip_norm"
SKIP = ", or leave such updates out (--set on_nan=skip)"


class NotFiniteError(ConvoyError):
    """Loss or weights are not finite; every rank raises it, with what happened after how many weight updates, and what
    is saved to go back to.
    """

    def __init__(self, what: str, by: int, saved: str) -> None:
        super().__init__(f"{what} by update {by:,}: {ADVICE}{SKIP} ({saved})")
        self.what, self.by, self.saved = what, by, saved


@dataclass(frozen=True)
class NonFiniteUpdate:
    """An update whose loss or gradient is not finite, the same on every rank."""

    update: int  # counted from 0
    loss: float  # of the global batch
    where: str  # in which layer on which ranks it begins, in words; empty where no layer was seen

    def __str__(self) -> str:
        what = f"the loss is {self.loss}" if not math.isfinite(self.loss) else "the gradient is not finite"
        return f"{what} in update {self.update + 1:,}{self.where}"


class FiniteGuard:
    """Looks at every update before the weights are changed. All ranks make the same calls.

    Losses and gradients are those of the global batch, so that whatever the devices are the same updates are left out.
    A scale of the loss lets gradients overflow, and copes with it: then `gradients` is False.
    """

    def __init__(self, network: TrainedNetwork, ranks: Ranks, gradients: bool) -> None:
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

    def explain(self, update: int, losses: Sequence[Tensor], again: Callable[[], object]) -> NonFiniteUpdate:
        """Where it began; `again` does the passes of this update again, on all ranks, and leaves nothing behind."""
        origin, engine = Origin(), self._network.engine
        watch, engine.watch = engine.watch, origin.of_pass  # of a network that is not captured nothing is seen
        try:
            again()
        finally:
            engine.watch = watch
        loss_share = sum(float(loss) for loss in losses)
        reports = self._ranks.gather((origin.first, loss_share, socket.gethostname()))
        loss = sum(self._ranks.gather_samples(loss_share))
        layers = [layer for layer, _, _ in reports if layer is not None]
        if not layers:
            return NonFiniteUpdate(update, loss, "")
        first = min(layers, key=lambda layer: (layer.of == "gradient", layer.run))
        ranks = [f"rank {rank} on host {host}" for rank, (layer, _, host) in enumerate(reports) if layer == first]
        where = f", first in the {first.of} of layer {first.layer}"
        return NonFiniteUpdate(update, loss, where + (f" on {', '.join(ranks)}" if len(reports) > 1 else ""))
