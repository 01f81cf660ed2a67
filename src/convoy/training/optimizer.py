"""The optimizer of a recipe: which parameters it trains, at which rate and with which decay; and of a network that was
trained before, which layers stay as they are, always or for a while, and how much slower the earlier ones train.

A frozen layer has no gradient, and its batch norm normalizes by its running statistics and keeps them: those of small
data would take from the weights what they were trained with. What is frozen is a function of the update's number, so a
run that resumes goes on with the same layers.
"""

import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from convoy.errors import ConvoyError
from convoy.models.weights import auxiliary_names, classifier_names
from convoy.recipe.optim import (
    AdamWConfig,
    GroupConfig,
    LambConfig,
    LarsConfig,
    OptimizerConfig,
    SgdConfig,
    learning_rate,
)
from convoy.recipe.recipe import Recipe
from convoy.recipe.schema import Duration
from convoy.terminal import did_you_mean
from convoy.training.derived import Quantities

# Keys of torch's groups: what the schedule's rate is multiplied by, and the update from which on it is 0.
LR_FACTOR, END = "lr_factor", "end"


def create_optimizer(model: nn.Module, config: OptimizerConfig, lr: float, ends: Sequence[int] = ()) -> Optimizer:
    """The optimizer for a model's trainable parameters; LARS and LAMB overwrite the gradients during a step. `ends` are
    the weight updates from which on those of `config.groups` are left as they are."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConvoyError(f"the model {type(model).__name__} has no parameter that can be trained: choose another")
    groups = [group for group in _groups(model, config, ends) if group["params"]]
    # torch's fused kernels go through memory as it lies, and so beyond a weight that lies there with holes
    fused = getattr(config, "fused", None) and all(torch.empty_like(p).stride() == p.stride() for p in parameters)
    match config:
        case SgdConfig():
            optimizer: Optimizer = torch.optim.SGD(
                groups, lr=lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused or None
            )
        case AdamWConfig():
            optimizer = torch.optim.AdamW(groups, lr=lr, betas=config.betas, eps=config.eps, fused=fused or None)
        case LarsConfig():
            from pytorch_optimizer import LARS  # the import takes most of a second

            ratio = config.trust_coefficient
            optimizer = LARS(groups, lr=lr, momentum=config.momentum, nesterov=config.nesterov, trust_coefficient=ratio)
        case LambConfig():
            from pytorch_optimizer import Lamb

            for group in groups:  # adam: the trust ratio is 1
                group["adam"] = not config.decay_norm_and_bias and all(p.ndim <= 1 for p in group["params"])
            # The decay belongs into r; the library's default is that of AdamW. A step is lr; its default is
            # lr / (1 - beta1^t), ten times that at first.
            lamb: Any = Lamb(groups, lr=lr, betas=config.betas, eps=config.eps, weight_decouple=False, adam_debias=True)
            lamb.clamp = math.inf  # the library cuts ‖w‖ at 10, less than a large convolution has from the start
            optimizer = lamb
    if fused:
        optimizer.register_step_pre_hook(_make_ready)
    return optimizer


def optimizer_for(parameters: list[nn.Parameter], recipe: Recipe) -> Optimizer:
    """That of a recipe, for some parameters."""
    return create_optimizer(
        nn.ParameterList(parameters), recipe.optimizer, learning_rate(recipe.optimizer, recipe.batch)
    )


def _groups(model: nn.Module, config: OptimizerConfig, ends: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Torch's groups of parameters, some of them empty."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    scales = layer_scales(model, config.layer_decay) if config.layer_decay is not None else {}
    for number, (group, members) in enumerate(_members(named, config)):
        options: dict[str, Any] = {END: ends[number] if ends else sys.maxsize}
        if group.weight_decay is not None:
            options["weight_decay"] = group.weight_decay
        for alike in _alike(members, scales, config):
            yield alike | options | {LR_FACTOR: alike[LR_FACTOR] * group.lr_factor}
    yield from _alike(named, scales, config)


def _members(
    named: dict[str, nn.Parameter], config: OptimizerConfig
) -> Iterator[tuple[GroupConfig, dict[str, nn.Parameter]]]:
    """The parameters of each group, taken out of those that have no group yet: the first pattern that fits counts."""
    for group in config.groups:
        yield group, {name: named.pop(name) for name in list(named) if fnmatchcase(name, group.parameters)}


def _alike(
    named: dict[str, nn.Parameter], scales: Mapping[str, float], config: OptimizerConfig
) -> Iterator[dict[str, Any]]:
    """Torch's groups of some parameters, by what the rate of their layers is multiplied by, and by what decays."""
    for scale in dict.fromkeys(scales.get(name, 1.0) for name in named) or (1.0,):
        parameters = [parameter for name, parameter in named.items() if scales.get(name, 1.0) == scale]
        # A bias or the scale or shift of a normalization layer is a parameter with at most one dimension.
        matrices, vectors = ([p for p in parameters if (p.ndim > 1) == wide] for wide in (True, False))
        by_decay = [(matrices, config.weight_decay), (vectors, 0.0)]
        if config.decay_norm_and_bias:
            by_decay = [(parameters, config.weight_decay)]
        for members, decay in by_decay:
            yield {"params": members, "weight_decay": decay, LR_FACTOR: scale}


