"""Divided parameters beside code that knows nothing of them: norms, clipping, optimizers.

Each rank holds a part of such a parameter and of its gradient. What treats numbers one by one works on the part; a norm
or a sum is taken over the parts of all ranks, every element counting once; anything else would look at one part as if
it were the whole, and is refused. So `torch.nn.utils.clip_grad_norm_`, `torch.amp.GradScaler` and a loop of one's own
over `p.grad.norm()` give on every rank what they give on one device. All ranks must ask for the same.

Optimizers see plain tensors (`clear`), so that their fused forms, their speed and their state are as ever. Before the
first step of one that has divided parameters, its class must be known to treat every number by itself, or seen to do so
on small tensors, whole and cut (a list of names would be out of date with every release of a library of optimizers);
and its state must be that of this rank's parts. LARS and LAMB need norms for their trust ratios, and ask through two
functions of torch; `WholeNorms` lets these answer for the whole tensors.
"""

import copy
import itertools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from convoy.comm.collectives import all_gather, all_reduce
from convoy.comm.groups import Groups
from convoy.engine.gradients.reducer import at_end_of_backward, current_backward
from convoy.engine.shards import same_part
from convoy.errors import ConvoyError
from convoy.graph.tree import leaves, replace
from convoy.plans.mesh import Axes


def whole_norms(norms: Sequence[Tensor], axes: Sequence[Axes], groups: Groups, order: float = 2.0) -> list[Tensor]:
    """Norms of whole tensors, as scalars, from those of the parts that ranks have. `axes` are those that divide each
    tensor, none where it is whole on every rank; the same, in the same order, on all ranks."""
    result = list(norms)
    for wide, numbers in _by_axes(axes, groups).items():
        if wide:
            parts = all_gather(torch.stack([norms[number] for number in numbers]).double(), groups.of(wide))
            if math.isinf(order):
                wide_norms = parts.amax(0) if order > 0 else parts.amin(0)
            else:
                wide_norms = parts.sum(0) if order == 0 else parts.pow(order).sum(0).pow(1 / order)
            for number, norm in zip(numbers, wide_norms.to(norms[numbers[0]].dtype).unbind(), strict=True):
                result[number] = norm
    return result


def shard_norms(tensors: Sequence[tuple[Tensor, Axes]], groups: Groups) -> list[Tensor]:
    """The norm of each whole tensor, as scalars, from this rank's parts and the axes that divide them."""
    norms = torch._foreach_norm([tensor for tensor, _ in tensors]) if tensors else ()
    return whole_norms(norms, [axes for _, axes in tensors], groups)


def global_norm(tensors: Sequence[tuple[Tensor, Axes]], groups: Groups) -> Tensor:
    """The norm of all tensors as if they were one vector; arguments as for `shard_norms`. Where nothing is divided it
    is, bit for bit, that of `torch.nn.utils.get_total_norm`."""
    kinds = _by_axes([axes for _, axes in tensors], groups)
    parts = {axes: [tensors[number][0] for number in numbers] for axes, numbers in kinds.items()}
    if set(parts) <= {()}:
        return nn.utils.get_total_norm(parts.get((), []))
    if groups.mesh.stage_axis is not None:  # of tensors that stages have whole: to the bit that of one device
        return nn.utils.get_total_norm(shard_norms(tensors, groups))
    total = torch.zeros((), dtype=torch.float64, device=tensors[0][0].device)
    for axes, shards in parts.items():
        square = nn.utils.get_total_norm(shards).double().square().reshape(1)
        total += all_reduce(square, groups.of(axes))[0]
    return total.sqrt().to(tensors[0][0].dtype)


def clip_grad_norm(parameters: Sequence[tuple[nn.Parameter, Axes]], groups: Groups, max_norm: float) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before. Parameters come
    with the axes that divide them (not those over which gradients were added)."""
    terms = [(p.new_zeros(0) if p.grad is None else p.grad, axes) for p, axes in parameters]
    norm = global_norm(terms, groups)
    nn.utils.clip_grads_with_norm_([parameter for parameter, _ in parameters], max_norm, norm)
    return norm


def _by_axes(axes: Sequence[Axes], groups: Groups) -> dict[Axes, list[int]]:
    """Numbers of the tensors that the same axes divide, axes with one rank left out, in the order of the axes."""
    numbers: dict[Axes, list[int]] = {}
    for number, tensor_axes in enumerate(axes):
        wide = tuple(sorted(axis for axis in set(tensor_axes) if groups.mesh.sizes[axis] > 1))
        numbers.setdefault(wide, []).append(number)
    return dict(sorted(numbers.items()))


class WholeNorms(TorchFunctionMode):
    """Within it, `torch.linalg.norm` and `torch._foreach_norm` give norms over all shards. What is asked for must be
    one of `parameters`, which come with the axes that divide them, or belong to the parameters asked for last, as in
    the `step` of `pytorch_optimizer`'s LARS and Lamb. All ranks must ask for the same."""

    def __init__(self, parameters: Sequence[tuple[nn.Parameter, Axes]], groups: Groups) -> None:
        super().__init__()
        self._axes: Mapping[int, Axes] = {id(parameter): axes for parameter, axes in parameters}
        self._groups = groups
        self._last: list[Axes] = []

    def __torch_function__(
        self, function: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch._foreach_norm:
            return tuple(self._norms(args[0]))
        if function is torch.linalg.norm:
            return self._norms([args[0]])[0]
        return function(*args, **(kwargs or {}))

    def _norms(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        candidates = [self._axes.get(id(tensor)) for tensor in tensors]
        axes = [entry for entry in candidates if entry is not None]
        if len(axes) == len(tensors):
            self._last = axes
        elif axes or len(self._last) != len(tensors):
            raise RuntimeError("the optimizer asks for norms of tensors that do not belong to known parameters")
        return shard_norms(list(zip(tensors, self._last, strict=True)), self._groups)


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
    if name in ("numel", "nelement"):
        return parts[0].whole_numel
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        func(*args, **kwargs)
        all_reduce(args[1], parts[0].groups.world)
        return None
    if name == "__deepcopy__":
        return _like(args[0].as_subclass(Tensor).clone(), parts)
    if name in _REFUSED:
        raise _refused(name)
    result = func(*args, **kwargs)
    given = {id(x) for x in leaves((args, kwargs), Tensor)}  # what has been changed in place is what it was
    return replace(result, Tensor, lambda x: x if id(x) in given else _own(x, parts, name, func))


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


def check_optimizer(
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
    if isinstance(optimizer, optim.LBFGS):  # whose twin would step the parameters themselves
        return "looks at whole tensors"
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
