"""Chunks of a tensor: along a divided dimension each chunk is held by the ranks that hold its indices."""

from convoy.plans.layout import Layout, Split, consecutive
from convoy.plans.rules.rule import Placed, Situation
from convoy.plans.rules.select import within


def rule(situation: Situation) -> Placed:
    """Nothing is sent; a rank may be left with nothing of some chunk."""
    call = situation.call
    source = call.attributes["input"]
    given = situation.given.get(source, Layout())
    dim = call.attributes["dim"] % len(situation.shape(source))
    others = {other: split for other, split in given.splits if other != dim}
    divided = given.split(dim)
    outputs = {}
    for name, chunk in zip(call.outputs, consecutive(call.attributes["sizes"]), strict=True):
        splits = dict(others)
        if divided is not None:
            splits[dim] = Split(divided.axes, tuple(within(part, chunk) for part in divided.parts))
        outputs[name] = Layout.of(splits)
    return Placed({source: Layout.of(dict(given.splits))}, outputs)
