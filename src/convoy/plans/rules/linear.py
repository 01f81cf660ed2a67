"""Linear layers: 1×1 convolutions over whatever dimensions stand before the features (column- and row-parallel)."""

from convoy.plans.check import axis_names, check_channel, check_filter
from convoy.plans.layout import Layout, Split
from convoy.plans.rules.convolution import follow
from convoy.plans.rules.layouts import even
from convoy.plans.rules.rule import Placed, Situation


def rule(situation: Situation) -> Placed:
    """Input [samples, ..., features]; rows and columns stay where they are, since each is worked on by itself."""
    call, mesh = situation.call, situation.mesh
    source, weight, bias = (call.attributes[name] for name in ("input", "weight", "bias"))
    shape, out_shape = situation.shape(source), situation.shape(call.outputs[0])
    last = len(shape) - 1
    splits = _kept(situation, source, last)
    shared = {axis for split in splits.values() for axis in split.axes}
    filters, channels = situation.axes("filter"), situation.axes("channel")
    taken, given, of_weight = dict(splits), dict(splits), {}
    if filters:
        check_filter(situation.where, axis_names(mesh, filters), mesh.size(filters), out_shape[-1])
        given[last] = of_weight[0] = even(mesh, filters, out_shape[-1])
    if channels:
        check_channel(situation.where, axis_names(mesh, channels), mesh.size(channels), shape[-1])
        taken[last] = of_weight[1] = follow(situation, source, last, channels, shape[-1])
    inputs = {source: Layout.of(taken, copied=filters), weight: Layout.of(of_weight, copied=shared)}
    if bias is not None:
        inputs[bias] = Layout.of({0: of_weight[0]} if filters else {}, copied=shared)
    return Placed(inputs, {call.outputs[0]: Layout.of(given, partial=channels)})


def _kept(situation: Situation, source: str, last: int) -> dict[int, Split]:
    """Splits of samples, rows and columns under which the layer works."""
    keep = situation.axes("sample", "height", "width")
    before = situation.given.get(source, Layout())
    splits = {dim: split for dim, split in before.splits if dim != last and set(split.axes) <= set(keep)}
    samples = situation.axes("sample")
    if last > 0 and situation.shape(source)[0] == situation.batch.num_samples and samples:
        splits = {dim: split for dim, split in splits.items() if not set(split.axes) & set(samples)}
        split = situation.batch.split(samples)
        assert split is not None
        splits[0] = split
    return splits
