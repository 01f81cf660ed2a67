"""What a network computes, as a list of calls on named values: nothing here knows of devices.

A `TorchCall` is a call of a torch function before it is known which operation it is, and `Recognized` what an operation
makes of it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class CaptureError(Exception):
    """The network does something in its forward pass that a graph cannot say. `reason` is what it does, `layer` the
    qualified name of the innermost module that does it; empty for the network."""

    def __init__(self, reason: str, layer: str = "") -> None:
        self.reason = reason
        self.layer = layer
        super().__init__(f"layer {layer}: {reason}" if layer else reason)


class ChangedError(CaptureError):
    """A pass changes an attribute that later passes read."""


class KeptError(CaptureError):
    """Tensors of a pass are kept by somebody, who would have nothing of the passes of a graph."""


def draw(kind: str, p: float | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random numbers: zeros and ones with probability `p` of a one (`bernoulli`), or 0 <= x < 1 (`uniform`)."""
    if kind == "uniform":
        return torch.rand(shape, dtype=dtype, device=device)
    assert p is not None
    return torch.empty(shape, dtype=dtype, device=device).bernoulli_(p)


def expand_like(tensor: Tensor, other: Tensor) -> Tensor:
    """`tensor` broadcast to what it and `other` have in common."""
    return tensor.expand(torch.broadcast_shapes(tensor.shape, other.shape))


@dataclass(frozen=True)
class Apply:
    """A custom `torch.autograd.Function` as one call."""

    function: type[torch.autograd.Function]

    @property
    def __name__(self) -> str:
        return self.function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


def torch_name(function: Any) -> str:
    """The name of a function of torch's; empty for custom functions and operators, whose names say nothing."""
    is_custom = isinstance(function, Apply) or str(getattr(function, "__module__", "")).startswith("torch._ops")
    return "" if is_custom else str(getattr(function, "__name__", ""))


_ALIASES = {"axis": "dim", "keepdims": "keepdim", "x2": "other", "train": "training"}
_ALIASES |= dict.fromkeys(("x", "a", "x1"), "input")


def torch_names(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a function that is known, each by one name: torch takes numpy's names, too."""
    return {_ALIASES.get(name, name): value for name, value in kwargs.items()}


Origin = Literal["input", "parameter", "buffer", "constant", "call"]


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor in the arguments and outputs of a call."""

    name: str


@dataclass(frozen=True)
class Value:
    """A tensor of the graph."""

    name: str  # the serial name of a parameter or buffer, otherwise a name of its own
    shape: tuple[int, ...]  # of the whole tensor, over the global batch
    dtype: torch.dtype
    origin: Origin = "call"
    trains: bool = True  # of a parameter: it is not frozen


@dataclass(frozen=True)
class Call:
    """One call of a torch function; `args`, `kwargs` and `structure` (the result) have a `Ref` for every tensor."""

    name: str  # unique in the graph: the layer's name, numbered where a layer makes several calls
    layer: str  # qualified name of the innermost module that makes the call; patterns of a plan match it
    op: str  # one of `convoy.ops.OPERATIONS`; `opaque` where no operation knows the call
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[str, ...]  # names of the tensors among the arguments, in order, each once
    outputs: tuple[str, ...]  # names of the tensors that it returns
    structure: Any
    attributes: dict[str, Any] = field(default_factory=dict)  # the operation's arguments, under its names
    updates: bool = False  # it changes buffers, so it runs even where nobody takes its result
    recomputed: bool = False  # its result is dropped after the forward pass and computed again in the backward pass


@dataclass(frozen=True)
class Graph:
    """A network at one batch size, image size and mode.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    >>> graph = capture(net, [(4, 3, 8, 8)])
    >>> for call in graph.calls:
    ...     print(call.layer, call.op, graph.shape(call.outputs[0]))
    0 conv (4, 8, 6, 6)
    1 elementwise (4, 8, 6, 6)
    2 reshape (4, 288)
    3 linear (4, 10)

    Attributes:
        calls: the calls in the order in which they run.
        values: every tensor, by name.
        inputs: names of the network's tensor arguments.
        output: what the network returns, with a `Ref` for every tensor.
        constants: tensors that are neither parameters nor buffers, by name.
        training: the mode in which it was captured.
    """

    calls: tuple[Call, ...]
    values: dict[str, Value]
    inputs: tuple[str, ...]
    output: Any
    constants: dict[str, torch.Tensor]
    training: bool

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a value."""
        return self.values[name].shape

    def parameters(self) -> Iterator[Value]:
        """Values that are parameters, in order of first use."""
        return (value for value in self.values.values() if value.origin == "parameter")

    @cached_property
    def differentiable(self) -> frozenset[str]:
        """Names of the parameters that are trained, and of all values that depend on one, in training."""
        if not self.training:
            return frozenset()
        names = {value.name for value in self.parameters() if value.trains and value.dtype.is_floating_point}
        for call in self.calls:
            if names.intersection(call.inputs) and getattr(call.function, "__name__", "") != "detach":
                names |= {name for name in call.outputs if self.values[name].dtype.is_floating_point}
        return frozenset(names)

    def consumers(self) -> dict[str, list[Call]]:
        """For every value, the calls that take it."""
        consumers: dict[str, list[Call]] = {name: [] for name in self.values}
        for call in self.calls:
            for name in call.inputs:
                consumers[name].append(call)
        return consumers

    def borrowed(self) -> Iterator[tuple[str, str]]:
        """Modules of whose parameters a call of another module makes use, with the name of that one."""
        for call in self.calls:
            for name in call.inputs:
                owner = name.rpartition(".")[0]
                if self.values[name].origin == "parameter" and owner != call.layer:
                    yield owner, call.layer

    def scaled(self, other: "Graph", samples: int) -> "Graph | None":
        """The network at another number of samples, extrapolated from its graphs at two numbers (at least 2 in both),
        since capturing takes far longer: six times ResNet-152 were 70 % of a search for cuts. None where the two differ
        in more than multiples of their numbers of samples."""
        sizes = self.shape(self.inputs[0])[0], other.shape(other.inputs[0])[0]

        def scaled(one: Any, other: Any) -> Any:
            if one is other:
                return one
            if type(one) is not type(other):
                raise _UnlikeError
            if isinstance(one, Graph | Call | Value):
                fields = (field.name for field in dataclass_fields(one))
                return replace(one, **{name: scaled(getattr(one, name), getattr(other, name)) for name in fields})
            if isinstance(one, slice):
                return slice(*(scaled(getattr(one, end), getattr(other, end)) for end in ("start", "stop", "step")))
            if isinstance(one, tuple | list) and len(one) == len(other):
                parts = map(scaled, one, other)
                return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)
            if isinstance(one, dict) and list(one) == list(other):
                return {key: scaled(value, other[key]) for key, value in one.items()}
            if torch.equal(one, other) if isinstance(one, Tensor) else one == other:
                return one
            if type(one) is int and one % sizes[0] == 0 and one // sizes[0] * sizes[1] == other:
                return one // sizes[0] * samples
            raise _UnlikeError

        try:
            graph: Graph = scaled(self, other)
        except _UnlikeError:
            return None
        return graph


