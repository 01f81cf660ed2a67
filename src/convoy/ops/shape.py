"""Calls that only rename dimensions: reshape, permute, and no change at all. Index lists follow, nothing is sent."""

import itertools
import math
from collections.abc import Iterator

from torch import Tensor

from convoy.graph.graph import Recognized, TorchCall, flat
from convoy.ops.kernel import Kernel, Site
from convoy.ops.layouts import by_dim
from convoy.ops.operation import Operation
from convoy.plans.layout import Indices, Layout, Split, indices
from convoy.plans.place import Placed, Situation


def _reshape(call: TorchCall) -> Recognized | None:
    same_type = call.values[call.input].dtype == call.outputs[0].dtype
    return Recognized("reshape", {"input": call.input}) if same_type else None


def _permuted(call: TorchCall, order: list[int]) -> Recognized:
    return Recognized("permute", {"input": call.input, "order": tuple(order)})


def _permute(call: TorchCall) -> Recognized:
    rank = len(call.output)
    order = flat(call.args[1:]) if len(call.args) > 1 else tuple(call.kwargs["dims"])
    return _permuted(call, [dim % rank for dim in order])


def _transpose(call: TorchCall) -> Recognized:
    rank = len(call.output)
    names = ("axis0", "axis1") if "axis0" in call.kwargs or "axis1" in call.kwargs else ("dim0", "dim1")
    arguments = call.bound(input=None, **dict.fromkeys(names, 0))
    a, b = (arguments[name] % rank for name in names)
    order = list(range(rank))
    order[a], order[b] = b, a
    return _permuted(call, order)


def _move(call: TorchCall) -> Recognized:
    rank = len(call.output)
    arguments = call.bound(input=None, source=0, destination=0)
    ends = [
        (value,) if isinstance(value, int) else tuple(value)
        for value in (arguments["source"], arguments["destination"])
    ]
    sources, targets = ([dim % rank for dim in dims] for dims in ends)
    rest = iter(dim for dim in range(rank) if dim not in sources)
    source_of = dict(zip(targets, sources, strict=True))
    return _permuted(call, [source_of[dim] if dim in source_of else next(rest) for dim in range(rank)])


def _t(call: TorchCall) -> Recognized:
    return _permuted(call, list(range(len(call.output)))[::-1])


def _property(call: TorchCall) -> Recognized | None:
    """`.T` and `.mT`, told apart by their descriptors."""
    descriptor = getattr(call.function, "__self__", None)
    name = getattr(descriptor, "__name__", "")
    rank = len(call.output)
    if name == "T":
        return _t(call)
    if name == "mT":
        return _permuted(call, [*range(rank - 2), rank - 1, rank - 2])
    return None


def _place_identity(situation: Situation) -> Placed:
    """The tensor as it is, also where it is a partial sum."""
    call = situation.call
    source = call.attributes.get("input", call.inputs[0])
    layout = situation.given.get(source, Layout())
    return Placed({source: layout}, dict.fromkeys(call.outputs, layout))


def _place_permute(situation: Situation) -> Placed:
    """Splits go with their dimensions."""
    order = situation.call.attributes["order"]
    return by_dim(situation, lambda dim, split: (split, (order.index(dim), split)), linear=True)


def _place_reshape(situation: Situation) -> Placed:
    """Dimensions that are merged give one list of indices; one that is divided keeps its split where that cuts between
    the new dimensions, and is asked for whole where it does not."""
    call = situation.call
    source, output = call.attributes["input"], call.outputs[0]
    layout = situation.given.get(source, Layout())
    shape, out_shape = situation.shape(source), situation.shape(output)
    input_splits: dict[int, Split] = {}
    output_splits: dict[int, Split] = {}
    for dims, out_dims in matching_dims(shape, out_shape):
        splits = {dim: split for dim, split in layout.splits if dim in dims}
        merged_split = _merge(situation, shape, dims, splits) if splits else None
        divided_split = _divide(merged_split, [out_shape[dim] for dim in out_dims]) if merged_split else None
        if divided_split is not None:
            input_splits |= splits
            output_splits[out_dims[divided_split[0]]] = divided_split[1]
    return Placed({source: Layout.of(input_splits, layout.partial)}, {output: Layout.of(output_splits, layout.partial)})


