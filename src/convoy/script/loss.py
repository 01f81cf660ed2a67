"""Losses of the global batch: masked and weighted means, and penalties on the weights."""

import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node

from convoy.comm.collectives import Group, all_reduce
from convoy.engine.gradients.reducer import gradient_scale, graph_of
from convoy.engine.network import Network, network_of
from convoy.errors import ConvoyError


def global_mean(net: nn.Module, values: Tensor, count: Tensor | float | None = None) -> Tensor:
    """The mean over the global batch: the sum of all ranks' `values`, divided by the sum of all ranks' `count`.

    As a loss it has the gradients that one device would have, under every plan and however unevenly samples and masks
    are divided; several such means may be added, multiplied by numbers, or put into one function that all ranks compute
    alike. Without gradients (integers and booleans have none) it is the way to print a metric. All ranks call it.

    >>> convoy.global_mean(net, torch.tensor([1.0, 2.0]), torch.tensor([True, False]))  # two ranks: 6 / 2
    tensor(3.)
    >>> outputs, targets = net(images[mine]), labels[mine]
    >>> loss = convoy.global_mean(net, F.cross_entropy(outputs, targets, reduction="none"))
    >>> loss.backward()
    >>> accuracy = convoy.global_mean(net, outputs.argmax(1) == targets)

    With `ignore_index`, a rank may have fewer labels that count than another:

    >>> losses = F.cross_entropy(net(images[mine]), targets, ignore_index=0, reduction="sum")
    >>> loss = convoy.global_mean(net, losses, targets != 0)

    Args:
        net: what `convoy.parallelize` returned.
        values: terms of this rank's samples, of any shape, which may differ between ranks. They are summed.
        count: this rank's term of the denominator: a number, or a tensor that is summed too, such as a mask
            or the weights of the samples. It may have a gradient. By default the number of elements of `values`.

    Returns:
        A scalar, the same on every rank; float64 where `values` are, float32 where they are of half precision, and of
        torch's default type where they are integers or booleans. NaN where the count is 0 on all ranks together, as in
        torch.

    Raises:
        ConvoyError: the values are complex, come from passes of the network in which this rank had different shares of
            the batch, or depend on a global mean or a penalty themselves.
    """
    network = network_of(net)
    if not isinstance(values, Tensor) or values.is_complex():
        raise ConvoyError("global_mean needs a tensor of real numbers: pass the values before they are averaged")
    total = _sum(values)
    if count is None:
        count = values.numel()
    number = _sum(count) if isinstance(count, Tensor) else torch.full_like(total, count, dtype=torch.float64)
    factor = _weight(network, [x for x in (total, number) if x.requires_grad])
    mean: Tensor = _Ratio.apply(total, number, factor, network.groups.of(network.sample_axes))
    return mean if values.is_floating_point() else mean.to(torch.get_default_dtype())


