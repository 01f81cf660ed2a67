"""Gradients, weights and their norms over the ranks: reduction, fixed tree, sharded optimiser, approximations."""

from convoy.engine.gradients.buckets import Sizes
from convoy.engine.gradients.reducer import GradientReducer
from convoy.engine.gradients.tree_reducer import TreeReducer

__all__ = ["GradientReducer", "Sizes", "TreeReducer"]
