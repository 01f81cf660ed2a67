"""Gradients of divided parameters that answer for the whole tensor, so that torch's own clipping is right.

Each rank holds a part of such a gradient. What treats numbers one by one works on the part; a norm or a sum is taken
over the parts of all ranks; anything else would look at one part as if it were the whole, and is refused. So
`torch.nn.utils.clip_grad_norm_`, `torch.amp.GradScaler` and a loop of one's own over `p.grad.norm()` give on every rank
what they give on one device. All ranks must ask for the same. Optimizers see plain tensors (`clear`), so that their
fused forms, their speed and their state are as ever.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from convoy.comm.collectives import all_gather, all_reduce
from convoy.comm.groups import Groups
from convoy.engine.gradients.norms import whole_norms
from convoy.engine.gradients.reducer import at_end_of_backward, current_backward
from convoy.errors import ConvoyError
from convoy.graph.tree import leaves, replace
from convoy.plans.mesh import Axes

_NORMS = {"norm", "vector_norm", "linalg_vector_norm", "linalg_norm"}
# Reductions over all elements: from those of the ranks, [ranks], to that of the whole, and what a rank without a part
# of the tensor gives. Their results have the tensor's type, but for those in `_TYPES`.
_REDUCTIONS: dict[str, tuple[Callable[[Tensor, int], Tensor], float]] = {
    "sum": (torch.sum, 0.0),
    "mean": (torch.sum, 0.0),
    "count_nonzero": (torch.sum, 0.0),
    "any": (torch.any, 0.0),
    "all": (torch.all, 1.0),
    **dict.fromkeys(("max", "amax"), (torch.amax, -math.inf)),
    **dict.fromkeys(("min", "amin"), (torch.amin, math.inf)),
}
_TYPES = {"any": torch.bool, "all": torch.bool, "count_nonzero": torch.int64}
# What looks at several numbers of the part and would answer in its shape, or by numbers for one rank alone.
_REFUSED = {"numpy", "__array__", "tolist", "__dlpack__", "equal", "allclose", "flip", "roll", "sort", "argsort"}
_REFUSED |= {"cumsum", "cumprod", "softmax", "log_softmax", "renorm", "cov", "corrcoef", "searchsorted", "unique"}
_REFUSED |= {"histc"}


class DividedGradient(Tensor):
    """This rank's part of a gradient; see the module."""

    axes: Axes  # mesh axes that divide it
    groups: Groups
    whole_numel: int  # elements of the whole

    @staticmethod
    def of(part: Tensor, axes: Axes, groups: Groups, whole_numel: int) -> "DividedGradient":
        """The same memory, answering for the whole."""
        gradient: DividedGradient = part.as_subclass(DividedGradient)
        gradient.axes, gradient.groups, gradient.whole_numel = axes, groups, whole_numel
        return gradient

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            return _answer(func, getattr(func, "__name__", ""), args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConvoyError("a gradient of a divided parameter is this rank's part: save what convoy.gradients gives")


class DividedGradients:
    """Lets the gradients of divided parameters be `DividedGradient`s between a backward pass and the next update. Each
    parameter comes with the axes that divide it and the elements of the whole."""

    def __init__(self, parameters: Sequence[tuple[nn.Parameter, Axes, int]], groups: Groups) -> None:
        self._groups = groups
        self._divided = [entry for entry in parameters if groups.of(entry[1]) is not None]
        self._queued = -1
        for parameter, _, _ in self._divided:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._seen)

    def mark(self) -> None:
        """Let the gradients that there are answer for the whole."""
        self._queued = -1
        for parameter, axes, numel in self._divided:
            if parameter.grad is not None and type(parameter.grad) is Tensor:
                parameter.grad = DividedGradient.of(parameter.grad, axes, self._groups, numel)

    def clear(self) -> None:
        """Let them be plain tensors, for an optimizer that was seen to treat numbers one by one."""
        for parameter, _, _ in self._divided:
            if isinstance(parameter.grad, DividedGradient):
                parameter.grad = parameter.grad.as_subclass(Tensor)

    def _seen(self, parameter: Tensor) -> None:
        backward = current_backward()  # an earlier one may have broken off
        if self._queued != backward:
            self._queued = backward
            at_end_of_backward(lambda: at_end_of_backward(self.mark))  # after the ranks' gradients are added


