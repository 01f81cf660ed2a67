"""Softmax and log-softmax follow the layout that they are given."""

from convoy.plans.rules.following import resolved
from convoy.plans.rules.rule import Placed, Situation


def rule(situation: Situation) -> Placed:
    """Where the classes are divided, the call adds up the sums of exponentials and never gathers the logits."""
    call = situation.call
    source = call.attributes["input"]
    layout = resolved(situation, source)
    return Placed({source: layout}, {call.outputs[0]: layout})
