"""Batch norm follows the layout that it is given: channels are normalized each by itself."""

from convoy.plans.layout import Layout
from convoy.plans.rules.following import resolved
from convoy.plans.rules.rule import Placed, Situation


def rule(situation: Situation) -> Placed:
    """Scale, shift and running statistics are divided as the channels are, without communication.

    Over the axes that divide samples, rows or columns every rank has all of them and its share of their gradient; the
    statistics are added up over those axes inside the call.
    """
    call = situation.call
    attributes = call.attributes
    source = attributes["input"]
    layout = resolved(situation, source)
    channels = layout.split(1)
    own = {} if channels is None else {0: channels}
    others = layout.split_axes - set(channels.axes if channels else ())
    inputs = {name: Layout.of() for name in call.inputs}
    for key in ("running_mean", "running_var"):
        if attributes[key] is not None:
            inputs[attributes[key]] = Layout.of(own)
    for key in ("weight", "bias"):
        if attributes[key] is not None:
            inputs[attributes[key]] = Layout.of(own, copied=others)
    inputs[source] = layout
    return Placed(inputs, {call.outputs[0]: layout})