def plain(tensor: Tensor) -> Tensor:
    """The part itself."""
    return tensor.as_subclass(Tensor) if isinstance(tensor, DividedGradient) else tensor


def _answer(func: Callable, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    parts = leaves((args, kwargs), DividedGradient)
    if name == "_foreach_norm":
        axes = [x.axes if isinstance(x, DividedGradient) else () for x in args[0]]
        order = _order(name, args, kwargs)
        tensors = [x if x.numel() else x.new_zeros(1) for x in args[0]]  # of other stages there is nothing
        norms = [plain(norm) for norm in func(tensors, *args[1:], **kwargs)]
        return tuple(whole_norms(norms, axes, parts[0].groups, order))
    if name in _NORMS:
        value = plain(func(*args, **kwargs)) if parts[0].numel() else parts[0].new_zeros(())
        return whole_norms([value], [parts[0].axes], parts[0].groups, _order(name, args, kwargs))[0]
    if name in _REDUCTIONS:
        if any(value is not None and not isinstance(value, torch.dtype) for value in (*args[1:], *kwargs.values())):
            raise _refused(name)  # it does not reduce all elements
        part, (reduce, of_nothing) = parts[0], _REDUCTIONS[name]
        if part.numel() == 0:
            value = plain(part).new_full((), of_nothing).to(_TYPES.get(name, part.dtype))
        else:
            value = func(*args, **kwargs)
            value = value * (part.numel() / part.whole_numel) if name == "mean" else value
        return reduce(_gathered(value, part), 0)
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        func(*args, **kwargs)
        world = parts[0].groups.of(tuple(parts[0].groups.mesh.axes))
        all_reduce(args[1], world)
        return None
    if name == "__deepcopy__":
        return _like(args[0].as_subclass(Tensor).clone(), parts)
    if name in _REFUSED:
        raise _refused(name)
    result = func(*args, **kwargs)
    return replace(result, Tensor, lambda x: _own(x, parts, name, func))


def _own(x: Tensor, parts: Sequence[DividedGradient], name: str, func: Callable) -> Tensor:
    if isinstance(x, DividedGradient):
        return x
    if all(x.shape != part.shape for part in parts):
        raise _refused(name if name != "__get__" else getattr(func, "__self__", func).__name__)
    return _like(x, parts)


def _like(x: Tensor, parts: Sequence[DividedGradient]) -> Tensor:
    of = next((part for part in parts if part.shape == x.shape), parts[0])
    return DividedGradient.of(x, of.axes, of.groups, of.whole_numel)


def _refused(name: str) -> ConvoyError:
    return ConvoyError(
        f"{name} of the gradient of a divided parameter would see this rank's part as if it were the whole: take the "
        "whole gradients, convoy.gradients(net), or clip with torch.nn.utils.clip_grad_norm_"
    )


def _order(name: str, args: tuple, kwargs: dict[str, Any]) -> float:
    """The order of a vector norm over all elements; all others are refused."""
    arguments = [*args[1:], *(value for key, value in kwargs.items() if key != "dtype")]
    arguments = [value for value in arguments if value is not None and value is not False]
    if any(key == "dim" and value is not None for key, value in kwargs.items()) or len(arguments) > 1:
        raise _refused(name)
    if not arguments or arguments[0] == "fro":
        return 2.0
    if name == "linalg_norm" or isinstance(arguments[0], str):  # of a matrix
        raise _refused(name)
    return float(arguments[0])


def _gathered(value: Tensor, part: DividedGradient) -> Tensor:
    """The numbers of all parts, [ranks]."""
    value = plain(value)
    message = value.reshape(1).to(torch.uint8) if value.dtype == torch.bool else value.reshape(1).contiguous()
    return all_gather(message, part.groups.of(part.axes))[:, 0].to(value.dtype)
