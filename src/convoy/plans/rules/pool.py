"""Pooling: follows the layout of its input; rows and columns stay divided, with a halo where windows overlap."""

from convoy.graph.graph import Call, Graph
from convoy.plans.layout import Layout
from convoy.plans.rules.rule import Placed, Situation
from convoy.plans.rules.spatial import slide, spatial
from convoy.plans.windows import Window


def max_pool(situation: Situation) -> Placed:
    """Input [..., rows] or [..., rows, columns] or [..., depth, rows, columns]."""
    return _pool(situation, linear=False)


def avg_pool(situation: Situation) -> Placed:
    """As `max_pool`; a partial sum may stay one."""
    return _pool(situation, linear=True)


def adaptive_max_pool(situation: Situation) -> Placed:
    """Rows stay divided where all windows have one size and every rank has one of them."""
    return _pool(situation, linear=False)


def adaptive_avg_pool(situation: Situation) -> Placed:
    """As `adaptive_max_pool`, and an average over all rows is a partial sum over the ranks that divide them."""
    return _pool(situation, linear=True)


def _pool(situation: Situation, linear: bool) -> Placed:
    call = situation.call
    source, output = call.attributes["input"], call.outputs[0]
    given = situation.given.get(source, Layout())
    windows = windows_of(situation.graph, call)
    summed = {}
    if call.op == "adaptive_avg_pool":
        out_shape = situation.shape(output)
        summed = {dim: split for dim, split in given.splits if dim in windows and out_shape[dim] == 1}
    rest = Layout.of({dim: split for dim, split in given.splits if dim not in summed})
    taken, left, note = slide(situation, rest, windows)
    partial = given.partial if linear else frozenset[int]()
    sums = {axis for split in summed.values() for axis in split.axes}
    inputs = Layout.of({**taken, **summed}, partial)
    return Placed({source: inputs}, {output: Layout.of(left, partial | sums)}, note)


def windows_of(graph: Graph, call: Call) -> dict[int, Window | None]:
    """The window that slides over each spatial dimension; None where adaptive windows differ in size."""
    attributes = call.attributes
    shape, out_shape = graph.shape(attributes["input"]), graph.shape(call.outputs[0])
    if "output_size" in attributes:
        dims = spatial(len(shape), len(attributes["output_size"]))
        return {dim: _adaptive(shape[dim], out_shape[dim]) for dim in dims}
    dims = spatial(len(shape), len(attributes["kernel"]))
    found: dict[int, Window | None] = {}
    for at, dim in enumerate(dims):
        padding, dilation = attributes["padding"][at], (attributes.get("dilation") or [1] * len(dims))[at]
        kernel, stride = attributes["kernel"][at], attributes["stride"][at]
        ceil_mode = bool(attributes["ceil_mode"])
        found[dim] = Window(shape[dim], kernel, stride, dilation, padding, padding, ceil_mode)
    return found


def _adaptive(size: int, output_size: int) -> Window | None:
    """Output row i covers the rows from ⌊i·size/output_size⌋ to ⌈(i+1)·size/output_size⌉."""
    if output_size == 0 or size % output_size:
        return None
    return Window(size, size // output_size, size // output_size)
