"""Calls for which nobody has a rule: they get their inputs whole and run on every rank. Slower, never wrong."""

from convoy.plans.layout import WHOLE, Layout
from convoy.plans.rules.rule import Placed, Situation


def rule(situation: Situation) -> Placed:
    """Everything whole, with a note for the plan's explanation unless it is whole anyway."""
    call = situation.call
    gathered = any(situation.given[name] != WHOLE for name in call.inputs if name in situation.given)
    function = getattr(call.function, "__name__", str(call.function))
    note = f"no rule for {function}: runs whole on every rank" if gathered else ""
    return Placed(dict.fromkeys(call.inputs, WHOLE), dict.fromkeys(call.outputs, WHOLE), note)


def matmul(situation: Situation) -> Placed:
    """Products of a batch of matrices stay split by samples; everything else is whole."""
    call = situation.call
    a, b = call.attributes["a"], call.attributes["b"]
    samples = situation.given[a].split(0) if a in situation.given else None
    batched = len(situation.shape(a)) >= 3 and len(situation.shape(a)) == len(situation.shape(b))
    same = situation.shape(a)[0] == situation.shape(b)[0] == situation.shape(call.outputs[0])[0]
    if samples is None or not batched or not same:
        return rule(situation)
    layout = Layout.of({0: samples})
    return Placed({a: layout, b: layout}, {call.outputs[0]: layout})
