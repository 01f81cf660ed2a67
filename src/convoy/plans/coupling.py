"""Which call of a network computes with several samples of a batch at once."""

from convoy.graph.graph import Call, Graph
from convoy.plans.layout import Layout, balanced
from convoy.plans.mesh import Mesh
from convoy.plans.place import PlacedCall, place
from convoy.plans.plan import Plan
from convoy.plans.rules import Batch

_HALVES = Plan(Mesh(("sample",), (2,)), (("*", {"sample": "sample"}),))


def coupling(graph: Graph) -> Call | None:
    """The first call that needs more than its own samples where the samples lie on two devices; batch norm aside.

    A call that nobody has a rule for is taken for one.

    Args:
        graph: the network, captured with at least two samples.
    """
    batch = Batch(_HALVES.mesh, (0,), balanced(graph.shape(graph.inputs[0])[0], 2))
    placement = place(graph, _HALVES, batch, [])
    return next((placed.call for placed in placement.calls if _couples(placed, graph)), None)


def _couples(placed: PlacedCall, graph: Graph) -> bool:
    call = placed.call
    if call.op == "batch_norm":
        return False
    sent = any(graph.values[name].origin in ("call", "input") for name in placed.transfers)
    partial = any(layout.partial for layout in placed.placed.outputs.values())
    along = call.op == "softmax" and _divides(placed.placed.inputs[call.attributes["input"]], call.attributes["dim"])
    return sent or partial or along


def _divides(layout: Layout, dim: int) -> bool:
    return layout.split(dim) is not None
