"""Losses and gradients that are not finite: which updates are skipped, and in which layer the numbers begin."""

import math
import socket
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from convoy.comm.ranks import Ranks
from convoy.engine.network import Network
from convoy.errors import ConvoyError
from convoy.plans.place import Placement


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
