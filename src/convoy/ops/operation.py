"""All that Convoy knows of one kind of call; each file of this folder describes one operation, or a few relatives."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from convoy.graph.graph import Call, Graph, Recognizer, Value
from convoy.ops.kernel import Kernel, Part, Site, as_called
from convoy.plans.layout import Layout
from convoy.plans.place import Placed, Situation

Shape = tuple[int, ...]
# names of tensors, each with the bytes of an element where they are not the tensor's own
Kept = Iterable[tuple[str, int]]


def keeps_input(call: Call, values: Mapping[str, Value]) -> Kept:
    """The backward pass needs the activation that the call is given."""
    return ((call.attributes["input"], 0),)


def keeps_output(call: Call, values: Mapping[str, Value]) -> Kept:
    """The backward pass needs the result."""
    return ((call.outputs[0], 0),)


def keeps_inputs(call: Call, values: Mapping[str, Value]) -> Kept:
    """The backward pass needs all that the call is given."""
    return ((name, 0) for name in call.inputs)


def keeps_operands(call: Call, values: Mapping[str, Value]) -> Kept:
    """The backward pass needs input and weight, as copies where autocast has the call compute in a lower precision."""
    source, output = call.attributes["input"], values[call.outputs[0]].dtype
    is_cast = any(values[name].dtype.itemsize > output.itemsize for name in call.inputs)
    low = output.itemsize if is_cast else 0
    yield source, low
    if low:
        yield from ((name, low) for name in call.inputs if name != source and values[name].origin == "parameter")


@dataclass(frozen=True)
class Operation:
    """One kind of call: how it is recognized, divided and run, and what it costs. Calls name it by text, so that graphs
    can be compared, printed and made by hand, and keys of the profile store stay valid.

    Only `name`, `place` and, for all but what the recorder itself records, `functions` must be given. The defaults are
    those of a call that does the same on a part as on the whole, is as fast as memory, and keeps nothing.

    >>> from torch import nn
    >>> from convoy.plans.layout import WHOLE
    >>> norm = OPERATIONS["layer_norm"]
    >>> graph = capture(nn.LayerNorm(6), [(4, 6)])
    >>> call = graph.calls[0]
    >>> call.op, list(norm.keeps(call, graph.values)), norm.shared_dims(call, graph, WHOLE)
    ('layer_norm', [('input', 0)], {1})

    Attributes:
        name: of the operation: `Call.op`.
        functions: for the bare name of each torch function that may be this operation, its recognizer. It gives None
            where the call is opaque after all, and may give another operation.
        place: the layouts in which a call of it takes and gives its tensors.
        build: this rank's version of a call.
        keeps: activations, and copies of parameters, that stay until the backward pass.
        keeps_inside: further tensors of the output's size that its kernel keeps, such as a mask.
        gives_own: whether its output is a tensor of its own that its backward pass does not read, so that a later
            call may overwrite it.
        is_view: whether it only looks at its input otherwise.
        is_slice: whether it reads no more than it gives.
        is_random: whether it draws random numbers.
        follows: whether drawings of a network show it in the box of the layer before.
        multiplications: multiply-adds of the forward pass, from the shapes of its inputs and of its output, and
            whether it is transposed; None where there are none to speak of.
        passes: how often a kernel goes over its output again, beyond once: rough, for the roofline alone.
        by_function: whether its time depends on the torch function that is called.
        by_arguments: whether its time depends on all arguments of the call.
        options: attributes of a call that decide about its time beside the local shapes.
        local_options: further such options, which depend on the part of the rank.
        shared_dims: dimensions along which it needs statistics of the whole, so that ranks that divide them exchange
            them inside the call; None where there are none.
        statistics: how many numbers each rank exchanges for that, from the call and the local shape of its input.
        is_lowered: whether autocast has it compute in the lower precision.
        whole_precision: types of devices on which autocast keeps it in float32.
    """

    name: str
    place: Callable[[Situation], Placed]
    functions: Mapping[str, Recognizer] = field(default_factory=dict)
    build: Callable[[Site], Kernel] = as_called
    keeps: Callable[[Call, Mapping[str, Value]], Kept] = lambda call, values: ()
    keeps_inside: int = 0
    gives_own: bool = False
    is_view: bool = False
    is_slice: bool = False
    is_random: bool = False
    follows: bool = False
    multiplications: Callable[[Sequence[Shape], Shape, bool], int] | None = None
    passes: float = 0.0
    by_function: bool = False
    by_arguments: bool = False
    options: tuple[str, ...] = ()
    local_options: Callable[[Part], dict[str, Any]] | None = None
    shared_dims: Callable[[Call, Graph, Layout], set[int]] | None = None
    statistics: Callable[[Call, Shape], int] | None = None
    is_lowered: bool = False
    whole_precision: frozenset[str] = frozenset()
