"""Calls for which nobody has a rule: they get their inputs whole and run on every rank. Slower, never wrong."""

import math

from convoy.plans.layout import WHOLE, Layout, Split
from convoy.plans.rules.layouts import operand
from convoy.plans.rules.rule import Placed, Situation


def rule(situation: Situation) -> Placed:
    """Everything whole, but for dimensions along which the call computes each piece by itself; with a note for the
    plan's explanation unless it is where it was given.
    """
    call = situation.call
    splits = _independent(situation)
    layout = Layout.of(splits)
    inputs = dict.fromkeys(call.inputs, layout)
    for name in call.attributes.get("shared", ()):
        inputs[name] = operand(splits, situation.shape(call.outputs[0]), situation.shape(name))
    gathered = any(
        situation.given[name].splits != inputs[name].splits for name in call.inputs if name in situation.given
    )
    function = getattr(call.function, "__name__", str(call.function))
    what = "whole on every rank" if layout == WHOLE else "with some dimensions gathered"
    note = f"no rule for {function}: runs {what}" if gathered else ""
    return Placed(inputs, dict.fromkeys(call.outputs, layout), note)


def _independent(situation: Situation) -> dict[int, Split]:
    """How the largest input is divided along the dimensions that all inputs and outputs have alike; but for inputs
    that several pieces share."""
    call = situation.call
    own = [name for name in call.inputs if name not in call.attributes.get("shared", ())]
    given = [name for name in own if name in situation.given]
    shapes = [situation.shape(name) for name in (*own, *call.outputs)]
    if not given:
        return {}
    splits = situation.given[max(given, key=lambda name: math.prod(situation.shape(name)))].splits
    alike = [dim for dim in call.attributes.get("independent", ()) if len({shape[dim] for shape in shapes}) == 1]
    return {dim: split for dim, split in splits if dim in alike}


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