class _UnlikeError(Exception):
    """Two graphs differ in more than their numbers of samples."""


class LayerStack:
    """Follows the modules of a network as they are called; modules that are not its own count to their callers. When a
    call raises, the stack stays where it was, so that the error can name the layer."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack: list[tuple[str, nn.Module]] = [("", model)]

    @property
    def name(self) -> str:
        """Qualified name of the innermost module; empty for the network itself."""
        return self._stack[-1][0]

    @property
    def module(self) -> nn.Module:
        return self._stack[-1][1]

    @contextmanager
    def follow(self) -> Iterator[None]:
        def enter(module: nn.Module, args: Any) -> None:
            name = self._names.get(id(module))
            self._stack.append((name, module) if name is not None else self._stack[-1])

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._stack.pop()

        hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@dataclass(frozen=True)
class TorchCall:
    """A call of a torch function; `args` and `kwargs` have a `Ref` for every tensor."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: Mapping[str, Value]  # the tensors so far, by name
    outputs: tuple[Value, ...]  # the tensors that it gives
    module: nn.Module  # the innermost module that runs
    updates: tuple[str, ...] = ()  # counters of batches that were raised and not used yet

    @property
    def name(self) -> str:
        """The function's bare name: `relu` for `torch.relu` and `F.relu`, `add` for `Tensor.__add__`."""
        return torch_name(self.function).strip("_")

    def bound(self, **defaults: Any) -> dict[str, Any]:
        """The arguments by name; `defaults` are the function's parameters in order, with the names for tensors."""
        arguments = dict(defaults)
        arguments.update(zip(defaults, self.args, strict=False))
        arguments.update({name: value for name, value in self.kwargs.items() if name in defaults})
        return {name: value.name if isinstance(value, Ref) else value for name, value in arguments.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        return self.values[name].shape

    @property
    def input(self) -> str:
        """The first argument, which is a tensor."""
        first = self.args[0] if self.args else self.kwargs.get("input", self.kwargs.get("self"))
        assert isinstance(first, Ref), f"{self.name} takes no tensor first"
        return first.name

    @property
    def operands(self) -> list[str]:
        """The tensors among the arguments themselves, not those in lists."""
        return [value.name for value in (*self.args, *self.kwargs.values()) if isinstance(value, Ref)]

    @property
    def output(self) -> tuple[int, ...]:
        """Shape of the (first) result."""
        return self.outputs[0].shape


@dataclass(frozen=True)
class Recognized:
    """What an operation makes of a call; `function`, `args` and `kwargs`, unless None, are recorded in its place."""

    op: str
    attributes: dict[str, Any] = field(default_factory=dict)  # the operation's arguments, under its names
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] | None = None
    updates: bool = False  # it changes buffers, so it runs even where nobody takes its result
    draws: bool = False  # it draws random numbers, and knows for which samples


Recognizer = Callable[[TorchCall], Recognized | None]  # by one operation; None where it does not know the call
Recognize = Callable[[TorchCall], Recognized]  # by all operations together


def each(value: Any, count: int) -> tuple[int, ...]:
    """One number for each of `count` dimensions."""
    if isinstance(value, int):
        return (value,) * count
    numbers = tuple(int(item) for item in value)
    return numbers * count if len(numbers) == 1 else numbers
