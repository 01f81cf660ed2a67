"""Convolutions, plain, grouped and transposed: split by samples, filters, input channels, rows or columns.

The strategies are those of Dryden et al., "Channel and Filter Parallelism for Large-Scale CNN Training" (SC 2019) and
"Improving Strong-Scaling of CNN Training by Exploiting Finer-Grained Parallelism" (IPDPS 2019).
"""

from dataclasses import dataclass

from convoy.graph.graph import Call, Graph
from convoy.plans.check import axis_names, check_channel, check_filter, check_rows
from convoy.plans.layout import Indices, Layout, Split, indices
from convoy.plans.mesh import Axes, Coordinates, Mesh
from convoy.plans.rules.layouts import even, is_balanced, put
from convoy.plans.rules.rule import Placed, Situation
from convoy.plans.windows import Transposed, Window, halo_split, output_split


@dataclass(frozen=True)
class _Channels:
    """How the channels of a convolution are divided: of its input, its output, and the dimensions of its weight."""

    input: Split | None
    output: Split | None
    weight: dict[int, Split]
    copied: Axes
    partial: Axes


def rule(situation: Situation) -> Placed:
    """Input [samples, channels, (depth,) height, width] or [samples, channels, length]."""
    call = situation.call
    source, weight, bias = (call.attributes[name] for name in ("input", "weight", "bias"))
    output = call.outputs[0]
    channels = _grouped(situation) if call.attributes["groups"] > 1 else _plain(situation)
    in_splits: dict[int, Split] = {}
    out_splits: dict[int, Split] = {}
    samples = situation.axes("sample")
    for splits in (in_splits, out_splits):
        put(splits, 0, situation.batch.split(samples))
    put(in_splits, 1, channels.input)
    put(out_splits, 1, channels.output)
    rows = _rows(situation, in_splits, out_splits)
    shared = {*samples, *rows}
    inputs = {
        source: Layout.of(in_splits, copied=channels.copied),
        weight: Layout.of(channels.weight, copied=shared),
    }
    if bias is not None:
        inputs[bias] = Layout.of({0: channels.output} if channels.output else {}, copied=shared)
    return Placed(inputs, {output: Layout.of(out_splits, partial=channels.partial)})


def _plain(situation: Situation) -> _Channels:
    call, mesh = situation.call, situation.mesh
    source, transposed = call.attributes["input"], call.attributes["transposed"]
    num_in, num_out = situation.shape(source)[1], situation.shape(call.outputs[0])[1]
    filters, channels = situation.axes("filter"), situation.axes("channel")
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    weight: dict[int, Split] = {}
    taken = given = None
    if filters:
        check_filter(situation.where, axis_names(mesh, filters), mesh.size(filters), num_out)
        given = weight[out_dim] = even(mesh, filters, num_out)
    if channels:
        check_channel(situation.where, axis_names(mesh, channels), mesh.size(channels), num_in)
        taken = weight[in_dim] = follow(situation, source, 1, channels, num_in)
    return _Channels(taken, given, weight, copied=filters, partial=channels)


def follow(situation: Situation, source: str, dim: int, axes: Axes, size: int) -> Split:
    """The split that a dimension already has over exactly these axes, if it is a fair one; otherwise an even one."""
    before = situation.given[source].split(dim) if source in situation.given else None
    if before is not None and before.axes == axes and is_balanced(before, size):
        return before
    return even(situation.mesh, axes, size)