def penalty(
    net: nn.Module, function: Callable[[dict[str, Tensor]], Tensor], names: str | Sequence[str] = "*"
) -> Tensor:
    """A term of the loss that depends on the weights alone: an L1 or L2 penalty, a norm, orthogonality.

    Its gradient is the one that one device has, each weight counted once under every plan, also where `function` looks
    at whole tensors. Add it to a rank's mean loss or to `global_mean`. All ranks call it.

    >>> def lasso(weights):
    ...     return 1e-4 * sum(weight.abs().sum() for weight in weights.values())
    >>> loss = F.cross_entropy(net(images[mine]), labels[mine]) + convoy.penalty(net, lasso, names="*.weight")
    >>> loss.backward()

    Args:
        net: what `convoy.parallelize` returned.
        function: function of {name: weight}, the plain network's names and whole tensors, that returns a scalar. It
            must use these tensors only, not `net.parameters()`.
        names: patterns of the parameters that `function` is given: `*` stands for any text. Parameters that the plan
            divides are gathered, so that each rank holds them whole until the backward pass. Frozen parameters are
            not given.

    Returns:
        The scalar, the same on every rank.

    Raises:
        ConvoyError: no trainable parameter has such a name, or the function does not return a scalar.
    """
    network = network_of(net)
    patterns = (names,) if isinstance(names, str) else tuple(names)
    parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            listing = ", ".join([*list(parameters)[:3], *(["…"] if len(parameters) > 3 else [])]) or "none"
            raise ConvoyError(
                f"penalty: no trainable parameter is called {pattern!r}: their names are the plain network's: {listing}"
            )
    weights = {
        name: _whole(network, name, parameter)
        for name, parameter in parameters.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    value = function(weights)
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConvoyError(f"penalty: the function must return a scalar tensor, but it returned {what}")
    return value.reshape(())


def _sum(x: Tensor) -> Tensor:
    """The sum in a type that holds it: whole numbers exactly, half precision in single."""
    if not x.is_floating_point():
        return torch.sum(x).double()
    total: Tensor = x.sum(dtype=torch.float32 if x.itemsize < 4 else x.dtype)
    return total


class _Ratio(torch.autograd.Function):
    """The ratio of two sums over ranks. Its gradient is that of the global batch's loss, once over all ranks."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, number: Tensor, factor: float, group: Group) -> Tensor:
        total_of_all, number_of_all = all_reduce(torch.stack([total.double(), number.double()]), group)
        mean: Tensor = total_of_all / number_of_all
        ctx.saved = mean, number_of_all, factor, total.dtype, number.dtype
        return mean.to(total.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        mean, number, factor, total_dtype, number_dtype = ctx.saved
        by_total = gradient.double() * factor / number
        return by_total.to(total_dtype), (-mean * by_total).to(number_dtype), None, None


class _Gathered(torch.autograd.Function):
    """The whole of a parameter; backward returns this rank's part of the gradient, which all ranks have. It is added
    over the axes on which the parameter is copied, so that only one rank there lets it through."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, network: Network, name: str) -> Tensor:
        ctx.network, ctx.name, ctx.shape = network, name, parameter.shape
        divided = bool(network.entry(name)[1].splits)
        return network.whole(name, parameter) if divided else parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        groups = ctx.network.groups
        copied = tuple(sorted(ctx.network.entry(ctx.name)[1].copied))
        if groups.mesh.index(groups.coordinates, copied) > 0:
            return gradient.new_zeros(ctx.shape), None, None
        return ctx.network.part(ctx.name, gradient), None, None


def _whole(network: Network, name: str, parameter: nn.Parameter) -> Tensor:
    whole: Tensor = _Gathered.apply(network.use(name, parameter), network, name)
    return whole


def _weight(network: Network, results: Sequence[Tensor]) -> float:
    """The factor of the gradient with which it is that of a sum over the global batch. Where a rank's loss counts as
    the mean over its own samples, the network's output scales its gradient by the rank's share of the samples; this
    factor undoes that. The share is read off the graph, as the newest pass of the network need not be the one that the
    values come from."""
    if network.num_sample_ranks == 1 or not torch.is_grad_enabled():
        return 1.0
    shares = set()
    for node in graph_of([x.grad_fn for x in results if x.grad_fn is not None]):
        if (share := gradient_scale(node)) is not None:
            shares.add(share)
        elif _is_of(node, _Ratio) or _is_of(node, _Gathered):
            raise ConvoyError(
                "global_mean: the values depend on another global mean or on a penalty, whose gradient would count "
                "several times: add it to the mean afterwards, or detach it"
            )
    if len(shares) > 1 and not math.isclose(min(shares), max(shares)):
        raise ConvoyError(
            "global_mean: the values come from several passes of the network, in which this rank had different shares "
            "of the samples: take the mean of each pass and add the means"
        )
    share = max(shares, default=1.0)
    return 1.0 / share if share > 0 else 0.0


def _is_of(node: Node, function: type[torch.autograd.Function]) -> bool:
    return getattr(type(node), "_forward_cls", None) is function
