"""Dropout follows the layout that it is given: its mask is a function of each element's place in the whole."""

from convoy.errors import ConvoyError
from convoy.plans.rules.following import resolved
from convoy.plans.rules.rule import Placed, Situation


def rule(situation: Situation) -> Placed:
    """Input [samples, ...]."""
    call = situation.call
    source = call.attributes["input"]
    seen, samples = situation.shape(source)[0], situation.batch.num_samples
    if seen != samples:
        raise ConvoyError(
            f"{situation.where} drops elements of {seen} samples of a batch of {samples}: the network folds something "
            "into the batch, so its masks cannot follow the samples; remove that dropout"
        )
    layout = resolved(situation, source)
    return Placed({source: layout}, {call.outputs[0]: layout})