def set_rates(optimizer: Optimizer, rate: float, update: int) -> None:
    """Let all parameters have the schedule's rate in a weight update, but for those of groups of their own. The
    gradients of groups that have ended count nowhere."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(LR_FACTOR, 1.0)
        if update >= group.get(END, sys.maxsize):
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = None


def check_groups(model: nn.Module, config: OptimizerConfig) -> None:
    """Let nothing train what a group says is never trained; a ConvoyError where a group has no parameter."""
    named = dict(model.named_parameters())
    for group, members in _members(named, config):
        if not members:
            names = [name for name, _ in model.named_parameters()]
            near = did_you_mean(group.parameters, names, otherwise=f"there are {', '.join(names[:4])}, …")
            raise ConvoyError(
                f"optimizer.groups: {group.parameters!r} is the name of no parameter that is left of the network{near}"
            )
        if group.lr_factor == 0:
            for parameter in members.values():
                parameter.requires_grad_(False)
        elif not any(parameter.requires_grad for parameter in members.values()):
            raise ConvoyError(
                f"optimizer.groups: the network does not train {group.parameters!r}: leave that group out, or set its "
                "lr_factor to 0"
            )


def _make_ready(optimizer: Optimizer, *_: Any) -> None:
    """Give gradients and state the strides of their weights, and momentum to weights whose first gradient comes late.
    On a CPU, where torch's fused kernels go through memory as it lies, other strides, as of a state that was loaded,
    give wrong weights without a word; and they take no weights with and without momentum together (torch 2.13)."""
    for group, parameter in ((g, p) for g in optimizer.param_groups for p in g["params"] if p.grad is not None):
        if parameter.grad.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
        state = optimizer.state[parameter]
        if group.get("momentum") and state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter).copy_(value)


TRUNK = "trunk"  # all layers but the classifier, whatever these are called


def freeze_always(model: nn.Module, freeze: Sequence[str]) -> list[str]:
    """Freeze the layers that are never trained, with a note; a ConvoyError where a pattern fits nothing."""
    always = [(pattern, names) for pattern, end, names in list(_parts(model, freeze)) if not end]
    if not always:
        return []
    set_frozen(model, set(chain.from_iterable(names for _, names in always)), True)
    count = {
        trains: sum(p.numel() for p in model.parameters() if p.requires_grad is trains) for trains in (True, False)
    }
    if not count[True]:
        raise ConvoyError("optimizer.freeze leaves no layer to train: leave one out of it, or freeze trunk")
    return [f"{count[False]:,} of {sum(count.values()):,} parameters are frozen ({', '.join(p for p, _ in always)})"]


def thaws(model: nn.Module, config: OptimizerConfig, quantities: Quantities) -> dict[str, int]:
    """The tensors that are frozen for a while, each with the weight update from which on it is trained; a ConvoyError
    where some update would train none."""
    named, total = dict(model.named_parameters()), quantities.total_updates
    begins = {name: sys.maxsize for name, parameter in named.items() if not parameter.requires_grad}
    for _, end, names in _parts(model, config.freeze):
        update = quantities.updates(Duration.parse(end)) if end else sys.maxsize
        begins |= {name: max(update, begins.get(name, 0)) for name in names}
    groups = zip(_members(dict(named), config), quantities.group_ends, strict=True)
    ends = {name: end for (_, members), end in groups for name in members}
    for update in sorted({0, *begins.values(), *ends.values()}) if begins or ends else ():
        if update < total and not any(begins.get(name, 0) <= update < ends.get(name, total) for name in named):
            raise ConvoyError(
                f"optimizer.groups leaves no layer to train from update {update + 1:,} on: give one a later until"
                if update
                else "optimizer.freeze leaves no layer to train at first: leave one out of it, or freeze trunk"
            )
    return {name: begin for name, begin in begins.items() if begin < sys.maxsize}


def set_frozen(model: nn.Module, names: Collection[str], frozen: bool) -> None:
    """Freeze parameters, and batch norm layers by the names of their buffers, or let them be trained."""
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(not frozen)
    for path, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or f"{path}.running_mean" not in names:
            continue
        if frozen:
            vars(module)["train"] = partial(_stay, module)
        else:
            vars(module).pop("train", None)
        module.train(model.training)


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """In place of `train`, which the network's own calls for all of its modules."""
    return nn.Module.train(module, False)