def matching_dims(shape: tuple[int, ...], out_shape: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest runs of dimensions, before and after a reshape, that hold the same elements."""
    if 0 in shape:
        return
    dims: list[int] = []
    out_dims: list[int] = []
    before, after = list(enumerate(shape)), list(enumerate(out_shape))
    while before or after:
        left, right = math.prod(shape[d] for d in dims), math.prod(out_shape[d] for d in out_dims)
        if before and (left <= right or not after):
            dims.append(before.pop(0)[0])
        else:
            out_dims.append(after.pop(0)[0])
        if dims and out_dims and math.prod(shape[d] for d in dims) == math.prod(out_shape[d] for d in out_dims):
            yield dims, out_dims
            dims, out_dims = [], []


def _merge(situation: Situation, shape: tuple[int, ...], dims: list[int], splits: dict[int, Split]) -> Split | None:
    """One split of the merged dimensions, over all their axes."""
    mesh = situation.mesh
    axes = tuple(sorted(axis for split in splits.values() for axis in split.axes))
    if len(axes) != len(set(axes)):
        return None
    parts = []
    for place in mesh.group((0,) * len(mesh.sizes), axes):
        local_parts = [
            splits[dim].parts[mesh.index(place, splits[dim].axes)] if dim in splits else range(shape[dim])
            for dim in dims
        ]
        parts.append(_flattened(local_parts, [shape[dim] for dim in dims]))
    return Split(axes, tuple(parts))


def _flattened(parts: list[Indices], sizes: list[int]) -> Indices:
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    first, *rest = parts
    if isinstance(first, range) and rest == [range(size) for size in sizes[1:]]:
        return range(first.start * strides[0], first.stop * strides[0]) if len(first) else range(0)
    return indices(
        sum(index * stride for index, stride in zip(place, strides, strict=True)) for place in itertools.product(*parts)
    )


def _divide(split: Split, sizes: list[int]) -> tuple[int, Split] | None:
    """The dimension, of those into which a merged one is divided, along which the parts are cut, if there is one."""
    for dim, size in enumerate(sizes):
        before, inner = math.prod(sizes[:dim]), math.prod(sizes[dim + 1 :])
        parts = tuple(_along(part, before, size, inner) for part in split.parts)
        if all(part is not None for part in parts):
            return dim, Split(split.axes, tuple(part for part in parts if part is not None))
    return None


def _along(part: Indices, before: int, size: int, inner: int) -> Indices | None:
    """The indices of a dimension, if the part is the whole of all other dimensions for some of its indices; otherwise
    None."""
    if len(part) % (before * inner) if before * inner else True:
        return None
    count = len(part) // (before * inner)
    if isinstance(part, range) and before == 1:
        is_aligned = part.start % inner == 0
        return range(part.start // inner, part.start // inner + count) if is_aligned else None
    numbers = [index // inner % size for index in part[: count * inner : inner]]
    flat = (
        (outer * size + index) * inner + rest for outer in range(before) for index in numbers for rest in range(inner)
    )
    return indices(numbers) if all(a == b for a, b in zip(part, flat, strict=True)) else None


def _build_reshape(site: Site) -> Kernel:
    shape = site.local_shape(site.call.outputs[0])
    return lambda x: [x.reshape(shape)]


def _build_permute(site: Site) -> Kernel:
    order = tuple(site.call.attributes["order"])

    def kernel(x: Tensor) -> list[Tensor]:
        return [x.permute(order)]

    return kernel


OPERATIONS = (
    Operation("identity", _place_identity, is_view=True, follows=True),
    Operation(
        "reshape",
        _place_reshape,
        dict.fromkeys(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel"), _reshape),
        _build_reshape,
        is_view=True,
        follows=True,
    ),
    Operation(
        "permute",
        _place_permute,
        {
            **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transpose),
            **dict.fromkeys(("movedim", "moveaxis"), _move),
            "get": _property,
            "permute": _permute,
            "t": _t,
        },
        _build_permute,
        is_view=True,
        follows=True,
        options=("order",),
    ),
)
