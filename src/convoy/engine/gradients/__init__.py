"""Gradients, weights and their norms over the ranks: reduction, fixed tree, sharded optimizer, approximations."""

from convoy.engine.gradients.norms import WholeNorms, clip_grad_norm, global_norm, shard_norms
from convoy.engine.gradients.reducer import GradientReducer, LocalSgd
from convoy.engine.gradients.sharded import ShardedOptimizer, sharding_pays
from convoy.engine.gradients.tree import TreeReducer
from convoy.plans.buckets import Sizes

__all__ = [
    "GradientReducer",
    "LocalSgd",
    "ShardedOptimizer",
    "Sizes",
    "TreeReducer",
    "WholeNorms",
    "clip_grad_norm",
    "global_norm",
    "shard_norms",
    "sharding_pays",
]
