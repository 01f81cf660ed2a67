"""Group norm follows the layout that it is given."""

from convoy.plans.layout import Layout
from convoy.plans.rules.following import resolved
from convoy.plans.rules.rule import Placed, Situation


def rule(situation: Situation) -> Placed:
    """Input [samples, channels, ...]; scale and shift are divided as the channels are.

    Nothing is sent where every group of channels lies whole on one rank. Where rows, columns or the channels of a group
    are divided, the call adds up the statistics, two numbers for each sample and group: never dearer than bringing the
    channels together.
    """
    call = situation.call
    source = call.attributes["input"]
    layout = resolved(situation, source)
    channels = layout.split(1)
    own = {} if channels is None else {0: channels}
    others = layout.split_axes - set(channels.axes if channels else ())
    inputs = {name: Layout.of(own, copied=others) for name in call.inputs}
    inputs[source] = layout
    return Placed(inputs, {call.outputs[0]: layout})
