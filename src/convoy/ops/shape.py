"""Calls that only rename dimensions: reshape, permute, and no change at all. Index lists follow, nothing is sent."""

import bisect
import functools
import itertools
import operator
from collections.abc import Mapping

import numpy as np
import torch

from convoy.graph.graph import Recognized, Ref, TorchCall
from convoy.graph.tree import replace
from convoy.ops.kernel import Kernel, Site
from convoy.ops.layouts import by_dim
from convoy.ops.operation import Operation
from convoy.plans.layout import Indices, Layout, Split, indices
from convoy.plans.mesh import Mesh
from convoy.plans.place import Placed, Situation


def _reshape(call: TorchCall) -> Recognized | None:
    same_type = call.values[call.input].dtype == call.outputs[0].dtype
    return Recognized("reshape", {"input": call.input}) if same_type else None


def _permute(call: TorchCall) -> Recognized | None:
    """Where dimensions go shows a tensor all of whose dimensions differ in size; of properties `T` and `mT` do so."""
    descriptor = getattr(call.function, "__self__", None)
    if call.name == "get" and getattr(descriptor, "__name__", "") not in ("T", "mT"):
        return None
    probe = torch.empty(*range(2, 2 + len(call.output)), device="meta")
    args, kwargs = replace((call.args, call.kwargs), Ref, lambda _: probe)
    order = tuple(size - 2 for size in call.function(*args, **kwargs).shape)
    return Recognized("permute", {"input": call.input, "order": order})


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
    for dims, out_dims in _runs(shape, out_shape):
        splits = {dim: split for dim, split in layout.splits if dim in dims}
        if len(dims) == len(out_dims) == 1:
            cut = (0, splits[dims[0]]) if splits else None
        else:
            cut = _cut_along(
                situation.mesh, splits, {dim: shape[dim] for dim in dims}, [out_shape[d] for d in out_dims]
            )
        if cut is not None:
            input_splits |= splits
            output_splits[out_dims[cut[0]]] = cut[1]
    return Placed({source: Layout.of(input_splits, layout.partial)}, {output: Layout.of(output_splits, layout.partial)})


def _runs(shape: tuple[int, ...], out_shape: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of dimensions, before and after a reshape, that hold the same elements."""
    if 0 in shape or not (shape and out_shape):  # of a single number nothing is divided
        return []
    products = [list(itertools.accumulate(sizes, operator.mul)) for sizes in (shape, out_shape)]
    ends = sorted(set(products[0]).intersection(products[1]))
    runs: list[tuple[list[int], list[int]]] = [([], []) for _ in ends]
    for side in range(2):
        for dim, product in enumerate(products[side]):
            runs[bisect.bisect_left(ends, product)][side].append(dim)
    return runs


def _cut_along(
    mesh: Mesh, splits: Mapping[int, Split], sizes: Mapping[int, int], out_sizes: list[int]
) -> tuple[int, Split] | None:
    """The dimension, of those that a run of dimensions becomes, along which its parts are cut, if there is one."""
    axes = tuple(sorted(axis for split in splits.values() for axis in split.axes))
    if not axes or len(axes) != len(set(axes)):
        return None
    blocks = []
    for place in mesh.group((0,) * len(mesh.sizes), axes):
        parts = tuple(
            splits[dim].parts[mesh.index(place, splits[dim].axes)] if dim in splits else range(size)
            for dim, size in sizes.items()
        )
        blocks.append(_block(parts, tuple(sizes.values()), tuple(out_sizes)))
    for dim in range(len(out_sizes)):
        others = [range(size) for out_dim, size in enumerate(out_sizes) if out_dim != dim]
        if all(
            block is not None and (not block[dim] or [*block[:dim], *block[dim + 1 :]] == others) for block in blocks
        ):
            return dim, Split(axes, tuple(block[dim] for block in blocks if block is not None))
    return None


@functools.lru_cache(maxsize=1 << 12)
def _block(
    parts: tuple[Indices, ...], sizes: tuple[int, ...], out_sizes: tuple[int, ...]
) -> tuple[Indices, ...] | None:
    """A part of a tensor as indices along each dimension of its other shape; None where it is no such block, or lies in
    another order there."""
    places = np.ravel_multi_index(np.ix_(*(np.array(part, dtype=np.intp) for part in parts)), sizes).ravel()
    by_dim = np.unravel_index(places, out_sizes)
    block = [numbers[np.sort(np.unique(numbers, return_index=True)[1])] for numbers in by_dim]
    places_of_block = np.ravel_multi_index(np.ix_(*block), out_sizes).ravel()
    return tuple(indices(numbers.tolist()) for numbers in block) if np.array_equal(places_of_block, places) else None


def _build_reshape(site: Site) -> Kernel:
    shape = site.local_shape(site.call.outputs[0])
    return lambda x: [x.reshape(shape)]


def _build_permute(site: Site) -> Kernel:
    return lambda x: [x.permute(site.call.attributes["order"])]


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
        dict.fromkeys(("transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "get", "permute", "t"), _permute),
        _build_permute,
        is_view=True,
        follows=True,
        options=("order",),
    ),
)
