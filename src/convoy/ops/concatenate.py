"""Concatenation: along channels the index lists are joined and nothing is sent."""

from functools import lru_cache

from convoy.graph.graph import Ref
from convoy.graph.torch_call import Recognized, TorchCall
from convoy.ops.layouts import agreed, even
from convoy.ops.operation import Operation
from convoy.plans.layout import Layout, Split, indices
from convoy.plans.place import Placed, Situation


def _cat(call: TorchCall) -> Recognized | None:
    arguments = call.bound(tensors=(), dim=0)
    dim = call.kwargs.get("axis", arguments["dim"]) % len(call.output)
    operands = tuple(ref.name for ref in arguments["tensors"] if isinstance(ref, Ref))
    if any(len(call.shape(name)) != len(call.output) for name in operands):
        return None  # torch lets empty one-dimensional tensors pass
    return Recognized("cat", {"operands": operands, "dim": dim})


def place(situation: Situation) -> Placed:
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
    return Placed(inputs, {output: Layout.of({**target, dim: _joined(tuple(splits), sizes)})})


@lru_cache(maxsize=1 << 12)
def _joined(splits: tuple[Split, ...], sizes: tuple[int, ...]) -> Split:
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


OPERATIONS = (
    Operation("cat", place, dict.fromkeys(("cat", "concat", "concatenate"), _cat), gives_own=True, options=("dim",)),
)
