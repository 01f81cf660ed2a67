"""Where numbers that are not finite begin: the first layer that gives some, forward or backward."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from convoy.engine.network import Network
from convoy.plans.place import Placement


@dataclass(frozen=True)
class Found:
    """Numbers that are not finite.

    Attributes:
        of: the output of a layer; its input, where what comes before is no layer; or the gradient of its output.
        layer: its name.
        run: the pass through the network, from 0.
    """

    of: Literal["output", "input", "gradient"]
    layer: str
    run: int

    def __str__(self) -> str:
        return f"the {self.of} of layer {self.layer}"


class Origin:
    """Looks at all that the layers of a network give, and keeps the first that is not finite.

    Attributes:
        found: it; None for nothing.
    """

    def __init__(self) -> None:
        self.found: Found | None = None
        self._run = -1

    @contextmanager
    def watching(self, model: nn.Module, engine: Network | None = None) -> Iterator[None]:
        """While entered, look.

        Args:
            model: the network.
            engine: what runs it, where that does not call its modules.
        """
        with contextlib.ExitStack() as stack:
            if engine is not None:
                before, engine.watch = engine.watch, self.of_pass
                stack.callback(setattr, engine, "watch", before)
            else:
                stack.enter_context(_hook(model.register_forward_pre_hook(self._entered)))
                for name, module in model.named_modules():
                    if not any(True for _ in module.children()):
                        stack.enter_context(_hook(module.register_forward_hook(partial(self._called, name))))
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
        for given in inputs:
            if isinstance(given, Tensor) and given.is_floating_point():
                self._see("input", name, given)
        self.after(name, output if isinstance(output, tuple | list) else [output])

    def _see(self, of: Literal["output", "input", "gradient"], name: str, x: Tensor) -> None:
        if self.found is None and not bool(torch.isfinite(x).all()):
            self.found = Found(of, name.partition("#")[0], self._run)


@contextmanager
def _hook(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
