"""A rank's part of a convolution."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from convoy.engine.kernels.bias import AddBiasOnce
from convoy.engine.kernels.kernel import Kernel, Site
from convoy.plans.rules.convolution import paddings_of, window_of
from convoy.plans.windows import Need

CONVOLUTIONS: dict[tuple[int, bool], Callable[..., Tensor]] = {
    (1, False): F.conv1d,
    (2, False): F.conv2d,
    (3, False): F.conv3d,
    (1, True): F.conv_transpose1d,
    (2, True): F.conv_transpose2d,
    (3, True): F.conv_transpose3d,
}


def build(site: Site) -> Kernel:
    """Padding only at the picture's true border, whole groups, and the bias of a partial sum by one rank."""
    call, output = site.call, site.call.outputs[0]
    names = {name: place for place, name in enumerate(call.inputs)}
    source, weight = names[call.attributes["input"]], names[call.attributes["weight"]]
    bias = names.get(call.attributes["bias"])
    partial = site.layouts[output].partial
    first = site.is_first(partial)
    convolve = _convolution(site)

    def kernel(*tensors: Tensor) -> list[Tensor]:
        if not partial:
            return [convolve(tensors[source], tensors[weight], None if bias is None else tensors[bias])]
        y = convolve(tensors[source], tensors[weight], None)
        return [y if bias is None else AddBiasOnce.apply(y, tensors[bias], 1, first)]

    return kernel


def _convolution(site: Site) -> Callable[..., Tensor]:
    """A function of (input, weight, bias or None)."""
    attributes = site.call.attributes
    transposed, num_dims = attributes["transposed"], len(attributes["stride"])
    function = CONVOLUTIONS[num_dims, transposed]
    options: dict[str, Any] = {"stride": attributes["stride"], "dilation": attributes["dilation"]}
    options["groups"] = _local_groups(site)
    if transposed:
        return _transposed(site, function, options)
    paddings = paddings_of(site.graph, site.call, site.layouts[site.call.outputs[0]], site.mesh, site.coordinates)
    options["padding"] = tuple(both for both, _, _ in paddings)
    flat = _flat([(before, after) for _, before, after in paddings])
    if not any(flat):
        return lambda x, weight, bias: function(x, weight, bias, **options)
    return lambda x, weight, bias: function(F.pad(x, flat), weight, bias, **options)


def _transposed(site: Site, function: Callable[..., Tensor], options: dict[str, Any]) -> Callable[..., Tensor]:
    attributes, output = site.call.attributes, site.call.outputs[0]
    needs = [_need(site, 2 + at) for at in range(len(attributes["stride"]))]
    if not any(dim >= 2 for dim, _ in site.layouts[output].splits) and all(a == b for a, b in attributes["padding"]):
        options["padding"] = tuple(before for before, _ in attributes["padding"])
        options["output_padding"] = attributes["output_padding"]
        return lambda x, weight, bias: function(x, weight, bias, **options)
    flat = _flat([(need.before, need.after) for need in needs])
    empty = any(not need.rows for need in needs)
    shape = site.local_shape(output)

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if empty:
            y = x.new_zeros(shape) + (x.sum() + weight.sum()) * 0
        else:
            y = F.pad(function(x, weight, None, **options), flat)
        return y if bias is None else y + bias.view(-1, *[1] * len(needs)).to(y.dtype)

    return convolve


def _need(site: Site, dim: int) -> Need:
    output = site.call.outputs[0]
    rows = site.parts(output, dim)
    assert isinstance(rows, range)
    return window_of(site.graph, site.call, dim).needed(rows)


def _local_groups(site: Site) -> int:
    attributes = site.call.attributes
    num_in = site.graph.shape(attributes["input"])[1]
    group = num_in // attributes["groups"]
    return max(1, len(site.parts(attributes["input"], 1)) // group) if attributes["groups"] > 1 else 1


def _flat(padding: list[tuple[int, int]]) -> tuple[int, ...]:
    """In the order of `torch.nn.functional.pad`: the last dimension first."""
    return tuple(size for pair in reversed(padding) for size in pair)