def _grouped(situation: Situation) -> _Channels:
    """Whole groups stay on their rank, so that nothing is sent: the two columns of Krizhevsky et al. (2012)."""
    call, mesh = situation.call, situation.mesh
    source, groups = call.attributes["input"], call.attributes["groups"]
    num_in, num_out = situation.shape(source)[1], situation.shape(call.outputs[0])[1]
    axes = situation.axes("filter", "channel")
    if not axes:
        return _Channels(None, None, {}, (), ())
    check_filter(situation.where, axis_names(mesh, axes), mesh.size(axes), num_out, groups)
    in_size, out_size = num_in // groups, num_out // groups
    owned = _owned_groups(follow(situation, source, 1, axes, num_in), in_size)
    if owned is None:
        owned = list(even(mesh, axes, groups).parts)
    taken = Split(axes, tuple(_members(part, in_size) for part in owned))
    given = Split(axes, tuple(_members(part, out_size) for part in owned))
    return _Channels(taken, given, {0: taken if call.attributes["transposed"] else given}, (), ())


def _owned_groups(split: Split, size: int) -> list[Indices] | None:
    """The groups in every part, in order, or None where a part cuts a group."""
    owned: list[Indices] = []
    for part in split.parts:
        channels = tuple(part)
        groups = indices(channel // size for channel in channels[::size])
        if tuple(_members(groups, size)) != channels:
            return None
        owned.append(groups)
    return owned


def _members(groups: Indices, size: int) -> Indices:
    return indices(channel for group in groups for channel in range(group * size, (group + 1) * size))


def _rows(situation: Situation, in_splits: dict[int, Split], out_splits: dict[int, Split]) -> Axes:
    """Divide the rows and columns of the output, and ask for the input's with their halo."""
    call = situation.call
    found: Axes = ()
    for dim, axes, name in spatial_dims(situation, len(situation.shape(call.outputs[0]))):
        size = situation.shape(call.outputs[0])[dim]
        check_rows(situation.where, axis_names(situation.mesh, axes), situation.mesh.size(axes), size, name)
        out_splits[dim] = output_split(size, situation.mesh, axes)
        in_splits[dim] = halo_split(window_of(situation.graph, call, dim), out_splits[dim])
        found += axes
    return found


def window_of(graph: Graph, call: Call, dim: int) -> Window | Transposed:
    """The window that slides over a dimension of a convolution's input."""
    attributes, at = call.attributes, dim - 2
    size = graph.shape(attributes["input"])[dim]
    kernel = graph.shape(attributes["weight"])[dim]
    stride, dilation = attributes["stride"][at], attributes["dilation"][at]
    before, after = attributes["padding"][at]
    if attributes["transposed"]:
        return Transposed(size, kernel, stride, dilation, before, after, attributes["output_padding"][at])
    return Window(size, kernel, stride, dilation, before, after)


def paddings_of(graph: Graph, call: Call, output: Layout, mesh: Mesh, place: Coordinates) -> list[tuple[int, int, int]]:
    """What a rank pads, for each spatial dimension of a convolution that is not transposed: so much at both ends,
    which the convolution does itself, then what more at either end, which takes a copy of the input."""
    found = []
    for at, (before, after) in enumerate(call.attributes["padding"]):
        if output.split(2 + at) is not None:
            rows = output.parts(2 + at, mesh, place, graph.shape(call.outputs[0])[2 + at])
            assert isinstance(rows, range)
            need = window_of(graph, call, 2 + at).needed(rows)
            before, after = need.before, need.after
        both = min(before, after)
        found.append((both, before - both, after - both))
    return found


def spatial_dims(situation: Situation, num_dims: int) -> list[tuple[int, Axes, str]]:
    """Dimensions that the strategies `height` and `width` divide; a signal has but one, that either divides.

    One row of one row, as behind a global pooling, is not divided: such a layer is a linear one.
    """
    if num_dims == 3:
        wanted = [(2, situation.axes("height", "width"), "width")]
    else:
        wanted = [(num_dims - 2, situation.axes("height"), "height"), (num_dims - 1, situation.axes("width"), "width")]
    before, after = situation.shape(situation.call.attributes["input"]), situation.shape(situation.call.outputs[0])
    return [(dim, axes, name) for dim, axes, name in wanted if axes and max(before[dim], after[dim]) > 1]
