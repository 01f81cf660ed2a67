"""Refuses, before a pass, what has changed since a network was divided in a way that other ranks would not notice."""

import copy
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from convoy.errors import ConvoyError


class Unchanged:
    """A network as it was divided.

    Args:
        model: with this rank's parameters.
        alone: there is one device, on which nobody else could miss anything.

    Attributes:
        types: a checksum of the parameters' types and kinds of device, as of the last `check`.
    """

    def __init__(self, model: nn.Module, alone: bool) -> None:
        self._model = model
        self._alone = alone
        self._is_copy = False
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._remember()

    def of_copy(self, model: nn.Module) -> "Unchanged":
        """The same for a copy of the network, which need not be complete yet."""
        twin = copy.copy(self)
        twin._model = model
        twin._modules = []
        twin._is_copy = True
        return twin

    def exceptions(self) -> tuple[int, ...]:
        """Modules in another mode than the network (frozen batch norm, for example), by their places in `modules()`."""
        training = self._model.training
        if not self._modules:
            self._remember()
        return tuple(i for i, module in enumerate(self._modules) if module.training is not training)

    def has_hooks(self) -> bool:
        """Whether somebody is to see layers inside the network run."""
        if not self._modules:
            self._remember()
        return any(
            module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
            for module in self._modules[1:]
        )

    def check(self, inputs: Sequence[Tensor]) -> bool:
        """Look at the network and at the inputs of a pass; some 0.1 µs for each layer and parameter.

        Returns:
            Whether parameters have another type or device than in the pass before.

        Raises:
            ConvoyError: something has changed, or the inputs do not fit together.
        """
        if any(x.shape[:1] != inputs[0].shape[:1] for x in inputs):
            lengths = ", ".join(str(len(x)) if x.dim() else "no" for x in inputs)
            raise ConvoyError(f"the inputs have {lengths} samples along dim 0: pass as many of each")
        if not self._modules:
            self._remember()
        for where, key, name, each in self._held:
            if where.get(key) is not each:
                raise ConvoyError(
                    f"{name} was replaced or taken out after convoy.parallelize, which knows nothing of what takes its "
                    "place: build the network anew, replace it, then call convoy.parallelize"
                )
        cast = [(p.dtype, p.device) for p in self._parameters] != self._kinds
        if cast:
            self._look_at_types()
        if self._alone:
            return cast
        if any(p.requires_grad for p in self._frozen):
            raise ConvoyError(
                "a parameter that was frozen is to be trained now, and its gradient would stay on its rank: build the "
                "network anew, set requires_grad, then call convoy.parallelize"
            )
        if self._is_copy and self._model.training and torch.is_grad_enabled():
            raise ConvoyError(
                "this is a copy of a parallelized network, whose gradients nobody adds up: train the original, and "
                "call the copy in eval mode or under torch.no_grad()"
            )
        return cast

    def _remember(self) -> None:
        """The layers and parameters that there are now."""
        self._held: list[tuple[dict[str, Any], str, str, nn.Module | nn.Parameter | None]] = []
        for path, module in self._model.named_modules():
            prefix = f"{path}." if path else ""
            for where in (module._modules, module._parameters):
                self._held += [(where, key, f"{prefix}{key}", each) for key, each in where.items()]
        self._modules = list(self._model.modules())
        self._parameters = list(self._model.parameters())
        self._look_at_types()

    def _look_at_types(self) -> None:
        self._kinds = [(p.dtype, p.device) for p in self._parameters]
        self.types = zlib.crc32(repr([(str(dtype), device.type) for dtype, device in self._kinds]).encode())
