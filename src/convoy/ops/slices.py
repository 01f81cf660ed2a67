"""Parts of tensors, by basic indexing and in chunks, joined and padded ones: each rank keeps its indices."""

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from convoy.graph.graph import Call, Recognized, Ref, TorchCall
from convoy.ops.kernel import Kernel, Site, as_called, flat_padding, guarded, taking
from convoy.ops.layouts import Follow, agreed, by_dim, even
from convoy.ops.operation import Operation
from convoy.plans.layout import Indices, Layout, Split, consecutive, indices
from convoy.plans.place import Placed, Situation


def _cat(call: TorchCall) -> Recognized | None:
    arguments = call.bound(tensors=(), dim=0)
    dim = arguments["dim"] % len(call.output)
    operands = tuple(ref.name for ref in arguments["tensors"] if isinstance(ref, Ref))
    if any(len(call.shape(name)) != len(call.output) for name in operands):
        return None  # torch lets empty one-dimensional tensors pass
    return Recognized("cat", {"operands": operands, "dim": dim})


def _place_cat(situation: Situation) -> Placed:
    """Operands have equal shapes but for the dimension along which they are joined."""
    call, mesh = situation.call, situation.mesh
    names, output = call.attributes["operands"], call.outputs[0]
    out_shape = situation.shape(output)
    dim = call.attributes["dim"]
    operand_shapes = {name: situation.shape(name) for name in names}
    shapes = {name: (*shape[:dim], out_shape[dim], *shape[dim + 1 :]) for name, shape in operand_shapes.items()}
    target = agreed(situation, out_shape, shapes, skip=dim)
    axes = _axes_along(situation, names, dim, {axis for split in target.values() for axis in split.axes})
    if not axes:
        layout = Layout.of(target)
        return Placed(dict.fromkeys(names, layout), {output: layout})
    inputs: dict[str, Layout] = {}
    splits, sizes = [], tuple(situation.shape(name)[dim] for name in names)
    for name, size in zip(names, sizes, strict=True):
        split = situation.given[name].split(dim) if name in situation.given else None
        splits.append(split if split is not None and split.axes == axes else even(mesh, axes, size))
        inputs[name] = Layout.of({**target, dim: splits[-1]})
    return Placed(inputs, {output: Layout.of({**target, dim: _joined_split(tuple(splits), sizes)})})


@functools.lru_cache(maxsize=1 << 12)
def _joined_split(splits: tuple[Split, ...], sizes: tuple[int, ...]) -> Split:
    """The split of the result: every rank has its parts of all operands, one after the other."""
    parts: list[list[int]] = [[] for _ in splits[0].parts]
    offset = 0
    for split, size in zip(splits, sizes, strict=True):
        for joined, part in zip(parts, split.parts, strict=True):
            joined.extend(offset + index for index in part)
        offset += size
    return Split(splits[0].axes, tuple(indices(part) for part in parts))


def _axes_along(situation: Situation, names: tuple[str, ...], dim: int, used_axes: set[int]) -> tuple[int, ...]:
    """The axes over which the largest operand that is divided along `dim` is divided."""
    for name in sorted(names, key=lambda name: -situation.shape(name)[dim]):
        split = situation.given[name].split(dim) if name in situation.given else None
        if split is not None and not set(split.axes) & used_axes:
            return split.axes
    return ()


Range = tuple[int, int, int] | int  # what is taken of a dimension: from, to and step, or a single index


def _select(call: TorchCall, ranges: dict[int, Range]) -> Recognized:
    sizes = call.shape(call.input)
    whole = tuple(ranges.get(dim, (0, size, 1)) for dim, size in enumerate(sizes))
    return Recognized("select", {"input": call.input, "ranges": whole})


def _getitem(call: TorchCall) -> Recognized | None:
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if not all(item is Ellipsis or _plain(item) for item in index):
        return None
    sizes = call.shape(call.input)
    if Ellipsis in index:
        place = index.index(Ellipsis)
        index = (*index[:place], *[slice(None)] * (len(sizes) - len(index) + 1), *index[place + 1 :])
    return _select(call, {dim: _range(item, size) for dim, (item, size) in enumerate(zip(index, sizes, strict=False))})


def _plain(item: Any) -> bool:
    if isinstance(item, slice):
        return all(end is None or type(end) is int for end in (item.start, item.stop, item.step))
    return type(item) is int


def _range(item: int | slice, size: int) -> Range:
    if isinstance(item, int):
        return item % size
    start, stop, step = item.indices(size)
    return start, max(start, stop), step


def _narrow(call: TorchCall) -> Recognized | None:
    arguments = call.bound(input=None, dim=0, start=0, length=0)
    dim = arguments["dim"] % len(call.shape(call.input))
    if not isinstance(arguments["start"], int):
        return None
    start = arguments["start"] % max(1, call.shape(call.input)[dim])
    return _select(call, {dim: (start, start + arguments["length"], 1)})


def _one(call: TorchCall) -> Recognized | None:
    arguments = call.bound(input=None, dim=0, index=0)
    sizes = call.shape(call.input)
    dim = arguments["dim"] % len(sizes)
    return _select(call, {dim: arguments["index"] % sizes[dim]})


def _split(call: TorchCall) -> Recognized | None:
    arguments = call.bound(input=None, pieces=None, dim=0)
    dim = arguments["dim"] % len(call.shape(call.input))
    sizes = tuple(output.shape[dim] for output in call.outputs)
    if sum(sizes) != call.shape(call.input)[dim]:
        return None  # `tensor_split` at places out of order
    return Recognized("split", {"input": call.input, "dim": dim, "sizes": sizes})


