"""What each kind of call may do on a mesh axis: one rule for each `op` of the graph."""

from convoy.plans.rules import concatenate, convolution, elementwise, linear, shape, whole
from convoy.plans.rules.rule import Batch, Placed, Rule, Situation

RULES: dict[str, Rule] = {
    "cat": concatenate.rule,
    "conv": convolution.rule,
    "elementwise": elementwise.rule,
    "identity": shape.identity,
    "linear": linear.rule,
    "matmul": whole.matmul,
    "opaque": whole.rule,
    "permute": shape.permute,
    "reshape": shape.reshape,
}

__all__ = ["RULES", "Batch", "Placed", "Rule", "Situation"]
