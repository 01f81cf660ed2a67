"""What each kind of call may do on a mesh axis: one rule for each `op` of the graph."""

from convoy.plans.rules.rule import Batch, Placed, Rule, Situation

RULES: dict[str, Rule] = {}

__all__ = ["RULES", "Batch", "Placed", "Rule", "Situation"]
