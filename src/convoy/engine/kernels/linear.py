"""A rank's part of a linear layer."""

import torch.nn.functional as F
from torch import Tensor

from convoy.engine.kernels.bias import AddBiasOnce
from convoy.engine.kernels.kernel import Kernel, Site


def build(site: Site) -> Kernel:
    """Column-parallel parts give their own features; row-parallel ones a partial sum with the bias in one of them."""
    call = site.call
    names = {name: place for place, name in enumerate(call.inputs)}
    source, weight = names[call.attributes["input"]], names[call.attributes["weight"]]
    bias = names.get(call.attributes["bias"])
    partial = site.layouts[call.outputs[0]].partial
    first = site.is_first(partial)
    last = len(site.graph.shape(call.outputs[0])) - 1

    def whole(*tensors: Tensor) -> list[Tensor]:
        return [F.linear(tensors[source], tensors[weight], None if bias is None else tensors[bias])]

    def partly(*tensors: Tensor) -> list[Tensor]:
        y = F.linear(tensors[source], tensors[weight])
        return [y if bias is None else AddBiasOnce.apply(y, tensors[bias], last, first)]

    return partly if partial else whole
