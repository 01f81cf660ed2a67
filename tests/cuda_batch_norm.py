"""CUDA's batch norm on the CPU: the five functions of torch's SyncBatchNorm in plain PyTorch, and what CUDA refuses."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from convoy.ops import shared_batch_norm

LOW = (torch.bfloat16, torch.float16)


def _others(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in LOW else x


def _by_channel(numbers: Tensor, x: Tensor) -> Tensor:
    return numbers.view(-1, *[1] * (x.dim() - 2))


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(_wide(x), _others(x), correction=0)
    return mean, (var + eps).rsqrt()


def _gather(
    x: Tensor,
    means: Tensor,
    inverses: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """One rank after the other, which divides zero by zero where the first has nothing."""
    mean, squares, count = torch.zeros_like(means[0]), torch.zeros_like(means[0]), counts.new_zeros(())
    for own, inverse, number in zip(means, inverses, counts, strict=True):
        factor = 1 / (count + number)
        squares += (inverse.pow(-2) - eps) * number + (mean - own).square() * count * number * factor
        mean = count * factor * mean + number * factor * own
        count = count + number
    for running, found in ((running_mean, mean), (running_var, squares / (count - 1))):
        if running is not None:
            running.mul_(1 - momentum).add_(found, alpha=momentum)
    return mean, (squares / count + eps).rsqrt()


def _normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, _: float
) -> Tensor:
    y = (_wide(x) - _by_channel(mean, x)) * _by_channel(inverse, x)
    y = y if weight is None else y * _by_channel(_wide(weight), x)
    y = y if bias is None else y + _by_channel(_wide(bias), x)
    return y.to(x.dtype).contiguous(memory_format=torch._prims_common.suggest_memory_format(x))


def _reduce(
    gradient: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, *wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = _wide(gradient).sum(_others(x))
    product = (_wide(gradient) * (_wide(x) - _by_channel(mean, x))).sum(_others(x))
    return total, product, product * inverse, total.clone()


def _input_gradient(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    total: Tensor,
    product: Tensor,
    counts: Tensor,
) -> Tensor:
    count = counts.sum()
    slope = _by_channel(inverse.square() * product / count, x)
    dx = _wide(gradient) - _by_channel(total / count, x) - (_wide(x) - _by_channel(mean, x)) * slope
    dx = dx * _by_channel(inverse if weight is None else inverse * _wide(weight), x)
    return dx.to(x.dtype)


_FIVE = {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats_with_counts": _gather,
    "batch_norm_elemt": _normalize,
    "batch_norm_backward_reduce": _reduce,
    "batch_norm_backward_elemt": _input_gradient,
}
_kernels: list[torch.library.Library] = []


class Refused(Exception):  # noqa: N818 (it is what CUDA does)
    """CUDA would have read past what it was given, or said no."""


class CudaContracts(TorchDispatchMode):
    """While entered, batch norm takes only what it takes on CUDA; counts operations but for views and new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and not name.startswith(("empty", "new_empty", "detach")):
            self.operations.append(name)
        if "batch_norm" in name:
            self._check(name, dict(zip((a.name for a in func._schema.arguments), args, strict=False)))
        return func(*args, **(kwargs or {}))

    def _check(self, name: str, given: dict[str, Any]) -> None:
        tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
        x = tensors["input"]
        wide = torch.promote_types(x.dtype, torch.float32)
        if x.numel() == 0:
            raise Refused(f"{name}: nothing to compute with")
        if name == "native_batch_norm_backward" and any(given["output_mask"][1:]) and given.get("weight") is None:
            raise Refused(f"{name}: the gradients of weight and bias are made in the likeness of the weight")
        if name == "batch_norm_backward_reduce" and any((given["weight_g"], given["bias_g"])) and "weight" not in given:
            raise Refused(f"{name}: the gradients of weight and bias are made in the likeness of the weight")
        if "gather" in name:
            kind = tensors["running_mean"].dtype if "running_mean" in tensors else x.dtype
            self._types(name, tensors, ("counts",), kind)
            self._types(name, tensors, ("mean", "invstd"), torch.promote_types(kind, torch.float32))
            if not bool(tensors["counts"].all()):
                raise Refused(f"{name}: no statistics of nothing")
            return
        self._types(name, tensors, ("grad_out",), x.dtype)
        self._types(name, tensors, ("mean", "invstd", "save_mean", "save_invstd", "sum_dy", "sum_dy_xmu"), wide)
        self._types(name, tensors, ("weight", "bias"), wide)
        self._types(name, tensors, ("count",), torch.int32)

    def _types(self, name: str, tensors: dict[str, Tensor], keys: Sequence[str], dtype: torch.dtype) -> None:
        for key in keys:
            if key in tensors and tensors[key].dtype != dtype:
                raise Refused(f"{name}: {key} is {tensors[key].dtype}, not {dtype}")


@contextmanager
def cuda_batch_norm(loops: Any = None) -> Iterator[CudaContracts]:
    """Let this process compute batch norm over several ranks as on CUDA, or by other `loops` under CUDA's contracts."""
    if not _kernels:
        _kernels.append(torch.library.Library("aten", "IMPL"))  # torch has none of them for the CPU
        for name, function in _FIVE.items():
            _kernels[0].impl(name, function, "CPU")
    with pytest.MonkeyPatch.context() as patch, CudaContracts() as contracts:
        patch.setitem(shared_batch_norm._LOOPS, "cpu", loops or shared_batch_norm._CudaLoops())
        yield contracts
