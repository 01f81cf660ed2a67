"""Told by autograd: before a gradient is added to `.grad`, after it, and when the whole backward pass is done.

The end of a backward pass is known to torch's engine alone, which tells it to `queue_callback`, a private function that
DistributedDataParallel rests on too; which pass is running, to another. They are used here and nowhere else.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

_engine = torch.autograd.Variable._execution_engine


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward pass that is running now is done; its errors become those of `backward()`."""

    def called() -> None:
        with torch._C.DisableTorchFunctionSubclass():  # `.grad` may be a DividedGradient
            callback()

    _engine.queue_callback(called)


def current_backward() -> int:
    """A number for the backward pass that is running in this thread, another one for every pass; -1 for none."""
    return torch._C._current_graph_task_id()


class BackwardWatch:
    """Calls `before(i)` and `after(i)` around the addition of a gradient to `parameters[i].grad`."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], before: Callable[[int], None], after: Callable[[int], None]
    ) -> None:
        self._before = before
        self._after = after
        self._announced = [False] * len(parameters)
        # The nodes must be kept: a parameter itself holds its own only weakly, and the hook would go with it.
        self._nodes = [get_gradient_edge(parameter).node for parameter in parameters]
        self._handles = [node.register_prehook(self._before_hook(i)) for i, node in enumerate(self._nodes)]
        self._handles += [
            parameter.register_post_accumulate_grad_hook(self._after_hook(i)) for i, parameter in enumerate(parameters)
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._nodes = []

    def _before_hook(self, i: int) -> Callable[[Sequence[Tensor]], None]:
        def hook(gradients: Sequence[Tensor]) -> None:
            self._announced[i] = True
            with torch._C.DisableTorchFunctionSubclass():  # `.grad` may be a DividedGradient
                self._before(i)

        return hook

    def _after_hook(self, i: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if not self._announced[i]:
                raise RuntimeError(
                    f"parameter {i} of shape {tuple(parameter.shape)} was cast or moved after its gradients had been "
                    "registered for reduction: move and cast the model before it is made parallel"
                )
            self._announced[i] = False
            with torch._C.DisableTorchFunctionSubclass():
                self._after(i)

        return hook
