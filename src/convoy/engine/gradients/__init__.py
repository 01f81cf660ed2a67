"""Gradients, weights and their norms over the ranks: reduction, fixed tree, answers for whole tensors."""
