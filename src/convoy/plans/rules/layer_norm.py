"""Layer norm follows the layout that it is given."""

from convoy.plans.layout import Layout
from convoy.plans.rules.following import resolved
from convoy.plans.rules.rule import Placed, Situation


def rule(situation: Situation) -> Placed:
    """Scale and shift are divided as the normalized dimensions are.

    Where one of these is divided, the call adds up the statistics over its axes, two numbers for each vector that is
    normalized.
    """
    call = situation.call
    source = call.attributes["input"]
    layout = resolved(situation, source)
    first = len(situation.shape(source)) - len(call.attributes["normalized_shape"])
    own = {dim - first: split for dim, split in layout.splits if dim >= first}
    others = {axis for dim, split in layout.splits if dim < first for axis in split.axes}
    inputs = {name: Layout.of(own, copied=others) for name in call.inputs}
    inputs[source] = layout
    return Placed(inputs, {call.outputs[0]: layout})