def _ranges(call: Call, shape: tuple[int, ...]) -> list[tuple[Range, ...]]:
    """What each output takes of every dimension."""
    if call.op == "select":
        return [call.attributes["ranges"]]
    whole: list[Range] = [(0, size, 1) for size in shape]
    dim, chunks = call.attributes["dim"], consecutive(call.attributes["sizes"])
    return [(*whole[:dim], (chunk.start, chunk.stop, 1), *whole[dim + 1 :]) for chunk in chunks]


def _place_ranges(situation: Situation) -> Placed:
    """Nothing is sent, and a rank may be left with nothing; a dimension from which a single index is selected is asked
    for whole."""
    call = situation.call
    source, outputs, placed = call.attributes["input"], {}, None
    for name, ranges in zip(call.outputs, _ranges(call, situation.shape(source)), strict=True):

        def follow(dim: int, split: Split, ranges: tuple[Range, ...] = ranges) -> Follow:
            selection = ranges[dim]
            if isinstance(selection, int):
                return "one index of a divided dimension: it is whole"
            out_dim = sum(not isinstance(before, int) for before in ranges[:dim])
            return split, (out_dim, Split(split.axes, tuple(within(part, range(*selection)) for part in split.parts)))

        placed = by_dim(situation, follow)
        outputs[name] = placed.outputs[call.outputs[0]]
    assert placed is not None
    return Placed(placed.inputs, outputs, placed.note)


def within(part: Indices, chosen: range) -> Indices:
    """Positions in a slice of those indices of a part that are in it."""
    return indices(chosen.index(index) for index in part if index in chosen)


def places(part: Indices, chosen: range) -> Indices:
    """Positions in a part of those of its indices that are in a slice."""
    return indices(place for place, index in enumerate(part) if index in chosen)


def _build_ranges(site: Site) -> Kernel:
    """Of each dimension the rank's own indices that are in the slice."""
    source = site.call.attributes["input"]
    shape = site.graph.shape(source)
    takers = [
        [_taking(dim, selection, site.parts(source, dim)) for dim, selection in enumerate(ranges)]
        for ranges in _ranges(site.call, shape)
    ]

    def kernel(x: Tensor) -> list[Tensor]:
        return [functools.reduce(lambda y, take: take(y), reversed(steps), x) for steps in takers]

    return kernel


def _taking(dim: int, selection: Range, part: Indices) -> Callable[[Tensor], Tensor]:
    if isinstance(selection, int):
        return lambda x: x.select(dim, selection)
    return taking(dim, places(part, range(*selection)), len(part))


def _pad(call: TorchCall) -> Recognized:
    arguments = call.bound(input=None, pad=(), mode="constant", value=None)
    rank, sizes = len(call.output), tuple(arguments["pad"])
    pairs = [(sizes[i], sizes[i + 1]) for i in range(0, len(sizes), 2)]
    pads = ((0, 0),) * (rank - len(pairs)) + tuple(reversed(pairs))
    value = 0.0 if arguments["value"] is None else arguments["value"]
    return Recognized("pad", {"input": call.input, "pads": pads, "mode": arguments["mode"], "value": value})


def _place_padded(situation: Situation) -> Placed:
    """Nothing is sent for constant padding; other modes, and negative padding, need the padded dimensions whole."""
    attributes = situation.call.attributes
    shape = situation.shape(attributes["input"])

    def follow(dim: int, split: Split) -> Follow:
        pads = attributes["pads"][dim]
        if pads == (0, 0):
            return split, (dim, split)
        if attributes["mode"] != "constant" or min(pads) < 0:
            kind = "negative" if min(pads) < 0 else attributes["mode"]
            return f"{kind} padding of a divided dimension: it is whole"
        return split, (dim, Split(split.axes, tuple(padded(part, shape[dim], *pads) for part in split.parts)))

    return by_dim(situation, follow)


def ends(part: Indices, size: int, before: int, after: int) -> tuple[int, int]:
    """Padding at the two ends of a part: added rows go to the parts that hold the first and the last index."""
    return before if 0 in part else 0, after if size - 1 in part else 0


def padded(part: Indices, size: int, before: int, after: int) -> Indices:
    """The indices in the padded tensor that go with a part of the tensor."""
    first, last = ends(part, size, before, after)
    return indices([*range(first), *(before + index for index in part), *range(before + size, before + size + last)])


def _build_padded(site: Site) -> Kernel:
    """The ranks that hold the ends of a divided dimension pad it there."""
    call = site.call
    source, pads = call.attributes["input"], call.attributes["pads"]
    shape = site.graph.shape(source)
    if not any(any(pads[dim]) for dim, _ in site.layouts[source].splits):
        return guarded(site, as_called(site))
    flat = flat_padding(ends(site.parts(source, dim), size, *pads[dim]) for dim, size in enumerate(shape))
    return lambda x: [F.pad(x, flat, value=call.attributes["value"]) if any(flat) else x]


OPERATIONS = (
    Operation(
        "cat", _place_cat, dict.fromkeys(("cat", "concat", "concatenate"), _cat), gives_own=True, options=("dim",)
    ),
    Operation(
        "select", _place_ranges, {"getitem": _getitem, "narrow": _narrow, "select": _one}, _build_ranges, is_slice=True
    ),
    Operation(
        "split",
        _place_ranges,
        dict.fromkeys(("chunk", "split", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split"), _split),
        _build_ranges,
        is_slice=True,
    ),
    Operation("pad", _place_padded, {"pad": _pad}, _build_padded, options=("mode",)),
)
