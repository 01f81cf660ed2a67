"""Random numbers of a rank's samples, as in stochastic depth."""

import math

import torch
from torch import Tensor

from convoy.engine.dropout import threshold
from convoy.engine.kernels.kernel import Alone, Kernel, Site
from convoy.engine.random import layer_key, random_bits


def build(site: Site) -> Kernel:
    """Draws numbers that are functions of (seed, step, layer, sample)."""
    call, context = site.call, site.context
    context.need_keys()
    value = site.graph.values[call.outputs[0]]
    samples, key = site.parts(value.name, 0), layer_key(call.name)
    local, count = site.local_shape(value.name), math.prod(value.shape[1:])
    draw, p = call.attributes["draw"], call.attributes["p"]

    def kernel() -> list[Tensor]:
        bits = random_bits(context.keys_of(samples, value.shape[0]), key, count).view(local)
        return [bernoulli(bits, p, value.dtype) if draw == "bernoulli" else uniform(bits, value.dtype)]

    return Alone(kernel)


def bernoulli(bits: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """One with probability `p`, else zero."""
    return torch.ones_like(bits, dtype=dtype) if p == 1.0 else (bits < threshold(p)).to(dtype)


def uniform(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in [0, 1), as many steps apart as every float type up to float32 can tell."""
    steps = min(24, 1 - round(math.log2(torch.finfo(dtype).eps)))
    return (bits >> (32 - steps)).bitwise_and_((1 << steps) - 1).to(dtype) * 2.0**-steps
