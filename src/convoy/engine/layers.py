"""Layers on one device as on several, in place and under their own names.

Dropout and batch norm follow the step context: by sample and by microbatch, also where several run as one pass.
1 × 1 convolutions use the kernels that they use on several devices.
"""

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from convoy.engine.gradients.backward import current_backward
from convoy.errors import ConvoyError
from convoy.ops.context import BatchNormMode, StepContext
from convoy.ops.microbatch_norm import at_once, normalize_at_once, normalize_by_itself
from convoy.ops.onednn import DILATED, POINT, is_better_dilated, is_torchs
from convoy.ops.random_bits import drop, layer_key
from convoy.ops.statistics import Following, add_term

DROPOUT_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
BATCH_NORM_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SampleDropout(nn.Module):
    """Drop elements, or whole channels, of each sample by its own random key (Srivastava et al., 2014). The same sample
    loses the same elements on whatever device, in whatever batch and order it is computed. Without an announced step
    (`StepContext.enter`) it refuses to run in training mode rather than draw from a hidden state."""

    def __init__(self, name: str, p: float, channels: bool, context: StepContext) -> None:
        super().__init__()
        self.p = p
        self.channels = channels
        self.name = name
        self.key = layer_key(name)
        self.context = context
        context.draws = True

    def forward(self, x: Tensor) -> Tensor:
        """Input and output: [samples, ...]; channel dropout takes dim 1 for the channels."""
        if not self.training or self.p == 0.0:
            return x
        keys = self.context.keys
        if len(keys) != len(x):
            raise ConvoyError(
                f"the dropout layer {self.name} sees {len(x)} samples of a batch of {len(keys)}: the network folds "
                "something into the batch, so its masks cannot follow the samples; remove that dropout"
            )
        return drop(x, keys, self.key, self.p, self.channels)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class MicrobatchNorm(_BatchNorm):
    """Batch norm that normalizes every microbatch by its own mean and variance (Goyal et al., 2017, section 2.3). The
    running statistics are updated once for each microbatch, in order, as if the microbatches had run one after the
    other; parameters and buffers are those of the layer that it replaces, under the same names."""

    def __init__(self, layer: _BatchNorm, context: StepContext) -> None:
        super().__init__(0, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        self.num_features = layer.num_features
        self._parameters = layer._parameters
        self._buffers = layer._buffers
        self.context = context
        self.kind = type(layer)
        self._records = True
        self.train(layer.training)

    def _check_input_dim(self, input: Tensor) -> None:
        self.kind._check_input_dim(self, input)

    def forward(self, input: Tensor) -> Tensor:
        """Input and output: [samples, channels, ...]."""
        if not self.training:
            return super().forward(input)
        # or activation checkpointing runs the layer again, of which compiled code knows nothing
        self._records = torch.compiler.is_compiling() or current_backward() == -1
        self._check_input_dim(input)
        sizes = self.context.sizes
        if len(sizes) < 2:
            return self._normalize(input)
        if sum(sizes) != len(input):
            raise ConvoyError(
                f"a batch norm of {self.num_features} channels sees {len(input)} samples of a batch of {sum(sizes)}: "
                "the network folds something into the batch, so set batch_norm=sync"
            )
        if at_once(input):
            return self._normalize_at_once(input, sizes)
        return torch.cat([self._normalize(piece) for piece in input.split(sizes)])

    def _normalize_at_once(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        running = None
        if self._records and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(len(sizes))
            running = Following(self.running_mean, self.running_var, self.momentum, self.num_batches_tracked)
        return normalize_at_once(x, self.weight, self.bias, self.eps, sizes, running)[0]

    def _normalize(self, x: Tensor) -> Tensor:
        y, term = normalize_by_itself(x, self.weight, self.bias, self.eps)
        if self._records and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            add_term([self.running_mean, self.running_var], term.unbind(0), [weight] * 2)
        return y


class PointwiseConv2d(nn.Conv2d):
    """A convolution with 1 × 1 filters, stride 1."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dilation = DILATED if input.dim() == 4 and is_better_dilated(input, weight) else POINT
        return F.conv2d(input, weight, bias, self.stride, self.padding, dilation, self.groups)


def prepare(model: nn.Module, seed: int, batch_norm: BatchNormMode) -> StepContext:
    """Let a network, in place, follow a new context, which must be told of every step before its forward pass
    (`follow`). `seed` is for the random keys of samples. Batch norm's statistics are those of each microbatch, of the
    global batch (`sync`) or of this device's samples (`local`); on one device the last two are the plain layer's."""
    context = StepContext(seed, batch_norm=batch_norm)
    follow(model, context)
    return context


def follow(model: nn.Module, context: StepContext, all_but: Collection[str] = ()) -> None:
    """Replace dropout, for statistics by microbatch batch norm, and 1 × 1 convolutions, but for some; parameters,
    buffers and their names stay."""
    for name, module in list(model.named_modules()):
        if name in all_but:
            continue
        if type(module) in DROPOUT_LAYERS:
            assert isinstance(module, nn.modules.dropout._DropoutNd)
            _become(module, SampleDropout(name, module.p, type(module) is not nn.Dropout, context))
        elif type(module) in BATCH_NORM_LAYERS and context.batch_norm == "microbatch":
            assert isinstance(module, _BatchNorm)
            _become(module, MicrobatchNorm(module, context))
        elif is_torchs(module) and (module.kernel_size, module.stride, module.dilation) == (POINT, POINT, POINT):
            module.__class__ = PointwiseConv2d


def _become(layer: nn.Module, replacement: nn.Module) -> None:
    """Let a layer do what another does. It stays where it is, with its hooks, and what code that looks for it finds."""
    layer.__class__ = type(type(replacement).__name__, (type(replacement), type(layer)), {})
    vars(layer).update({name: value for name, value in vars(replacement).items() if name not in vars(layer)})
