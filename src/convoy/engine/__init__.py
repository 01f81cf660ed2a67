"""Runs a network so that its numbers depend on the recipe alone: microbatches, random numbers, batch norm."""

from convoy.engine.coupling import Probe, microbatch_sizes, passes, probe
from convoy.engine.explain import explain
from convoy.engine.layers import MicrobatchNorm, SampleDropout, prepare
from convoy.engine.parallelize import accumulate, clip_grad_norm_, local_samples, parallelize
from convoy.ops.context import StepContext

__all__ = [
    "MicrobatchNorm",
    "Probe",
    "SampleDropout",
    "StepContext",
    "accumulate",
    "clip_grad_norm_",
    "explain",
    "local_samples",
    "microbatch_sizes",
    "parallelize",
    "passes",
    "prepare",
    "probe",
]
