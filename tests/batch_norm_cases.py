"""Batch norm calls under layouts, and what the plain layer makes of them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.engine import MicrobatchNorm, StepContext
from convoy.plans.layout import WHOLE, Layout, Split, consecutive, indices
from one_call import OneCall

SHAPE = (7, 6, 5, 4)


def samples(*sizes: int, axes: tuple[int, ...] = (0,)) -> dict[int, Split]:
    return {0: Split(axes, consecutive(sizes))}


CHANNELS = {1: Split((0,), (indices((0, 3, 5)), indices((1, 2, 4))))}
LAYOUTS: dict[str, tuple[tuple[int, ...], Layout]] = {
    "uneven samples": ((2,), Layout.of(samples(5, 2))),
    "a rank without samples": ((3,), Layout.of(samples(4, 0, 3))),
    "channel lists": ((2,), Layout.of(CHANNELS)),
    "a rank without channels": ((2,), Layout.of({1: Split((0,), (range(0), range(6)))})),
    "rows": ((3,), Layout.of({2: Split((0,), consecutive((1, 3, 1)))})),
    "samples and channels": ((2, 2), Layout.of({**CHANNELS, **samples(3, 4, axes=(1,))})),
    "samples and columns": ((2, 2), Layout.of({**samples(5, 2), 3: Split((1,), consecutive((1, 3)))})),
    "samples and nothing": ((2, 2), Layout.of(samples(5, 2))),
    "samples over both axes": ((2, 2), Layout.of(samples(2, 0, 1, 4, axes=(0, 1)))),
    "whole": ((2,), WHOLE),
}


def make(
    given: Layout,
    sizes: tuple[int, ...],
    shape: tuple[int, ...] = SHAPE,
    affine: bool = True,
    track: bool = True,
    **kw: Any,
) -> OneCall:
    torch.manual_seed(1)
    x = torch.randn(shape, dtype=torch.float64) * 3 + 50
    channels = shape[1]
    tensors: dict[str, Tensor] = {"x": x}
    attributes: dict[str, Any] = dict.fromkeys(("weight", "bias", "running_mean", "running_var", "num_batches_tracked"))
    if affine:
        tensors |= {"weight": torch.rand(channels).double(), "bias": torch.randn(channels).double()}
    if track:
        tensors |= {"running_mean": torch.randn(channels).double(), "running_var": torch.rand(channels).double()}
        tensors |= {"num_batches_tracked": torch.tensor(3)}
    attributes |= {name: name for name in tensors if name != "x"}
    attributes |= {"input": "x", "training": kw.pop("training_call", True), "momentum": kw.pop("momentum", 0.1)}
    attributes |= {"eps": 1e-5}
    buffers = tuple(name for name in ("running_mean", "running_var", "num_batches_tracked") if name in tensors)
    gradient = torch.randn(shape, dtype=torch.float64)
    return OneCall("batch_norm", F.batch_norm, tensors, attributes, sizes, given, gradient, buffers=buffers, **kw)


def layer(case: OneCall) -> nn.Module:
    """The plain module with the case's numbers."""
    kind = {2: nn.BatchNorm1d, 4: nn.BatchNorm2d}[case.gradient.dim()]
    affine, track = "weight" in case.tensors, "running_mean" in case.tensors
    module = kind(case.gradient.shape[1], 1e-5, case.attributes["momentum"], affine, track, dtype=torch.float64)
    module.load_state_dict({name: t for name, t in case.tensors.items() if name != "x"})
    return module.train(case.attributes["training"])


def serial(case: OneCall, module: nn.Module | None = None) -> dict[str, Tensor]:
    module = module or layer(case)
    x = case.tensors["x"].clone().requires_grad_()
    for _ in range(case.passes):
        y = module(x)
        y.backward(case.gradient)
    found = {"y": y.detach(), "x.grad": x.grad, **dict(module.named_buffers())}
    return found | {f"{name}.grad": p.grad for name, p in module.named_parameters()}  # type: ignore[misc]


def by_microbatch(case: OneCall) -> dict[str, Tensor]:
    context = StepContext()
    context.enter(7, 0, case.microbatches, torch.device("cpu"))
    return serial(case, MicrobatchNorm(layer(case), context).train())  # type: ignore[arg-type]
