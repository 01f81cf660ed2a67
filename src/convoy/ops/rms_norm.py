"""RMS norm: vectors divided by their root mean square (Zhang and Sennrich, 2019)."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from convoy.comm.collectives import all_gather, all_reduce
from convoy.graph.torch_call import Recognized, TorchCall
from convoy.ops.context import exchanged
from convoy.ops.kernel import Alone, Kernel, Site, by_role
from convoy.ops.layer_norm import num_vectors, place, shared_dims
from convoy.ops.layouts import axes_along
from convoy.ops.operation import Operation, keeps_input
from convoy.ops.shared_statistics import affine


def _rms_norm(call: TorchCall) -> Recognized:
    arguments = call.bound(input=None, normalized_shape=None, weight=None, eps=None)
    return Recognized("rms_norm", {**arguments, "normalized_shape": tuple(arguments["normalized_shape"])})


def _build(site: Site) -> Kernel:
    """The function itself where the rank has whole vectors; otherwise sums of squares are shared with other ranks."""
    call, pick = site.call, by_role(site.call, "input", "weight")
    source, eps = call.attributes["input"], call.attributes["eps"]
    layout = site.layouts[source]
    dims = sorted(shared_dims(call, site.graph, layout))
    local = tuple(len(site.parts(source, dim)) for dim in dims)
    group, total = site.groups.of(axes_along(layout, dims)), math.prod(call.attributes["normalized_shape"])

    def kernel(*tensors: Tensor) -> list[Tensor]:
        x, weight = pick(tensors)
        if group is None:
            return [F.rms_norm(x, local, weight, eps)]
        vectors = x.reshape(*x.shape[: dims[0]], math.prod(local))
        epsilon = torch.finfo(x.dtype).eps if eps is None else eps
        return [affine(_Normalize.apply(vectors, group, total, epsilon).view(x.shape), weight, None, local)]

    return kernel if group is None else Alone(kernel)


class _Normalize(torch.autograd.Function):
    """x / √(mean(x²) + eps) over vectors of `total` numbers, of which this rank has a part: [..., numbers]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, total: int, eps: float) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        squares = exchanged(all_gather, wide.square().sum(-1, keepdim=True), group).sum(0)
        inverse = (squares / total + eps).rsqrt()
        y = (wide * inverse).to(x.dtype)
        ctx.save_for_backward(y, inverse)
        ctx.group, ctx.total = group, total
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """dx = (dy − y·mean(dy·y)) / √(mean(x²) + eps)."""
        y, inverse = ctx.saved_tensors
        wide = gradient.to(inverse.dtype)
        slope = all_reduce((wide * y).sum(-1, keepdim=True), ctx.group) / ctx.total
        return ((wide - y * slope) * inverse).to(y.dtype), None, None, None


OPERATIONS = (
    Operation(
        "rms_norm",
        place,
        {"rms_norm": _rms_norm},
        _build,
        keeps=keeps_input,
        keeps_inside=1,
        follows=True,
        passes=1.0,
        options=("normalized_shape",),
        shared_dims=shared_dims,
        statistics=num_vectors,
        whole_precision=frozenset({"cuda"}),
    ),
)
