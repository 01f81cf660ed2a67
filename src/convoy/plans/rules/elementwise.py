"""Calls that work on each element by itself: they follow the layout of what they are given."""

from convoy.plans.layout import Layout, Split
from convoy.plans.rules.layouts import operand
from convoy.plans.rules.rule import Placed, Situation

LINEAR = frozenset({"add", "sub", "add_", "sub_", "__add__", "__iadd__", "__sub__", "__isub__", "__radd__"})


def rule(situation: Situation) -> Placed:
    """Operands broadcast as in torch; the result is split as the operand with the most elements is, and further where
    another operand already is.
    """
    call = situation.call
    output = call.outputs[0]
    out_shape = situation.shape(output)
    shapes = {name: _aligned(situation, name) for name in call.inputs}
    target = agreed(situation, out_shape, shapes)
    partial = _partial(situation)
    inputs = {name: operand(target, out_shape, shape, keep=partial) for name, shape in shapes.items()}
    return Placed(inputs, {output: Layout.of(target, partial=partial)})


def agreed(
    situation: Situation, out_shape: tuple[int, ...], shapes: dict[str, tuple[int, ...]], skip: int | None = None
) -> dict[int, Split]:
    """The splits of the result that spare the largest operands a redistribution.

    Args:
        situation: the call.
        out_shape: shape of the result.
        shapes: operands that broadcast to it.
        skip: a dimension of the result that the caller divides by itself.
    """
    target: dict[int, Split] = {}
    taken: set[int] = set()
    given = [name for name in shapes if name in situation.given]
    for name in sorted(given, key=lambda name: -_elements(shapes[name])):
        offset = len(out_shape) - len(shapes[name])
        for dim, split in situation.given[name].splits:
            free = dim + offset not in target and not set(split.axes) & taken
            if free and shapes[name][dim] == out_shape[dim + offset] and dim + offset != skip:
                target[dim + offset] = split
                taken |= set(split.axes)
    return target


def _aligned(situation: Situation, name: str) -> tuple[int, ...]:
    """A value's shape; a vector of one number a channel stands for [channels, 1, 1]."""
    shape = situation.shape(name)
    if name == situation.call.attributes.get("channel_operand"):
        return shape + (1,) * (len(situation.shape(situation.call.outputs[0])) - 2)
    return shape


def _partial(situation: Situation) -> frozenset[int]:
    """Axes over which the sum may wait: additions of terms that are all partial."""
    call = situation.call
    if getattr(call.function, "__name__", "") not in LINEAR or len(call.args) < 2 or len(call.inputs) < 2:
        return frozenset()
    layouts = [situation.given.get(name, Layout()) for name in call.inputs]
    return frozenset.intersection(*(layout.partial for layout in layouts))


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
