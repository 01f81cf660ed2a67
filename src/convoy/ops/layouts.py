"""Constructions on layouts that several operations share."""

from collections.abc import Callable, Container, Iterable, Mapping
from math import prod

from convoy.plans.layout import WHOLE, Indices, Layout, Split, even_split, indices
from convoy.plans.mesh import Axes, Mesh
from convoy.plans.place import Placed, Situation


def even(mesh: Mesh, axes: Iterable[int], size: int) -> Split:
    """A dimension cut into consecutive parts as even as can be, the first axis being the coarsest."""
    axes = tuple(sorted(axes))
    return even_split(axes, size, mesh.size(axes))


def operand(
    target: Mapping[int, Split], out_shape: tuple[int, ...], shape: tuple[int, ...], keep: Iterable[int] = ()
) -> Layout:
    """The layout of an operand that broadcasts to `out_shape`, aligned with its last dimensions, where the result is
    split as in `target`; it stays partial over the axes of `keep`. It has the same split where it has the dimension;
    where it is broadcast, every rank needs it for its part of the work, so that its gradient is shared out over the
    axes."""
    offset = len(out_shape) - len(shape)
    splits: dict[int, Split] = {}
    copied: set[int] = set()
    for dim, split in target.items():
        operand_dim = dim - offset
        if operand_dim >= 0 and shape[operand_dim] == out_shape[dim]:
            splits[operand_dim] = split
        else:
            copied |= set(split.axes)
    return Layout.of(splits, partial=keep, copied=copied)


def axes_along(layout: Layout, dims: Container[int]) -> Axes:
    """Axes over which some of these dimensions are divided."""
    return tuple(sorted(axis for dim, split in layout.splits if dim in dims for axis in split.axes))


def resolved(situation: Situation, name: str) -> Layout:
    """The layout that a value has, with partial sums added up."""
    return Layout(situation.given.get(name, WHOLE).splits)


def by_channel(situation: Situation, layout: Layout | None = None) -> Placed:
    """A normalization of [samples, channels, ...] follows its input, or has it in a layout, and its numbers of each
    channel the channels. Over the axes that divide samples, rows or columns every rank has all of these, and its share
    of the gradients of scale and shift."""
    call = situation.call
    layout = layout or resolved(situation, call.attributes["input"])
    channels = layout.split(1)
    channel_splits = {} if channels is None else {0: channels}
    other_axes = layout.split_axes - set(channels.axes if channels else ())
    affine = {call.attributes["weight"], call.attributes["bias"]}
    inputs = {name: Layout.of(channel_splits, copied=other_axes if name in affine else ()) for name in call.inputs}
    inputs |= {call.attributes["num_batches_tracked"]: WHOLE} if call.attributes.get("num_batches_tracked") else {}
    return Placed({**inputs, call.attributes["input"]: layout}, {call.outputs[0]: layout})


# For a dimension that is divided: the split to ask the input for, with the dimension and the split of the output, or
# None for a sum over the split's axes; or why it has to be whole.
Follow = tuple[Split, tuple[int, Split] | None] | str


def by_dim(situation: Situation, rule: Callable[[int, Split], Follow], linear: bool = False) -> Placed:
    """Follow the layout of the input, one dimension after the other. Where the operation is `linear`, a partial sum may
    stay one."""
    call = situation.call
    source, output = call.attributes["input"], call.outputs[0]
    layout = situation.given.get(source, WHOLE)
    partial = set(layout.partial) if linear else set[int]()
    input_splits: dict[int, Split] = {}
    output_splits: dict[int, Split] = {}
    summed_axes: set[int] = set()
    notes: dict[str, None] = {}
    for dim, split in layout.splits:
        answer = rule(dim, split)
        if isinstance(answer, str):
            notes[answer] = None
            continue
        input_splits[dim], result = answer
        if result is None:
            summed_axes |= set(split.axes)
        else:
            output_splits[result[0]] = result[1]
    inputs = {source: Layout.of(input_splits, partial)}
    return Placed(inputs, {output: Layout.of(output_splits, partial | summed_axes)}, "; ".join(filter(None, notes)))


def groups_in(part: Indices, size: int) -> Indices | None:
    """The groups of consecutive channels that some channels are, one after the other; None where they cut a group."""
    groups = indices(channel // size for channel in part[::size])
    return groups if tuple(members(groups, size)) == tuple(part) else None


def members(groups: Indices, size: int) -> Indices:
    """The channels of groups."""
    return indices(channel for group in groups for channel in range(group * size, (group + 1) * size))


def agreed(
    situation: Situation, out_shape: tuple[int, ...], shapes: dict[str, tuple[int, ...]], skip: int | None = None
) -> dict[int, Split]:
    """The splits of the result that spare the largest operands a redistribution. `shapes` are those of operands that
    broadcast to it; the caller divides dimension `skip` of the result by itself."""
    target: dict[int, Split] = {}
    used_axes: set[int] = set()
    names = [name for name in shapes if name in situation.given]
    for name in sorted(names, key=lambda name: -prod(shapes[name])):
        offset = len(out_shape) - len(shapes[name])
        for dim, split in situation.given[name].splits:
            is_free = dim + offset not in target and not set(split.axes) & used_axes
            if is_free and shapes[name][dim] == out_shape[dim + offset] and dim + offset != skip:
                target[dim + offset] = split
                used_axes |= set(split.axes)
    return target


def follow(situation: Situation, source: str, dim: int, axes: Axes, size: int) -> Split:
    """The split that a dimension already has over exactly these axes, if it is a fair one; otherwise an even one."""
    before = situation.given[source].split(dim) if source in situation.given else None
    if before is not None and before.axes == axes:
        lengths = list(map(len, before.parts))
        if min(lengths) > 0 and max(lengths) <= -(-size // len(lengths)) * 1.5:
            return before
    return even(situation.mesh, axes, size)


def sample_split(situation: Situation, name: str) -> Split | None:
    """How a layer that is divided by samples has those of an input: as the batch, or where the network has joined or
    left out some, as they come."""
    axes, count = situation.axes("sample"), situation.shape(name)[0]
    if axes and count != situation.batch.num_samples:
        return follow(situation, name, 0, axes, count)
    return situation.batch.split(axes)
