"""Pieces that a plan adds to a network's own: what ranks copy and add on the spot, for the sake of what they send."""

from convoy.cost.about import about, dtype_name
from convoy.cost.piece import Operand, Option, Piece
from convoy.graph.graph import Graph
from convoy.plans.mesh import Coordinates, Mesh
from convoy.plans.transfer import Step


def redistribution(step: Step, graph: Graph, name: str, mesh: Mesh, place: Coordinates) -> Piece:
    """What a rank copies for a transfer, beside what it sends: packing, putting together, clones of sums."""
    value = graph.values[name]
    return moved(step, value.shape, dtype_name(value.dtype), name in about(graph).differentiable, mesh, place)


def moved(
    step: Step, shape: tuple[int, ...], dtype: str, differentiable: bool, mesh: Mesh, place: Coordinates
) -> Piece:
    """The same of a tensor of any graph; `shape` is the whole tensor's."""
    before, after = (
        Operand(layout.local_shape(shape, mesh, place), dtype, "activation", differentiable)
        for layout in (step.source, step.target)
    )
    forward, backward = {
        "reduce": (2 * before.bytes, 0),
        "copy": (0, 2 * before.bytes),
        "keep": (0, before.bytes),
        "slice": (2 * after.bytes, 2 * before.bytes),
        "gather": (2 * after.bytes, 2 * before.bytes),
        "reduce_scatter": (2 * before.bytes, 2 * before.bytes),
        "move": (2 * (before.bytes + after.bytes), 2 * (before.bytes + after.bytes)),
    }[step.kind]
    options: dict[str, Option] = {"forward": forward, "backward": backward if differentiable else 0}
    options["ranks"] = mesh.size(step.axes)
    return Piece("redistribute", step.kind, (before,), (after,), tuple(sorted(options.items())))


def copied(num_bytes: int, times: int = 1) -> Piece:
    """A copy of so many bytes, as into a message and out of it; `times` 2 for one added to what is there."""
    one = Operand((num_bytes // 4,), "float32")
    return Piece("copy", "", (one,) * times, (one,))
