"""What one rank computes for one call: the unit in which time is measured and predicted.

Two calls with equal operations take equally long, whatever their names and wherever they stand: repeated blocks are
measured once, and so are ranks with equal shares. What the rank sends is no part of it.
"""

import hashlib
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal, NamedTuple

import torch

from convoy.graph.graph import Call, Graph, Ref
from convoy.graph.tree import leaves
from convoy.ops import OPERATIONS
from convoy.ops.kernel import Part
from convoy.ops.memory import Readers, overwritten
from convoy.ops.registry import sharing_axes
from convoy.plans.layout import Layout
from convoy.plans.place import PlacedCall, Placement


@dataclass(frozen=True)
class GraphFacts:
    """What is true of a graph however it is placed."""

    # By call, those of its inputs whose gradients it adds to that of a later call: the backward pass comes to the later
    # one first
    adding: dict[str, frozenset[str]]
    spare: frozenset[str]  # values that the only call that takes them may overwrite, unless they come from other ranks


def graph_facts(graph: Graph) -> GraphFacts:
    """The facts of a graph, worked out once and kept with it."""
    kept = vars(graph)
    if "_planner_facts" not in kept:
        readers, differentiable = Readers(graph, [ref.name for ref in leaves(graph.output, Ref)]), graph.differentiable
        seen: set[str] = set()
        adding = {}
        for call in reversed(graph.calls):
            has_gradient = differentiable.intersection(call.outputs)
            inputs = differentiable.intersection(call.inputs) if has_gradient else frozenset[str]()
            adding[call.name] = frozenset(inputs & seen)
            seen |= inputs
        spare = frozenset(name for name in graph.values if readers.is_spare(name, ()))
        kept["_planner_facts"] = GraphFacts(adding, spare)
    facts: GraphFacts = kept["_planner_facts"]
    return facts


def dtype_name(dtype: torch.dtype) -> str:
    """As operations write a type: `float32`."""
    return str(dtype).removeprefix("torch.")


Role = Literal["activation", "parameter", "buffer", "constant"]
Option = None | bool | int | float | str | tuple["Option", ...]

# operations that only look at their input differently
VIEWS = frozenset(name for name, operation in OPERATIONS.items() if operation.is_view)


class PerPass(NamedTuple):
    """A number for the forward and one for the backward pass."""

    forward: int
    backward: int


@dataclass(frozen=True)
class Operand:
    """A rank's part of a tensor."""

    shape: tuple[int, ...]
    dtype: str  # as `float32`
    role: Role = "activation"
    gradient: bool = False  # the backward pass computes its gradient
    adds: bool = False  # to a gradient that is there already, of a call further on that takes the same tensor

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * int(getattr(torch, self.dtype).itemsize)


@dataclass(frozen=True)
class LocalOp:
    """One rank's part of one call.

    Half of the filters of a linear layer, for 32 samples:

    >>> images, weight = Operand((32, 256), "float32"), Operand((5, 256), "float32", "parameter", gradient=True)
    >>> half = LocalOp("linear", "", (images, weight), (Operand((32, 5), "float32"),))
    >>> half.flops.forward
    81920
    """

    op: str  # of `convoy.graph`, or `copy`, or `redistribute`: what a transfer copies on the rank, beside sending
    function: str  # what was called, where the op has several: `relu`, `mean`, …
    inputs: tuple[Operand, ...]  # in the order of the call's, each tensor once; likewise `outputs`
    outputs: tuple[Operand, ...]
    # what else decides about the time, by name: strides, the rank's own padding, its groups, …
    options: tuple[tuple[str, Option], ...] = ()

    @cached_property
    def key(self) -> str:
        """A short name that is the same in every process: `conv-1f0c…`."""
        text = repr((self.op, self.function, self.inputs, self.outputs, self.options))
        return f"{self.op}-{hashlib.blake2b(text.encode(), digest_size=10).hexdigest()}"

    def option(self, name: str) -> Option:
        return dict(self.options).get(name)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "options": dict(self.options)}

    @staticmethod
    def from_dict(document: dict[str, Any]) -> "LocalOp":
        """The operation that `to_dict` wrote, also after a way through JSON; a KeyError, TypeError or ValueError where
        it is none."""
        inputs, outputs = (
            tuple(Operand(**{**operand, "shape": tuple(map(int, operand["shape"]))}) for operand in part)
            for part in (document["inputs"], document["outputs"])
        )
        options = tuple(sorted((str(name), _plain(value)) for name, value in dict(document["options"]).items()))
        return LocalOp(str(document["op"]), str(document["function"]), inputs, outputs, options)

    @property
    def is_empty(self) -> bool:
        """Whether the rank has nothing to do for it, as one without samples."""
        return not any(operand.numel for operand in self.outputs)

    @property
    def flops(self) -> PerPass:
        """Floating-point operations of convolutions and matrix products, 2 for a multiply-add; 0 for all else."""
        count = OPERATIONS[self.op].multiplications if self.op in OPERATIONS else None
        if count is None or self.is_empty:
            return PerPass(0, 0)
        shapes = [operand.shape for operand in self.inputs]
        forward = 2 * count(shapes, self.outputs[0].shape, bool(self.option("transposed")))
        return PerPass(forward, forward * sum(operand.gradient for operand in self.inputs[:2]))

    @property
    def bytes(self) -> PerPass:
        """Bytes that must at least be read and written."""
        if self.op == "redistribute":
            forward, backward = self.option("forward"), self.option("backward")
            assert isinstance(forward, int) and isinstance(backward, int)
            return PerPass(forward, backward)
        added = 3 * sum(operand.bytes for operand in self.inputs if operand.adds)
        operation = OPERATIONS.get(self.op)
        if self.is_empty or (operation is not None and operation.is_view):
            return PerPass(0, added)
        read, written = (sum(operand.bytes for operand in part) for part in (self.inputs, self.outputs))
        gradients = sum(operand.bytes for operand in self.inputs if operand.gradient)
        if operation is not None and operation.is_slice:
            return PerPass(0, written + gradients + added)
        again = int((operation.passes if operation is not None else 0.0) * written) + 2 * self._padded()
        backward = written + gradients + (0 if self.function in _KEEP_NOTHING else read) + again
        return PerPass(read + written + again, backward + added if gradients else 0)

    def describe(self) -> str:
        """For people: `conv 32×64×56×56 → 32×64×56×56, 3×3 /1`."""
        before, after = ("×".join(map(str, o[0].shape)) if o else "-" for o in (self.inputs, self.outputs))
        kernel = ""
        if self.op == "conv":
            kernel = f", {'×'.join(map(str, self.inputs[1].shape[2:]))} /{_joined(self.option('stride'))}"
            kernel += f", {self.option('groups')} groups" if self.option("groups") != 1 else ""
        elif self.option("kernel"):
            kernel = f", {_joined(self.option('kernel'))} /{_joined(self.option('stride'))}"
        return f"{self.function or self.op} {before} → {after}{kernel}"

    def _padded(self) -> int:
        """Bytes of the copy that padding takes which the kernel does not do itself."""
        padding = self.option("padding")
        if not isinstance(padding, tuple):
            return 0
        copied = any(isinstance(sides, tuple) and any(sides[1:]) for sides in padding)
        return self.inputs[0].bytes if copied else 0


