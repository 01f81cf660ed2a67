"""Losses and gradients that are not finite: which updates are skipped, and in which layer the numbers begin."""

import contextlib
import math
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from convoy.comm.ranks import Ranks
from convoy.engine.network import Network
from convoy.engine.uncaptured import Uncaptured
from convoy.errors import ConvoyError
from convoy.plans.place import Placement
from convoy.training.parallel import TrainedNetwork


@dataclass(frozen=True)
class NonFiniteLayer:
    """Where numbers are not finite: a layer's output; its input, where what comes before is no layer; or the gradient
    of its output.
    """

    of: Literal["output", "input", "gradient"]
    layer: str
    run: int  # the pass through the network, from 0

    def __str__(self) -> str:
        return f"the {self.of} of layer {self.layer}"


class Origin:
    """Looks at all that the layers of a network give, and keeps the first that is not finite."""

    def __init__(self) -> None:
        self.found: NonFiniteLayer | None = None
        self._run = -1

    @contextmanager
    def watching(self, model: nn.Module, engine: Network | None = None) -> Iterator[None]:
        """While entered, look; `engine` is what runs the network, where that does not call its modules."""
        with contextlib.ExitStack() as stack:
            if engine is not None:
                before, engine.watch = engine.watch, self.of_pass
                stack.callback(setattr, engine, "watch", before)
            else:
                stack.enter_context(model.register_forward_pre_hook(self._entered))
                for name, module in model.named_modules():
                    if not any(True for _ in module.children()):
                        stack.enter_context(module.register_forward_hook(partial(self._called, name)))
            yield

    def of_pass(self, placement: Placement | None = None) -> "Origin":
        """A pass through the network begins; see `convoy.engine.program.Watch`."""
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

    def _entered(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.of_pass()

    def _called(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        for value in inputs:
            if isinstance(value, Tensor) and value.is_floating_point():
                self._see("input", name, value)
        self.after(name, output if isinstance(output, tuple | list) else [output])

    def _see(self, of: Literal["output", "input", "gradient"], name: str, x: Tensor) -> None:
        if self.found is None and not bool(torch.isfinite(x).all()):
            self.found = NonFiniteLayer(of, name.partition("#")[0], self._run)


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
            gradients = [gradient for gradient in self._network.own_gradients() if gradient.numel()]
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
        origin, network = Origin(), self._network
        engine = network.engine
        with origin.watching(network.model, None if isinstance(engine, Uncaptured) else engine):
            again()
        loss_share = sum(float(loss) for loss in losses)
        reports = self._ranks.gather((origin.found, loss_share, socket.gethostname()))
        loss = sum(self._ranks.gather_samples(loss_share))
        return NonFiniteUpdate(update, loss, _where([(layer, host) for layer, _, host in reports]))


def _where(reports: Sequence[tuple[NonFiniteLayer | None, str]]) -> str:
    """The earliest layer of those that the ranks name, with their hosts, and which of them do."""
    layers = [layer for layer, _ in reports if layer is not None]
    if not layers:
        return ""
    first = min(layers, key=lambda layer: (layer.of == "gradient", layer.run))
    ranks = [f"rank {rank} on host {host}" for rank, (layer, host) in enumerate(reports) if layer == first]
    return f", first in {first}" + (f" on {', '.join(ranks)}" if len(reports) > 1 else "")
