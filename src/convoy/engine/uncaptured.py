"""A network that cannot be captured: its own Python code runs on every rank, on the whole batch.

Nobody knows what such code does with samples and channels, so nothing of it is divided. It brings no speed, and never
computes anything else than one device. Its layers are replaced in place, under their own names, by some that do on one
device what they do on several: dropout and batch norm follow the step context, by sample and by microbatch, also where
several run as one pass, and 1 × 1 convolutions use the same kernels.
"""

import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from convoy.comm.redistribution import redistribute
from convoy.engine.agreement import Form, arguments
from convoy.engine.gradients.reducer import current_backward
from convoy.engine.network import Network, writable
from convoy.errors import ConvoyError
from convoy.graph.capture import nothing_left
from convoy.graph.given import copied
from convoy.graph.tree import replace
from convoy.ops.batch_norm_torch import Norm
from convoy.ops.context import BatchNormMode, StepContext
from convoy.ops.normalization import normalize_each
from convoy.ops.onednn import DILATED, POINT, is_better_dilated, is_torchs
from convoy.ops.random_bits import drop, layer_key
from convoy.ops.statistics import Running
from convoy.plans import Layout, transfer
from convoy.plans.layout import WHOLE, consecutive
from convoy.plans.mesh import Axes
from convoy.plans.place import Batch, own_samples, sample_axes

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
        sizes = self.context.sizes if len(self.context.sizes) > 1 else (len(input),)
        if sum(sizes) != len(input):
            raise ConvoyError(
                f"a batch norm of {self.num_features} channels sees {len(input)} samples of a batch of {sum(sizes)}: "
                "the network folds something into the batch, so set batch_norm=sync"
            )
        y, terms = normalize_each(input, Norm(self.weight, self.bias, None, self.eps, False), sizes)
        if self._records and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(len(sizes))
            Running(self.running_mean, self.running_var, self.momentum, self.num_batches_tracked).follow(terms)
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


_DRAWS = (
    "{} draws random numbers that belong to no sample, or outside of dropout layers, in a network that cannot be "
    "captured, so that ranks would draw different ones: set its probability to 0, or use nn.Dropout on activations"
)


class Uncaptured(Network):
    """Runs the model's own forward pass on the samples of all ranks, and gives each rank the outputs of its own."""

    def look(self, examples: Sequence[Tensor], training: bool, form: Form | None = None) -> None:
        """Run the examples once in each mode, and refuse what draws random numbers that no rank could share."""
        self.example, self.form = tuple((tuple(x.shape), x.dtype) for x in examples), form
        several = self.plan.mesh.num_devices > 1
        with nothing_left(self.model):  # hooks of a copy are the same
            self._odd = _odd_dropouts(self.model, examples, form, several)
        if self._odd and several:
            raise ConvoyError(_DRAWS.format(f"layer {self._odd[0]}"))
        kinds = ((name, _op(layer)) for name, layer in self.model.named_modules())
        self.layers = tuple((name, op) for name, op in kinds if op)

    def place_parameters(self, axes: Axes | None = None) -> None:
        """Every rank has all parameters, and computes their whole gradients."""
        self.sample_axes = sample_axes(self.layers, self.plan) if axes is None else axes
        self.layouts = dict.fromkeys(self.shapes, WHOLE)
        self.context.draws = True
        follow(self.model, self.context, all_but=self._odd)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs, form = arguments(self.model, args, kwargs, self._own_forward)
        inputs, samples = self.open_pass(inputs)
        batch = Batch(self.plan.mesh, self.sample_axes, consecutive(samples))
        self.begin_pass(samples, inputs[0].device)
        own_layout = own_samples((sum(samples),), batch)
        whole = [writable(self._move(x, own_layout, WHOLE, (sum(samples), *x.shape[1:]))) for x in inputs]
        positional, named = form.fill(whole)
        with self.plain_forward():
            outputs = self.model.forward(*positional, **named)
        self.end_pass()

        def mine(output: Tensor) -> Tensor:
            layout = own_samples(tuple(output.shape), batch)
            return writable(self.weigh(self._move(output, WHOLE, layout, output.shape), samples))

        return replace(outputs, Tensor, mine)

    @property
    def shows_uses(self) -> bool:
        """Its own code takes the parameters from the layers themselves."""
        return False

    def python_state(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Modules in another mode than the network; its own code reads everything else as it is."""
        return self._unchanged.exceptions(), ()

    def _move(self, x: Tensor, source: Layout, target: Layout, shape: Sequence[int]) -> Tensor:
        mesh, groups = self.groups.mesh, self.groups
        steps = transfer(source, target, mesh, shape)
        return redistribute(steps, mesh, groups.coordinates, groups, shape, self.channels_last)(x) if steps else x


def _odd_dropouts(model: nn.Module, examples: Sequence[Tensor], form: Form | None, several: bool) -> list[str]:
    """Dropout layers whose masks cannot follow the samples: others than torch's, or given something folded."""
    odd: dict[str, None] = {}
    model = copied(model)
    for name, layer in model.named_modules():
        if isinstance(layer, _DropoutNd) and layer.p > 0:

            def note(layer: nn.Module, inputs: tuple[Any, ...], name: str = name) -> None:
                if type(layer) not in DROPOUT_LAYERS or len(inputs[0]) != len(examples[0]):
                    odd[name] = None

            layer.register_forward_pre_hook(note)
    with torch.no_grad(), _same_on_all_ranks(several, examples[0].device):
        for training in (False, True):
            for module in model.train(training).modules():
                if isinstance(module, (_BatchNorm, _DropoutNd)):
                    module.eval()
            positional, named = ([x.clone() for x in examples], {}) if form is None else form.fill(examples)
            model(*positional, **named)
    return list(odd)


@contextmanager
def _same_on_all_ranks(several: bool, device: torch.device) -> Iterator[None]:
    """Refuse, on several devices, what draws random numbers; the states of their generators stay as they were."""
    state = random_state(device)
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
            draws = not torch.equal(state, random_state(device))
        draws |= random.getstate() != python or str(np.random.get_state()) != str(numpy)
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
    if draws and several:
        raise ConvoyError(_DRAWS.format("the network"))


def random_state(device: torch.device) -> Tensor:
    """The state of torch's generators, of the CPU and of a GPU."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return torch.cat(states)


def _op(layer: nn.Module) -> str:
    return "conv" if isinstance(layer, _ConvNd) else "linear" if isinstance(layer, nn.Linear) else ""
