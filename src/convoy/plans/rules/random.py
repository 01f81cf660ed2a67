"""Random numbers for each sample, as in stochastic depth: every rank can draw those that it needs."""

from convoy.plans.layout import Layout
from convoy.plans.rules.rule import Placed, Situation


def rule(situation: Situation) -> Placed:
    """Output [samples, ...], divided as the samples of the layer are."""
    samples = situation.batch.split(situation.axes("sample"))
    layout = Layout.of({0: samples} if samples else {})
    return Placed({}, {situation.call.outputs[0]: layout})
