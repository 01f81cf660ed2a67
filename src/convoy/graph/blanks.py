"""Tensors that a network makes empty: what they are is decided by what is written to them first."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from convoy.graph import tree
from convoy.graph.constants import Constants
from convoy.graph.errors import CaptureError

Draw = tuple[str, float | None]
"""Kind of random numbers, and their probability where they have one."""


class Blanks:
    """Empty tensors to which nothing was written yet."""

    def __init__(self, constants: Constants) -> None:
        self._constants = constants
        self._blank: set[int] = set()

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._blank

    def make(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Call a function that gives one."""
        made: Tensor = function(*args, **kwargs)
        self._constants.keep(made)
        self._blank.add(id(made))
        return made

    def forget(self, tensor: Tensor) -> None:
        """Something was written to it."""
        self._blank.discard(id(tensor))

    def fill(
        self, name: str, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], layer: str
    ) -> Draw | Tensor:
        """The first thing that is written to an empty tensor.

        Args:
            name: of the function that does it.
            args, kwargs: its other arguments.
            layer: that calls it.

        Returns:
            The tensor, a constant from now on, or the random numbers that it is to be.

        Raises:
            CaptureError: it is something else.
        """
        if name == "bernoulli_":
            p = args[0] if args else kwargs.get("p", 0.5)
            return "bernoulli", probability(self._constants, p, layer) if isinstance(p, Tensor) else float(p)
        if name == "uniform_" and (*args, *kwargs.values()) in ((), (0, 1)):
            return "uniform", None
        if name in ("zero_", "fill_") and not tree.leaves((args, kwargs), Tensor):
            self.forget(tensor)
            return self._constants.full(tensor, 0 if name == "zero_" else (*args, *kwargs.values())[0])
        raise CaptureError(f"it calls {name} on an empty tensor", layer)


def probability(constants: Constants, tensor: Tensor, layer: str) -> float:
    """The one probability that a constant consists of.

    Raises:
        CaptureError: it has several.
    """
    p = constants.everywhere(tensor)
    if p is None:
        raise CaptureError("it draws random numbers with several probabilities", layer)
    return p
