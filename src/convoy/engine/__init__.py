"""Runs a network so that its numbers depend on the recipe alone: microbatches, random numbers, batch norm."""
