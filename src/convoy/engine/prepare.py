"""Makes a network's layers follow the step context, in place and under their own names."""

from torch import nn

from convoy.engine.batch_norm import replace_batch_norm
from convoy.engine.context import BatchNormMode, StepContext
from convoy.engine.dropout import replace_dropout


def prepare(model: nn.Module, seed: int, batch_norm: BatchNormMode) -> StepContext:
    """Replace dropout and, for statistics by microbatch, batch norm; parameters, buffers and their names stay.

    Args:
        model: any network; changed in place.
        seed: the run's seed, for the random keys of samples.
        batch_norm: `microbatch` (statistics over each microbatch), `sync` (over the global batch) or `local` (over the
            samples of this device). On one device the last two are the plain layer over the whole batch.

    Returns:
        The context that must be told of every step before its forward pass.
    """
    context = StepContext(seed, batch_norm=batch_norm)
    replace_dropout(model, context)
    if batch_norm == "microbatch":
        replace_batch_norm(model, context)
    return context
