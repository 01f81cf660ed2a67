"""Concatenation: along channels the index lists are joined and nothing is sent."""

from convoy.plans.layout import Layout, Split, indices
from convoy.plans.rules.elementwise import agreed
from convoy.plans.rules.layouts import even, used
from convoy.plans.rules.rule import Placed, Situation


def rule(situation: Situation) -> Placed:
    """Operands of equal shape but for the dimension along which they are joined."""
    call, mesh = situation.call, situation.mesh
    names, output = call.attributes["operands"], call.outputs[0]
    out_shape = situation.shape(output)
    dim = call.attributes["dim"] % len(out_shape)
    shapes = {name: _except(situation.shape(name), dim, out_shape) for name in names}
    target = agreed(situation, out_shape, shapes, skip=dim)
    axes = _axes_along(situation, names, dim, used(target))
    if not axes:
        layout = Layout.of(target)
        return Placed(dict.fromkeys(names, layout), {output: layout})
    inputs: dict[str, Layout] = {}
    parts: list[list[int]] = [[] for _ in range(mesh.size(axes))]
    offset = 0
    for name in names:
        before = situation.given[name].split(dim) if name in situation.given else None
        size = situation.shape(name)[dim]
        split = before if before is not None and before.axes == axes else even(mesh, axes, size)
        inputs[name] = Layout.of({**target, dim: split})
        for own, part in zip(parts, split.parts, strict=True):
            own.extend(offset + index for index in part)
        offset += size
    joined = Split(axes, tuple(indices(part) for part in parts))
    return Placed(inputs, {output: Layout.of({**target, dim: joined})})


def _axes_along(situation: Situation, names: tuple[str, ...], dim: int, taken: set[int]) -> tuple[int, ...]:
    """The axes over which the largest operand that is divided along `dim` is divided."""
    for name in sorted(names, key=lambda name: -situation.shape(name)[dim]):
        split = situation.given[name].split(dim) if name in situation.given else None
        if split is not None and not set(split.axes) & taken:
            return split.axes
    return ()


def _except(shape: tuple[int, ...], dim: int, out_shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:dim], out_shape[dim], *shape[dim + 1 :])
