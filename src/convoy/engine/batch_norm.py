"""Batch norm over each microbatch, also where several run as one pass, and a network whose layers use it.

`prepare` lets a network's batch norm and dropout follow the step context, in place and under their own names.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from convoy.engine.dropout import replace_dropout
from convoy.errors import ConvoyError
from convoy.ops.batch_norm import normalize_by_itself
from convoy.ops.context import BatchNormMode, StepContext
from convoy.ops.statistics import add_term

BATCH_NORM_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class MicrobatchNorm(_BatchNorm):
    """Batch norm that normalizes every microbatch by its own mean and variance (Goyal et al., 2017, section 2.3).

    The running statistics are updated once for each microbatch, in order, as if the microbatches had run one after
    the other; parameters and buffers are those of the layer that it replaces, under the same names.
    """

    def __init__(self, layer: _BatchNorm, context: StepContext) -> None:
        super().__init__(0, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        self.num_features = layer.num_features
        self._parameters = layer._parameters
        self._buffers = layer._buffers
        self.context = context
        self.kind = type(layer)
        self.train(layer.training)

    def _check_input_dim(self, input: Tensor) -> None:
        self.kind._check_input_dim(self, input)

    def forward(self, input: Tensor) -> Tensor:
        """Input and output: [samples, channels, ...]."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        sizes = self.context.sizes
        if len(sizes) < 2:
            return self._normalize(input)
        if sum(sizes) != len(input):
            raise ConvoyError(
                f"a batch norm of {self.num_features} channels sees {len(input)} samples of a batch of {sum(sizes)}: "
                "the network folds something into the batch, so set batch_norm=sync"
            )
        return torch.cat([self._normalize(piece) for piece in input.split(sizes)])

    def _normalize(self, x: Tensor) -> Tensor:
        y, term = normalize_by_itself(x, self.weight, self.bias, self.eps)
        if self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            add_term([self.running_mean, self.running_var], term, [weight] * 2)
        return y


def replace_batch_norm(model: nn.Module, context: StepContext) -> None:
    """Replace every `nn.BatchNorm1d`, `BatchNorm2d` and `BatchNorm3d` of the model, in place."""
    replaced: dict[_BatchNorm, MicrobatchNorm] = {}  # a layer may have several names
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) in BATCH_NORM_LAYERS:
            assert isinstance(module, _BatchNorm)
            if module not in replaced:
                replaced[module] = MicrobatchNorm(module, context)
            model.set_submodule(name, replaced[module])


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
