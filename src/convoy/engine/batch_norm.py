"""Batch norm with statistics over each microbatch, also where several microbatches run as one batch."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from convoy.engine.context import StepContext
from convoy.errors import ConvoyError

BATCH_NORM_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class MicrobatchNorm(_BatchNorm):
    """Batch norm that normalises every microbatch by its own mean and variance (Goyal et al., 2017, section 2.3).

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
        sizes = self.context.sizes
        if not self.training or len(sizes) < 2:
            return super().forward(input)
        if sum(sizes) != len(input):
            raise ConvoyError(
                f"a batch norm of {self.num_features} channels sees {len(input)} samples of a batch of {sum(sizes)}: "
                "the network folds something into the batch, so set batch_norm=sync"
            )
        return torch.cat([super(MicrobatchNorm, self).forward(piece) for piece in input.split(sizes)])


def replace_batch_norm(model: nn.Module, context: StepContext) -> None:
    """Replace every `nn.BatchNorm1d`, `BatchNorm2d` and `BatchNorm3d` of the model, in place."""
    for name, module in list(model.named_modules()):
        if type(module) in BATCH_NORM_LAYERS:
            assert isinstance(module, _BatchNorm)
            model.set_submodule(name, MicrobatchNorm(module, context))
