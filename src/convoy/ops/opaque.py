"""Calls that no other operation recognizes: they get their inputs whole and run on every rank. Slower, never wrong."""

import math
from collections.abc import Sequence

from torch import Tensor

from convoy.graph.graph import Recognized, Recognizer, TorchCall
from convoy.ops.kernel import Kernel, Site, as_called
from convoy.ops.operation import Operation, keeps_inputs
from convoy.plans.layout import WHOLE, Layout, Split
from convoy.plans.place import Placed, Situation


def _opaque(dims: tuple[int, ...]) -> Recognized | None:
    """A call with `independent` dimensions, the same in all its inputs and outputs, along which the same function with
    the same arguments gives each piece of the outputs for the same piece of the inputs."""
    return Recognized("opaque", {"independent": dims}) if dims else None


def _attention(call: TorchCall) -> Recognized | None:
    """Scaled dot product attention of each sample and each head by itself, [..., length, channels]."""
    shapes = {call.shape(name)[:-2] for name in call.operands}
    return _opaque(tuple(range(len(call.output) - 2))) if shapes == {call.output[:-2]} else None


def _along(name: str, place: int, last: bool = False) -> Recognizer:
    """A function that mixes numbers along the dimensions in its argument `name` only, and keeps all dimensions."""

    def recognizer(call: TorchCall) -> Recognized | None:
        rank = len(call.shape(call.input))
        dims = call.kwargs.get(name, call.args[place] if len(call.args) > place else (-1 if last else None))
        if isinstance(dims, int):
            dims = call.args[place:] if call.name == "flip" else (dims,)  # flip(1, 2)
        ranks = {len(output.shape) for output in call.outputs}
        if not isinstance(dims, tuple | list) or not all(isinstance(dim, int) for dim in dims) or ranks != {rank}:
            return None
        mixed_dims = {dim % rank for dim in dims}
        return _opaque(tuple(dim for dim in range(rank) if dim not in mixed_dims)) if len(call.operands) == 1 else None

    return recognizer


def _samples(call: TorchCall) -> Recognized | None:
    return _opaque((0,)) if len(call.shape(call.input)) == 4 or call.name == "fold" else None


def _unfold(call: TorchCall) -> Recognized | None:
    """`F.unfold` of images, or windows along one dimension."""
    if "kernel_size" in call.kwargs or len(call.outputs[0].shape) != len(call.shape(call.input)) + 1:
        return _samples(call)
    mixed_dim = call.bound(input=None, dimension=0)["dimension"] % len(call.shape(call.input))
    return _opaque(tuple(dim for dim in range(len(call.shape(call.input))) if dim != mixed_dim))


def place(situation: Situation) -> Placed:
    """Everything whole, but for dimensions along which the call computes each piece by itself; with a note for the
    plan's explanation where an input has to be gathered."""
    call = situation.call
    splits = _independent(situation)
    layout, axes = Layout.of(splits), {axis for split in splits.values() for axis in split.axes}
    inputs = dict.fromkeys(call.inputs, layout)
    inputs |= dict.fromkeys(call.attributes.get("shared", ()), Layout.of({}, copied=axes))
    is_gathered = any(
        situation.given[name].splits != inputs[name].splits for name in call.inputs if name in situation.given
    )
    function = getattr(call.function, "__name__", str(call.function))
    what = "whole on every rank" if layout == WHOLE else "with some dimensions gathered"
    note = f"no rule for {function}: runs {what}" if is_gathered else ""
    return Placed(inputs, dict.fromkeys(call.outputs, layout), note)


def _independent(situation: Situation) -> dict[int, Split]:
    """How the largest input is divided along the dimensions that all inputs and outputs have, except inputs that all
    pieces share, as a trial has shown (`engine/coupling.py`)."""
    call = situation.call
    names = [name for name in call.inputs if name not in call.attributes.get("shared", ())]
    placed_names = [name for name in names if name in situation.given]
    shapes = [situation.shape(name) for name in (*names, *call.outputs)]
    if not placed_names:
        return {}
    splits = situation.given[max(placed_names, key=lambda name: math.prod(situation.shape(name)))].splits
    dims = [dim for dim in call.attributes.get("independent", ()) if len({shape[dim] for shape in shapes}) == 1]
    return {dim: split for dim, split in splits if dim in dims}


def _with_edges(kernel: Kernel) -> Kernel:
    """Add a gradient edge to every input: of empty tensors, some functions have no gradient for all inputs, for which
    other ranks wait."""

    def run(*tensors: Tensor) -> Sequence[Tensor]:
        edges = [tensor.sum() * 0 for tensor in tensors if tensor.requires_grad]
        return [sum(edges, y) if y.is_floating_point() else y for y in kernel(*tensors)]

    return run


def _build(site: Site) -> Kernel:
    kernel = as_called(site)
    return kernel if any(math.prod(site.local_shape(name)) for name in site.call.outputs) else _with_edges(kernel)


OPERATIONS = (
    Operation(
        "opaque",
        place,
        {
            **dict.fromkeys(
                ("var", "std", "amin", "cumsum", "logsumexp", "argmax", "argmin", "prod"), _along("dim", 1)
            ),
            "flip": _along("dims", 1),
            "fold": _samples,
            "norm": _along("dim", 2),
            "normalize": _along("dim", 2),
            "repeat_interleave": _along("dim", 2),
            "roll": _along("dims", 2),
            "scaled_dot_product_attention": _attention,
            "sort": _along("dim", 1, last=True),
            "topk": _along("dim", 2, last=True),
            "unfold": _unfold,
        },
        _build,
        keeps=keeps_inputs,
        by_function=True,
        by_arguments=True,
    ),
)
