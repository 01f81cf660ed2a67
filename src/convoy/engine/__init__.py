"""Runs a network so that its numbers depend on the recipe alone: microbatches, random numbers, batch norm."""

from convoy.engine.coupling import Probe, microbatch_sizes, probe
from convoy.ops.context import StepContext

__all__ = ["Probe", "StepContext", "microbatch_sizes", "probe"]
