"""Layer norm."""

import math

import torch.nn.functional as F
from torch import Tensor

from convoy.graph.graph import Call, Graph
from convoy.graph.torch_call import Recognized, TorchCall
from convoy.ops.kernel import Alone, Kernel, Site, by_role
from convoy.ops.layouts import axes_along, resolved
from convoy.ops.operation import Operation, Shape, keeps_input
from convoy.ops.shared_statistics import Normalize, Sharing, affine
from convoy.plans.layout import Layout
from convoy.plans.place import Placed, Situation


def _layer_norm(call: TorchCall) -> Recognized:
    arguments = call.bound(input=None, normalized_shape=None, weight=None, bias=None, eps=1e-5)
    return Recognized("layer_norm", {**arguments, "normalized_shape": tuple(arguments["normalized_shape"])})


def place(situation: Situation) -> Placed:
    """Scale and shift are divided as the normalized dimensions are. Where one of these is divided, the call adds up the
    statistics over its axes, two numbers for each vector that is normalized."""
    call = situation.call
    source = call.attributes["input"]
    layout = resolved(situation, source)
    first = len(situation.shape(source)) - len(call.attributes["normalized_shape"])
    splits = {dim - first: split for dim, split in layout.splits if dim >= first}
    other_axes = {axis for dim, split in layout.splits if dim < first for axis in split.axes}
    inputs = {name: Layout.of(splits, copied=other_axes) for name in call.inputs}
    inputs[source] = layout
    return Placed(inputs, {call.outputs[0]: layout})


def _build(site: Site) -> Kernel:
    """The function itself where the rank has whole vectors; otherwise statistics are shared with other ranks."""
    call, pick = site.call, by_role(site.call, "input", "weight", "bias")
    source, eps = call.attributes["input"], call.attributes["eps"]
    shape, layout = site.graph.shape(source), site.layouts[source]
    dims = sorted(shared_dims(call, site.graph, layout))
    local = tuple(len(site.parts(source, dim)) for dim in dims)
    axes = axes_along(layout, dims)
    group = site.groups.of(axes)
    if group is None:

        def alone(*tensors: Tensor) -> list[Tensor]:
            x, weight, bias = pick(tensors)
            return [F.layer_norm(x, local, weight, bias, eps)]

        return alone
    total = math.prod(shape[dim] for dim in dims)
    shares = tuple(
        (math.prod(len(layout.parts(dim, site.mesh, place, shape[dim])) for dim in dims) / total,)
        for place in site.mesh.group(site.coordinates, axes)
    )
    sharing = Sharing(group, (0,), shares, total)

    def together(*tensors: Tensor) -> list[Tensor]:
        x, weight, bias = pick(tensors)
        vectors = x.reshape(math.prod(x.shape[: dims[0]]), 1, math.prod(local))
        return [affine(Normalize.apply(vectors, sharing, eps).view(x.shape), weight, bias, local)]

    return Alone(together)


def num_vectors(call: Call, shape: Shape) -> int:
    """How many vectors are normalized, each by itself."""
    return math.prod(shape[: len(shape) - len(call.attributes["normalized_shape"])])


def shared_dims(call: Call, graph: Graph, layout: Layout) -> set[int]:
    """The dimensions that are normalized."""
    rank = len(graph.shape(call.attributes["input"]))
    return set(range(rank - len(call.attributes["normalized_shape"]), rank))


OPERATIONS = (
    Operation(
        "layer_norm",
        place,
        {"layer_norm": _layer_norm},
        _build,
        keeps=keeps_input,
        follows=True,
        passes=1.0,
        options=("normalized_shape",),
        shared_dims=shared_dims,
        statistics=lambda call, shape: 2 * num_vectors(call, shape),
        whole_precision=frozenset({"cuda"}),
    ),
)
