"""Which layer is running: a stack that follows the calls of a network's modules."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class LayerStack:
    """Follows the modules of a network as they are called; modules that are not its own count to their callers.

    When a call raises, the stack stays where it was, so that the error can name the layer.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack: list[tuple[str, nn.Module]] = [("", model)]

    @property
    def name(self) -> str:
        """Qualified name of the innermost module; empty for the network itself."""
        return self._stack[-1][0]

    @property
    def module(self) -> nn.Module:
        """The innermost module."""
        return self._stack[-1][1]

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Follow the calls made within it."""

        def enter(module: nn.Module, args: Any) -> None:
            name = self._names.get(id(module))
            self._stack.append((name, module) if name is not None else self._stack[-1])

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._stack.pop()

        hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