_KEEP_NOTHING = frozenset({"add", "radd", "iadd", "sub", "rsub", "isub", "neg", "cat", "pad", "to", "expand_like"})


def _joined(value: Option) -> str:
    numbers = value if isinstance(value, tuple) else (value,)
    return str(numbers[0]) if len(set(numbers)) == 1 else "×".join(map(str, numbers))


BatchNorm = Literal["sync", "microbatch", "local"]


def local_op(
    placed: PlacedCall, placement: Placement, rank: int, *, batch_norm: BatchNorm = "sync", microbatch: int = 0
) -> LocalOp:
    """What a rank computes for a call; of the placement only graph and mesh are read. `microbatch` is the samples of
    each, 0 for one microbatch a pass."""
    call, graph, mesh = placed.call, placement.graph, placement.mesh
    place, facts = mesh.coordinates(rank), graph_facts(graph)

    def operand(name: str, layout: Layout) -> Operand:
        value = graph.values[name]
        role: Any = "activation" if value.origin in ("call", "input") else value.origin
        shape = layout.local_shape(value.shape, mesh, place)
        gradient, adds = name in graph.differentiable, name in facts.adding[call.name]
        return Operand(shape, dtype_name(value.dtype), role, gradient, adds)

    operation = OPERATIONS[call.op]
    inputs = tuple(operand(name, placed.placed.inputs[name]) for name in call.inputs)
    outputs = tuple(operand(name, placed.placed.outputs[name]) for name in call.outputs)
    options = {name: call.attributes.get(name) for name in operation.options}
    if operation.local_options is not None:
        options |= operation.local_options(Part.of(placed, graph, mesh, place))
    if operation.shared_dims is not None:
        options["ranks"] = mesh.size(sharing_axes(call, placed.placed, graph))
    options = {name: _plain(value) for name, value in options.items()}
    if operation.by_arguments:
        options["called"] = _called(call)
        if overwritten(call, lambda name: name in facts.spare and name not in placed.transfers) is not None:
            options["overwrites"] = True
    function = getattr(call.function, "__name__", "").strip("_") if operation.by_function else ""
    if call.op == "batch_norm" and options["training"] and batch_norm != "sync":  # statistics not of all samples
        layout = placed.placed.inputs[call.attributes["input"]]
        pixel_axes = tuple(sorted(axis for dim, split in layout.splits if dim > 1 for axis in split.axes))
        samples = inputs[call.inputs.index(call.attributes["input"])].shape[0]
        options["ranks"] = mesh.size(pixel_axes)
        options["parts"] = -(-samples // microbatch) if batch_norm == "microbatch" and microbatch else 1
    return LocalOp(call.op, function, inputs, outputs, tuple(sorted(options.items())))


def _called(call: Call) -> Option:
    """The arguments, with tensors as their position among the inputs."""
    places = {name: place for place, name in enumerate(call.inputs)}

    def plain(value: Any) -> Option:
        return f"${places.get(value.name, -1)}" if isinstance(value, Ref) else _plain(value, plain)

    kwargs = tuple((name, plain(value)) for name, value in sorted(call.kwargs.items()) if name != "inplace")
    return tuple(plain(value) for value in call.args), kwargs


def _plain(value: Any, convert: Any = None) -> Option:
    """What JSON can say, the same in every process."""
    convert = convert or _plain
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, list | tuple):
        return tuple(convert(item) for item in value)
    if isinstance(value, slice):
        return tuple(convert(item) for item in (value.start, value.stop, value.step))
    return type(value).__name__
