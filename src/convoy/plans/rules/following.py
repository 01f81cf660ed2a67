"""Calls that leave their input where it is."""

from convoy.plans.layout import WHOLE, Layout
from convoy.plans.rules.layouts import without_partial
from convoy.plans.rules.rule import Situation


def resolved(situation: Situation, name: str) -> Layout:
    """The layout in which a value is given, with partial sums added up."""
    return without_partial(situation.given.get(name, WHOLE))
