"""The optimizers of divided networks, which are checked before their first step.

Torch calls two hooks around every optimizer's step. Before the first step of one that has divided parameters, its class
must be known to treat every number by itself, or seen to do so on small tensors, whole and cut (a list of names would
be out of date with every release of a library of optimizers); and its state must be that of this rank's parts.
"""

import copy
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from convoy.engine.shards import same_part
from convoy.errors import ConvoyError

# Optimizers that treat every number by itself, so that a part of a parameter is updated as in the whole.
ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
    optim.Rprop,
)
# Key in an optimizer's `param_groups` that says of which parts its state is; saved and loaded with them.
PART = "convoy_part"
_SIZES = (8, 6, 3, 3, 3)
_STEPS = 3


def check(
    optimizer: Optimizer, divided: Mapping[nn.Parameter, str], shapes: Mapping[str, tuple[int, ...]], part: str
) -> None:
    """See that an optimizer that is about to step updates divided parameters as the whole ones would be. `divided` has
    the names of its parameters that are divided, `shapes` are of the whole tensors by name, and `part` says which parts
    this rank has. ConvoyError where it looks at whole tensors, or its state is of other parts."""
    for group in optimizer.param_groups:
        names = [divided[p] for p in group["params"] if p in divided]
        if not names:
            continue
        if not same_part(group.get(PART, part), part):
            raise ConvoyError(
                f"the optimizer's state is {group[PART]}, and this is {part}: save with convoy.save, or "
                "convoy.optimizer_state_dict, which give whole tensors, and load with convoy.load or "
                "convoy.load_optimizer_state_dict"
            )
        for parameter in group["params"]:
            if parameter in divided:
                _check_state(optimizer.state.get(parameter, {}), parameter, divided[parameter], shapes)
        if type(optimizer) not in ELEMENTWISE:
            examples = {parameter.dim(): parameter for parameter in group["params"] if parameter in divided}
            reason = _looks_at_whole_tensors(optimizer, group, examples)
            if reason is not None:
                raise ConvoyError(
                    f"{type(optimizer).__name__} {reason}, and {names[0]} is divided over ranks: take an optimizer "
                    "that treats every number by itself (SGD, Adam, AdamW, …), or a plan that divides samples alone; "
                    "convoy train has LARS and LAMB under every plan"
                )
    for group in optimizer.param_groups:
        if any(p in divided for p in group["params"]):
            group[PART] = part


def _check_state(state: Mapping[str, Any], parameter: Tensor, name: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape and value.shape == shapes[name]:
            raise ConvoyError(
                f"the optimizer's {key} of {name} is that of the whole tensor, {list(value.shape)}, and this rank has "
                f"{list(parameter.shape)} of it: load it with convoy.load_optimizer_state_dict"
            )


def _looks_at_whole_tensors(
    optimizer: Optimizer, group: Mapping[str, Any], examples: Mapping[int, Tensor]
) -> str | None:
    """Why an optimizer does not treat every number by itself; None where a trial of its twin showed that it does. It is
    tried on the devices of `examples`, parameters by their number of dimensions, in float64 or else their type."""
    options = {key: value for key, value in group.items() if key not in ("params", PART)}
    for (dim, like), cut in itertools.product(sorted(examples.items()), range(2)):
        if cut >= dim:
            continue
        failure = ""
        for dtype in (torch.float64, like.dtype):  # rounding of a lower precision hides what is small
            try:
                whole_updated, halves_updated = _together_and_apart(optimizer, options, dim, cut, like.device, dtype)
            except Exception as error:
                failure = f"cannot be tried on tensors with {dim} dimensions ({type(error).__name__}: {error})"
                continue
            if not torch.allclose(whole_updated, halves_updated, rtol=8 * torch.finfo(dtype).eps, atol=1e-7):
                return "looks at whole tensors"
            break
        else:
            return failure
    return None


def _together_and_apart(
    optimizer: Optimizer, options: Mapping[str, Any], dim: int, cut: int, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """What an optimizer makes of a random tensor, and of its halves along `cut`."""
    generator = torch.Generator().manual_seed(dim)
    whole, *gradients = [torch.randn(_SIZES[:dim], generator=generator).to(device, dtype) for _ in range(1 + _STEPS)]
    halves = [list(g.chunk(2, cut)) for g in gradients]
    return [
        torch.cat(list(_updated(optimizer, options, tensors, updates)), cut)
        for tensors, updates in (([whole], [[g] for g in gradients]), (list(whole.chunk(2, cut)), halves))
    ]


def _updated(
    optimizer: Optimizer, options: Mapping[str, Any], tensors: list[Tensor], gradients: list[list[Tensor]]
) -> Iterator[Tensor]:
    parameters = [nn.Parameter(tensor.clone().contiguous()) for tensor in tensors]
    twin = type(optimizer).__new__(type(optimizer))
    twin.__dict__ |= optimizer.__dict__  # `copy.copy` would leave out what torch does not know
    twin.state = defaultdict(dict)
    twin.param_groups = [{**copy.deepcopy(dict(options)), "params": parameters}]
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for update in gradients:
            for parameter, gradient in zip(parameters, update, strict=True):
                parameter.grad = gradient.clone().contiguous()
            type(optimizer).step(twin)  # not `twin.step`, which schedulers replace by that of the optimizer
    yield from (parameter.detach() for parameter in parameters)