def _parts(model: nn.Module, freeze: Sequence[str]) -> Iterator[tuple[str, str, set[str]]]:
    """The pattern of each part of `optimizer.freeze`, when it ends (empty: never), and the tensors that it fits."""
    for pattern, _, end in (part.partition(":") for part in freeze):
        yield pattern, end, _tensors(model, pattern)


def _tensors(model: nn.Module, pattern: str) -> set[str]:
    """The names of parameters and buffers of the layers that a pattern fits; a ConvoyError where there are none."""
    parameters = [name for name, _ in model.named_parameters()]
    everything = [*parameters, *(name for name, _ in model.named_buffers())]
    heads = [*classifier_names(model), *auxiliary_names(model)]
    names = {name for name in everything if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
    if not names and pattern == TRUNK:
        names = {name for name in everything if not name.startswith(tuple(f"{head}." for head in heads))}
    if names.isdisjoint(parameters):
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in parameters))
        tops = list(dict.fromkeys(layer.partition(".")[0] for layer in layers))
        near = did_you_mean(pattern, [*tops, *layers], otherwise=f"there are {', '.join(tops[:8])}, and {TRUNK}")
        raise ConvoyError(f"optimizer.freeze: {pattern!r} fits no layer of the network with parameters{near}")
    return names


def layer_scales(model: nn.Module, decay: float) -> Mapping[str, float]:
    """What the rate of every parameter is multiplied by: decay to the power of the layers between its own and the last
    one (BEiT: Bao et al., 2022, appendix; timm's `param_groups_layer_decay`).

    A network of timm says itself what its layers are. In any other a layer is a block, or what else stands in the
    network's lists of modules; a norm, or what has no matrix of weights, belongs to the layer before it.
    """
    matcher: Any = getattr(model, "group_matcher", None)
    if matcher is not None:
        from timm.models import group_parameters

        depths: dict[str, int] = group_parameters(model, matcher(coarse=False), reverse=True)
    else:
        number = sum(parameter.ndim > 1 for parameter in model.parameters())
        depths, depth = dict.fromkeys((name for name, _ in model.named_parameters()), 0), -1
        for path, module in _layers(model, number):
            parameters = list(module.named_parameters())
            depth += any(parameter.ndim > 1 for _, parameter in parameters)
            depths |= {f"{path}.{name}": max(depth, 0) for name, _ in parameters}
    last = max(depths.values(), default=0)
    return {name: decay ** (last - depth) for name, depth in depths.items()}


def _layers(module: nn.Module, number: int, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The layers in the order of the network, which has `number` matrices of weights: what holds more than half of them
    is no layer, but a network within it."""
    for name, child in module.named_children():
        size = sum(parameter.ndim > 1 for parameter in child.parameters())
        if isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict) or (2 * size > number and size > 1):
            yield from _layers(child, number, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
