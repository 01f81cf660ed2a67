"""What each kind of call may do on a mesh axis: one rule for each `op` of the graph."""

from convoy.plans.rules import (
    batch_norm,
    concatenate,
    convolution,
    dropout,
    elementwise,
    group_norm,
    interpolate,
    layer_norm,
    linear,
    lrn,
    pad,
    pool,
    random,
    reduce,
    select,
    shape,
    softmax,
    split,
    whole,
)
from convoy.plans.rules.rule import Batch, Placed, Rule, Situation

RULES: dict[str, Rule] = {
    "adaptive_avg_pool": pool.adaptive_avg_pool,
    "adaptive_max_pool": pool.adaptive_max_pool,
    "avg_pool": pool.avg_pool,
    "batch_norm": batch_norm.rule,
    "cat": concatenate.rule,
    "conv": convolution.rule,
    "dropout": dropout.rule,
    "elementwise": elementwise.rule,
    "group_norm": group_norm.rule,
    "identity": shape.identity,
    "interpolate": interpolate.rule,
    "layer_norm": layer_norm.rule,
    "linear": linear.rule,
    "lrn": lrn.rule,
    "matmul": whole.matmul,
    "max_pool": pool.max_pool,
    "opaque": whole.rule,
    "pad": pad.rule,
    "permute": shape.permute,
    "random": random.rule,
    "reduce": reduce.rule,
    "reshape": shape.reshape,
    "select": select.rule,
    "softmax": softmax.rule,
    "split": split.rule,
}

__all__ = ["RULES", "Batch", "Placed", "Rule", "Situation"]
