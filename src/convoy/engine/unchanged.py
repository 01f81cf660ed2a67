"""Sees, before a pass, what has changed in a network since it was divided.

What other ranks would not notice is refused. What `forward` reads of Python's objects is part of a pass's signature.
"""

import copy
import zlib
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from convoy.errors import ConvoyError
from convoy.graph.reads import MISSING, VALUES, Reads, Texts, version


class Unchanged:
    """A network as it was divided, with this rank's parameters; where it is `alone` nobody else could miss anything.
    `types` is a checksum of the parameters' types and kinds of device, as of the last `check`; `reads` is what captures
    of the network have read, and `noted` is to be called after one."""

    def __init__(self, model: nn.Module, alone: bool) -> None:
        self._model = model
        self._alone = alone
        self._is_copy = False
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._begin()
        self._remember()

    def _begin(self) -> None:
        self.reads, self._texts = Reads(), Texts()
        self._first: dict[tuple[int, str], str] = {}  # words for what was read, as it was then
        self._replaced: dict[str, str] = {}  # layers without parameters that others have taken the place of
        self.noted()

    def of_copy(self, model: nn.Module) -> "Unchanged":
        """The same for a copy of the network, which need not be complete yet."""
        twin = copy.copy(self)
        twin._model = model
        twin._modules = []
        twin._begin()
        twin._is_copy = True
        return twin

    def exceptions(self) -> tuple[int, ...]:
        """Modules in another mode than the network (frozen batch norm, for example), by their places in `modules()`."""
        training = self._model.training
        if not self._modules:
            self._remember()
        return tuple(i for i, module in enumerate(self._modules) if module.training is not training)

    def state(self) -> tuple[str, ...]:
        """How what `forward` reads differs from what it was when a capture first read it; some 60 ns an attribute."""
        ids = [id(attribute) for attribute in map(dict.get, self._places, self._names, repeat(MISSING))]
        try:
            same = ids == self._ids and self._texts.live == self._texts.copies
            same = same and all(getattr(kind, name, None) == value for kind, name, value in self._classes)
        except (RuntimeError, ValueError):  # tensors and arrays are compared number by number
            same = False
        if not same or [version(x) for x in self._texts.tensors] != self._versions:
            self.noted()
        return self._state

    def noted(self) -> None:
        """Take what `reads` has as it is now."""
        self._texts.clear()
        self._places: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._classes: list[tuple[type, str, Any]] = []
        self._values: list[Any] = []  # kept, so that no others get their ids
        state = [f"{name} is {text}" for name, text in self._replaced.items()]
        paths = {module: path for path, module in self._model.named_modules()} if self.reads.names else {}
        for number, (module, names) in enumerate(self.reads.names.items()):
            for name in names:
                value = vars(module).get(name, MISSING)
                self._places.append(vars(module))
                self._names.append(name)
                self._values.append(value)
                if value is MISSING and isinstance(of_class := getattr(type(module), name, None), VALUES):
                    self._classes.append((type(module), name, of_class))
                    value = of_class
                text = self._texts.of_attribute(name, value)
                if self._first.setdefault((number, name), text) != text:
                    state.append(f"{paths.get(module, '')}.{name} = {text}".strip("."))
        for tensor in self.reads.tensors.values():
            text = self._texts.of(tensor)
            if self._first.setdefault((id(tensor), ""), text) != text:
                state.append(text)
        self._ids = list(map(id, self._values))
        self._versions = [version(x) for x in self._texts.tensors]
        self._state = tuple(state)

    def has_hooks(self) -> bool:
        if not self._modules:
            self._remember()
        return any(
            module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
            for module in self._modules[1:]
        )

    def check(self, inputs: Sequence[Tensor]) -> bool:
        """Whether parameters have another type or device than in the pass before; some 0.1 µs a layer and parameter.
        ConvoyError where something else has changed, or the inputs do not fit together."""
        if any(x.shape[:1] != inputs[0].shape[:1] for x in inputs):
            lengths = ", ".join(str(len(x)) if x.dim() else "no" for x in inputs)
            raise ConvoyError(f"the inputs have {lengths} samples along dim 0: pass as many of each")
        if not self._modules:
            self._remember()
        if [id(value) for where in self._trees for value in where.values()] != self._held_ids:
            self._look_at_layers()
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
        self.check_hooks()
        if self._is_copy and self._model.training and torch.is_grad_enabled():
            raise ConvoyError(
                "this is a copy of a parallelized network, whose gradients nobody adds up: train the original, and "
                "call the copy in eval mode or under torch.no_grad()"
            )
        return cast

    def check_hooks(self) -> None:
        """Refuse hooks on the gradients of parameters, of which each rank computes a part."""
        if any(map(_has_hook, self._parameters)) and not self._alone:
            name = next(name for name, p in self._model.named_parameters() if _has_hook(p))
            raise ConvoyError(
                f"{name} has a gradient hook, which would see this rank's part of the gradient before the ranks' are "
                "added up: take it away, and do with p.grad what it does, between backward() and optimizer.step()"
            )

    def _remember(self) -> None:
        self._trees: list[dict[str, Any]] = []
        self._held: dict[str, nn.Module | nn.Parameter | None] = {}
        for path, module in self._model.named_modules():
            prefix = f"{path}." if path else ""
            for where in (module._modules, module._parameters):
                self._trees.append(where)
                self._held |= {f"{prefix}{key}": value for key, value in where.items()}
        self._held_ids = [id(value) for where in self._trees for value in where.values()]
        self._modules = list(self._model.modules())
        self._parameters = list(self._model.parameters())
        self._look_at_types()

    def _look_at_layers(self) -> None:
        """Some were replaced, taken out or added, which are to have neither parameters nor buffers."""
        old = self._held
        self._remember()
        names = [name for name in {**old, **self._held} if old.get(name) is not self._held.get(name)]
        for value in (tree.get(name) for name in names for tree in (old, self._held)):
            has_state = isinstance(value, nn.Module) and any(map(len, map(list, (value.parameters(), value.buffers()))))
            if has_state or isinstance(value, nn.Parameter) or not self.reads.names:
                self._held, self._held_ids = old, []
                raise ConvoyError(
                    f"{names[0]} was replaced or taken out after convoy.parallelize, which knows nothing of what takes "
                    "its place: build the network anew, replace it, then call convoy.parallelize"
                )
        self._replaced |= {name: self._texts.of(self._held.get(name)) for name in names}
        self.noted()

    def _look_at_types(self) -> None:
        self._kinds = [(p.dtype, p.device) for p in self._parameters]
        self.types = zlib.crc32(repr([(str(dtype), device.type) for dtype, device in self._kinds]).encode())


def _has_hook(parameter: nn.Parameter) -> bool:
    """Whether somebody but Convoy is to see its gradient."""
    added = parameter._post_accumulate_grad_hooks or {}
    return bool(parameter._backward_hooks) or not all(
        getattr(hook, "__module__", "").startswith("convoy.") for hook in added.values()
    )
