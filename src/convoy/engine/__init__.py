"""Runs a network so that its numbers depend on the recipe alone: microbatches, random numbers, batch norm."""

from convoy.engine.coupling import Probe, microbatch_sizes, probe
from convoy.engine.uncaptured import MicrobatchNorm, SampleDropout, prepare
from convoy.ops.context import StepContext

__all__ = ["MicrobatchNorm", "Probe", "SampleDropout", "StepContext", "microbatch_sizes", "prepare", "probe"]
