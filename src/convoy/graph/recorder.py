"""The torch functions that a network calls, written down: what changes a tensor in place becomes a new tensor, and a
function that is several simpler ones, for which there are rules, these."""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from convoy.graph import tree
from convoy.graph.fake import Aliases, Constants, FakeTensor
from convoy.graph.graph import (
    Call,
    CaptureError,
    LayerStack,
    Origin,
    Recognize,
    Recognized,
    Ref,
    TorchCall,
    Value,
    draw,
    torch_name,
    torch_names,
)

Steps = Callable[[], Any] | None


def _stack(tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Steps:
    if kwargs or not tensors:
        return None
    dim = dim % (tensors[0].dim() + 1)
    return lambda: torch.cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def _channel_shuffle(input: Tensor, groups: int) -> Steps:
    n, c, *size = input.shape
    return lambda: input.reshape(n, groups, c // groups, *size).transpose(1, 2).reshape(n, c, *size)


def _pixel_shuffle(input: Tensor, upscale_factor: int) -> Steps:
    if input.dim() != 4:
        return None
    n, c, h, w = input.shape
    r = upscale_factor
    return lambda: input.reshape(n, c // r**2, r, r, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, c // r**2, h * r, w * r)


def _pixel_unshuffle(input: Tensor, downscale_factor: int) -> Steps:
    if input.dim() != 4:
        return None
    n, c, h, w = input.shape
    r = downscale_factor
    return lambda: (
        input.reshape(n, c, h // r, r, w // r, r).permute(0, 1, 3, 5, 2, 4).reshape(n, c * r**2, h // r, w // r)
    )


def _expand(input: Tensor, *sizes: Any, **kwargs: Any) -> Steps:
    """As broadcasting with a constant, which has no size of its own on a rank that holds a part of the result."""
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
    num_new_dims = len(sizes) - input.dim()
    if kwargs or not sizes or num_new_dims < 0:
        return None
    shape = [input.shape[place - num_new_dims] if size == -1 else size for place, size in enumerate(sizes)]
    if tuple(shape) == tuple(input.shape):
        return None
    return lambda: input.expand_as(torch.zeros(1, device=input.device).broadcast_to(shape))


def _getitem(input: Tensor, index: Any) -> Steps:
    """`x[:, None]`: plain ranges first, new dimensions afterwards."""
    if not isinstance(index, tuple) or not any(item is None for item in index):
        return (lambda: input.unsqueeze(0)) if index is None else None
    if not all(item is None or item is Ellipsis or type(item) in (int, slice) for item in index):
        return None
    num_indices = sum(item is not None and item is not Ellipsis for item in index)
    ranges: list[Any] = []
    new_dims: list[int] = []
    place = 0
    for item in index:
        if item is None:
            new_dims.append(place)
            place += 1
        elif item is Ellipsis:
            ranges.append(item)
            place += input.dim() - num_indices
        else:
            ranges.append(item)
            place += isinstance(item, slice)

    def steps() -> Tensor:
        result = input[tuple(ranges)] if any(item is not Ellipsis and item != slice(None) for item in ranges) else input
        for dim in new_dims:
            result = result.unsqueeze(dim)
        return result

    return steps


def _functional(function: Callable[..., Tensor], training: str) -> Callable[..., Steps]:
    """A norm of torch's, whose namesake in `torch.nn.functional` takes the same arguments in another order."""
    names = ("input", "weight", "bias", "running_mean", "running_var", training, "momentum", "eps")

    return lambda *args, cudnn_enabled=True, **kwargs: lambda: function(**dict(zip(names, args)), **kwargs)  # noqa: B905


# By the function or its name: called with its arguments, gives what to call instead, or None to leave it as it is.
EXPANSIONS: dict[Any, Callable[..., Steps]] = {
    torch.batch_norm: _functional(F.batch_norm, "training"),
    torch.instance_norm: _functional(F.instance_norm, "use_input_stats"),
    "__getitem__": _getitem,
    "__rmatmul__": lambda input, other: lambda: torch.matmul(other, input),
    "channel_shuffle": _channel_shuffle,
    "expand": _expand,
    "glu": lambda input, dim=-1: lambda: (lambda value, gate: value * gate.sigmoid())(*input.chunk(2, dim)),
    "native_channel_shuffle": _channel_shuffle,
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_unshuffle,
    "stack": _stack,
    "unbind": lambda input, dim=0: lambda: tuple(input.select(dim, index) for index in range(input.shape[dim])),
    "upsample": lambda *args, **kwargs: lambda: F.interpolate(*args, **kwargs),
    **dict.fromkeys(("reshape_as", "view_as"), lambda input, other: lambda: input.reshape(other.shape)),
}


Replacement = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def out_of_place(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Replacement | None:
    """The call that gives as a new tensor what `func` writes into its first argument; None where it writes nothing."""
    if kwargs.get("inplace"):
        return func, args, {**kwargs, "inplace": False}
    plain_name = name[:-1] if name.endswith("_") and not name.endswith("__") else None
    if plain_name is None and name.startswith("__i") and name.endswith("__") and hasattr(Tensor, f"__{name[3:]}"):
        plain_name = f"__{name[3:]}" if name not in ("__int__", "__invert__", "__index__", "__init__") else None
    if not plain_name:
        return None
    for home in (Tensor, torch, F):
        if callable(function := getattr(home, plain_name, None)):
            return function, args, kwargs
    return None


QUESTIONS = {"__get__", "size", "dim", "stride", "numel", "__len__", "is_floating_point", "is_contiguous", "ndimension"}
PARTS = [getattr(Tensor, name) for name in ("T", "mT", "H", "mH", "data", "real", "imag")]  # what `__get__` computes
OF_AUTOGRAD = [getattr(Tensor, name) for name in ("requires_grad", "grad_fn", "is_leaf")]
LIBRARIES = {"torch", "torchvision", "timm"}  # there these decide about checkpointing and warnings, not about numbers
FROM_SHAPE = {"new_zeros", "new_ones", "new_full", "new_tensor", "zeros_like", "ones_like", "full_like"}
EMPTY = {"empty", "new_empty", "empty_like"}
UNIFORM = {"rand", "rand_like"}


class Recorder(TorchFunctionMode):
    """While it is entered, every torch function is called on fake tensors and becomes a `Call`. `values` holds every
    tensor that a call takes or gives, and the network's inputs; `updates` the buffers that count batches and wait for
    their batch norm; `made` weak references to the tensors that depend on the inputs, each with its layer."""

    def __init__(self, constants: Constants, layers: LayerStack, recognize: Recognize, num_samples: int | None) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.values: dict[str, Value] = {}
        self.constants = constants
        self.updates: list[str] = []
        self.made: list[tuple[weakref.ref[Tensor], str]] = []
        self._fakes = constants.fakes
        self._layers = layers
        self._recognize = recognize
        self._num_samples = num_samples
        self._names: dict[int, str] = {}
        self._aliases = Aliases()
        self._given: dict[str, Value] = {}
        self._data: set[str] = set()
        self._inside = False
        self._recomputing = 0

    def give(self, name: str, tensor: Tensor, origin: Origin, trains: bool = True) -> None:
        """Announce an input, parameter or buffer."""
        value = Value(name, tuple(tensor.shape), tensor.dtype, origin, trains)
        self._given[name] = value
        self._names[id(tensor)] = name
        self._aliases.add(tensor)
        if origin == "input":
            self.values[name] = value
            self._data.add(name)
            self.made.append((weakref.ref(tensor), ""))
        else:
            self._aliases.protect(tensor, name)

    def know(self, real: Iterable[tuple[str, nn.Parameter | Tensor]]) -> None:
        """Tell which fakes stand in for these real tensors, which the network may still hold elsewhere."""
        for name, tensor in real:
            self._names[id(tensor)] = name
            self._aliases.protect(tensor, name)

    def name(self, tensor: Tensor) -> str:
        """The name of a tensor that a call takes or the network returns."""
        self._aliases.check(tensor, self._layers.name)
        name = self._names.get(id(tensor))
        if name is None:
            name = self._constant(tensor)
        if name not in self.values:
            self.values[name] = self._given[name]
        return name

    def reference(self, nest: Any) -> Any:
        return tree.replace(nest, Tensor, lambda tensor: Ref(self.name(tensor)))

    def custom(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        """Record a custom autograd function; what it calls is not recorded."""
        if self._inside:
            return run(*args, **kwargs)
        self._inside = True
        try:
            return self._execute(function, args, kwargs, run)
        finally:
            self._inside = False

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """While entered, the network asks for activation checkpointing or the like."""
        self._recomputing += 1
        try:
            yield
        finally:
            self._recomputing -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, descriptor = torch_name(func), getattr(func, "__self__", None)
        if self._inside or (name in QUESTIONS and descriptor not in PARTS):
            if descriptor in OF_AUTOGRAD and not self._inside and (known := self._names.get(id(args[0]))):
                asks = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
                if asks not in LIBRARIES:
                    return self._of_autograd(descriptor, known, func(*args))
            return func(*args, **kwargs)
        if expansion := EXPANSIONS.get(func) or EXPANSIONS.get(name):
            steps = expansion(*args, **torch_names(kwargs))
            if steps is not None:
                with self:
                    return steps()
        return self._call(func, name, args, kwargs)

    def _call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tree.leaves((args, kwargs), Tensor)
        if tensors and (answer := self._count(name, tensors[0], args[1:])) is not None:
            return answer
        if any(tensor.grad_fn is not None for tensor in tensors):
            raise CaptureError("it uses a tensor that was computed from parameters before", self._layers.name)
        if kwargs.get("out") is not None:
            raise CaptureError(f"{_called(func)} writes into out=", self._layers.name)
        if name in EMPTY:
            return self.constants.empty(func(*args, **kwargs))
        if name in UNIFORM and kwargs.get("generator") is None:
            return self._draw("uniform", None, func(*args, **kwargs))
        if name in ("bernoulli", "bernoulli_", "uniform_") and self.constants.known(tensors[0]):
            draw = self.constants.drawing(name, args, kwargs, self._layers.name)
            if draw is not None:
                return self._draw(*draw, tensors[0] if name.endswith("_") else func(*args, **kwargs))
        if all(map(self._is_constant, tensors[name in FROM_SHAPE :])):
            return self._fold(func, name, args, kwargs)
        if replacement := out_of_place(func, name, args, kwargs):
            return self._replace(name, args[0] if args else tensors[0], *replacement)
        if name in ("__setitem__", "__set__"):
            raise CaptureError("it assigns to a part of a tensor", self._layers.name)
        return self._execute(func, args, kwargs, func)

    def _execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        tensors = tree.leaves((args, kwargs), Tensor)
        versions = [tensor._version for tensor in tensors]
        draws = self._fakes.draws
        if torch.is_autocast_enabled(tensors[0].device.type if tensors else "cpu"):
            raise CaptureError("it switches autocast on by itself", self._layers.name)
        result = run(*args, **kwargs)
        outputs = tree.leaves(result, Tensor)
        is_new = outputs and not (len(outputs) == 1 and any(outputs[0] is tensor for tensor in tensors))
        recognition = self._record(func, args, kwargs, result, outputs) if is_new else Recognized("identity")
        if versions != [tensor._version for tensor in tensors] and not recognition.updates:
            raise CaptureError(f"{_called(func)} changes a tensor in place", self._layers.name)
        if self._fakes.draws > draws and not recognition.draws:
            dropout = _called(func).startswith("dropout")
            reason = "for numbers that belong to no sample" if dropout else "in a way of its own"
            raise CaptureError(f"{_called(func)} draws random numbers {reason}", self._layers.name)
        return result

    def _record(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        tensors: list[Tensor],
        recognition: Recognized | None = None,
    ) -> Recognized:
        """Note a call that gave `result`, with `tensors` in it; what it is says an operation, if nobody else does."""
        args, kwargs, layer = self.reference(args), self.reference(kwargs), self._layers.name
        outputs = self._name_outputs(func, tensors)
        named_args = torch_names(kwargs)
        torch_call = TorchCall(func, args, named_args, self.values, outputs, self._layers.module, tuple(self.updates))
        depends = recognition is not None or any(ref.name in self._data for ref in tree.leaves((args, kwargs), Ref))
        if recognition is None:
            recognition = self._recognize(torch_call) if depends else Recognized("opaque")
        func = func if recognition.function is None else recognition.function
        args = args if recognition.args is None else recognition.args
        kwargs = kwargs if recognition.kwargs is None else recognition.kwargs
        counter = recognition.attributes.get("num_batches_tracked")
        named = [ref.name for ref in tree.leaves((args, kwargs), Ref)]
        if counter:
            named.append(counter)
            self.updates.remove(counter)
            self.values[counter] = self._given[counter]
        for tensor, value in zip(tensors, outputs, strict=True):
            self.values[value.name] = value
            self._bind(tensor, value.name)
            if depends:
                self._data.add(value.name)
                self.made.append((weakref.ref(tensor), layer))
        names = tuple(value.name for value in outputs)
        name = names[0] if len(names) == 1 else names[0].rpartition(":")[0]
        facts = (tuple(dict.fromkeys(named)), names, self.reference(result), recognition.attributes)
        call = Call(name, layer, recognition.op, func, args, kwargs, *facts, recognition.updates, self._recomputing > 0)
        self.calls.append(call)
        if not torch.is_grad_enabled() and torch_call.name != "detach":
            for tensor in tensors:
                self._record(torch.Tensor.detach, (tensor,), {}, tensor, [tensor])
        return recognition

    def _name_outputs(self, func: Any, tensors: list[Tensor]) -> tuple[Value, ...]:
        layer = self._layers.name
        base, number, mark = (layer, 1, "#") if layer else (_called(func).strip("_"), 0, "_")
        name, several = base, len(tensors) > 1
        while name in self._given or name in self.values or f"{name}:0" in self.values:
            number += 1
            name = f"{base}{mark}{number}"
        names = [f"{name}:{index}" for index in range(len(tensors))] if several else [name]
        return tuple(
            Value(name, tuple(tensor.shape), tensor.dtype) for name, tensor in zip(names, tensors, strict=True)
        )

    def _bind(self, tensor: Tensor, name: str) -> None:
        self._names[id(tensor)] = name
        self.constants.forget(tensor)
        self._aliases.add(tensor)

    def _replace(self, name: str, target: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Record a call that changes `target` by the function that gives the same as a new tensor."""
        self._aliases.check_writable(target, name, self._layers.name)
        result: Tensor = self.__torch_function__(func, (), args, kwargs)
        if result is target:
            return target
        if result.shape != target.shape or result.dtype != target.dtype:
            raise CaptureError(f"{name} changes the shape or type of a tensor in place", self._layers.name)
        self._aliases.write(target, self._layers.name)
        self._bind(target, self.name(result))
        return target

    def _is_constant(self, tensor: Tensor) -> bool:
        if id(tensor) in self._names:
            return False
        return self.constants.known(tensor) or not isinstance(tensor, FakeTensor)

    def _fold(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute what does not depend on the network's inputs, parameters or buffers."""
        changes = (
            (name.endswith("_") and not name.endswith("__"))
            or kwargs.get("inplace")
            or name in ("__setitem__", "__set__")
        )
        if changes and not all(self.constants.known(tensor) for tensor in tree.leaves(args[:1], Tensor)):
            raise CaptureError(f"{name} changes a tensor that the network keeps", self._layers.name)
        draws = self._fakes.draws
        result = self.constants.compute(func, args, kwargs)
        if self._fakes.draws > draws:
            raise CaptureError(f"{_called(func)} draws random numbers in a way of its own", self._layers.name)
        return result

    def _constant(self, tensor: Tensor) -> str:
        if isinstance(tensor, FakeTensor) and not self.constants.known(tensor):
            raise CaptureError("it uses a tensor that no torch function gave (TorchScript?)", self._layers.name)
        if isinstance(real := self.constants.value(tensor), nn.Parameter) or real.requires_grad:
            raise CaptureError("it uses a parameter that is not among the network's own", self._layers.name)
        name = self.constants.name(tensor, {*self._given, *self.values})
        if name not in self.values:
            self._given[name] = Value(name, tuple(tensor.shape), tensor.dtype, "constant")
        return name

    def _count(self, name: str, tensor: Tensor, rest: tuple[Any, ...]) -> Any:
        """What happens to a batch norm's counter of batches: the batch norm that follows says it. Only the momentum of
        one that has none of its own depends on the number."""
        value = self._given.get(self._names.get(id(tensor), ""))
        if value is None or value.origin != "buffer" or value.shape or value.dtype.is_floating_point:
            return None
        if name == "add_" and rest == (1,) and value.name not in self.updates:
            self.updates.append(value.name)
            return tensor
        if value.name in self.updates and getattr(self._layers.module, "momentum", 0) is None:
            return {"__float__": 1.0, "__int__": 1, "item": 1}.get(name)
        return None

    def _of_autograd(self, question: Any, name: str, answer: Any) -> Any:
        """What autograd knows of a parameter or buffer. Of other tensors it depends on what each pass is called with,
        and within which `no_grad`."""
        value = self._given.get(name)
        if value is None or value.origin == "input":
            raise CaptureError("it asks whether a tensor requires a gradient", self._layers.name)
        return value.trains if value.origin == "parameter" and question == OF_AUTOGRAD[0] else answer

    def _draw(self, kind: str, p: float | None, tensor: Tensor) -> Tensor:
        shape = tuple(tensor.shape)
        if not shape or shape[0] != self._num_samples:
            raise CaptureError("it draws random numbers that do not belong to one sample each", self._layers.name)
        args = (kind, p, shape, tensor.dtype, tensor.device)
        self._record(draw, args, {}, tensor, [tensor], Recognized("random", {"draw": kind, "p": p}))
        return tensor


def _called(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
