"""Losses and gradients that are not finite: what is said of them, and updates that are left out because of them."""

import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from convoy.engine.layerwise import Layerwise
from convoy.engine.origin import Found, Origin
from convoy.errors import ConvoyError
from convoy.training.ranks.devices import Devices
from convoy.training.ranks.parallel import TrainedNetwork
from convoy.training.ranks.under_plan import UnderPlan

ADVICE = "lower optimizer.lr, lengthen schedule.warmup or set clip_norm"
SKIP = ", or leave such updates out (--set on_nan=skip)"


class NotFiniteError(ConvoyError):
    """Loss or weights are not finite; every rank raises it.

    Attributes:
        what: happened, in words.
        by: weight updates done when it was noticed.
        saved: what there is to go back to, in words.
    """

    def __init__(self, what: str, by: int, saved: str) -> None:
        super().__init__(f"{what} by update {by:,}: {ADVICE}{SKIP} ({saved})")
        self.what, self.by, self.saved = what, by, saved


@dataclass(frozen=True)
class Bad:
    """An update whose loss or gradient is not finite, the same on every rank.

    Attributes:
        update: its number, counted from 0.
        loss: of the global batch.
        where: in which layer on which ranks it begins, in words; empty where no layer was seen.
    """

    update: int
    loss: float
    where: str

    def __str__(self) -> str:
        what = f"the loss is {self.loss}" if not math.isfinite(self.loss) else "the gradient is not finite"
        return f"{what} in update {self.update + 1:,}{self.where}"


class Guard:
    """Looks at every update before the weights are changed. All ranks make the same calls.

    Losses and gradients are those of the global batch, so that whatever the devices are the same updates are left out.

    Args:
        network: that is trained.
        devices: the ranks.
        gradients: whether those are looked at too; a scale of the loss lets them overflow, and copes with it.
    """

    def __init__(self, network: TrainedNetwork, devices: Devices, gradients: bool) -> None:
        self._network, self._devices, self._gradients = network, devices, gradients
        self._buffers: list[Tensor] = []

    def begin(self) -> None:
        """An update begins: keep what it changes before the weights."""
        self._buffers = [buffer.clone() for buffer in self._network.model.buffers()]

    def passes(self, losses: Sequence[Tensor]) -> bool:
        """Whether the update may be made; `losses` are those of this rank's passes."""
        fine = all(bool(torch.isfinite(loss)) for loss in losses)
        if fine and self._gradients:
            fine = all(bool(torch.isfinite(gradient).all()) for gradient in self._network.own_gradients())
        return not self._devices.any(not fine)

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what the update has changed."""
        for buffer, before in zip(self._network.model.buffers(), self._buffers, strict=True):
            buffer.copy_(before)

    def explain(self, update: int, losses: Sequence[Tensor], again: Callable[[], object]) -> Bad:
        """Where it began.

        Args:
            update: its number, counted from 0.
            losses: of this rank's passes.
            again: does the passes of this update again, on all ranks, and leaves nothing behind.
        """
        origin, network = Origin(), self._network
        engine = network.engine if isinstance(network, UnderPlan) else None
        with origin.watching(network.model, None if isinstance(engine, Layerwise) else engine):
            again()
        own = sum(float(loss) for loss in losses)
        said = self._devices.gather((origin.found, own, socket.gethostname()))
        loss = sum(self._devices.gather_samples(own))
        return Bad(update, loss, _where([(found, host) for found, _, host in said]))


def _where(said: Sequence[tuple[Found | None, str]]) -> str:
    """The earliest of what the ranks have found, and which of them have."""
    order = {"input": 0, "output": 0, "gradient": 1}
    known = [found for found, _ in said if found is not None]
    if not known:
        return ""
    first = min(known, key=lambda found: (order[found.of], found.run))
    ranks = [f"rank {rank} on host {host}" for rank, (found, host) in enumerate(said) if found == first]
    return f", first in {first}" + (f" on {', '.join(ranks)}" if len(said) > 1 else "")
