"""A network that cannot be captured: its own Python code runs on every rank, on the whole batch.

Nobody knows what such code does with samples and channels, so nothing of it is divided. It brings no speed, and never
computes anything else than one device.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from convoy.comm.redistribution import redistribute
from convoy.engine.agreement import Form, arguments
from convoy.engine.layers import DROPOUT_LAYERS, follow
from convoy.engine.network import Network
from convoy.engine.output import writable
from convoy.errors import ConvoyError
from convoy.graph.capture import nothing_left
from convoy.graph.given import copied
from convoy.graph.tree import replace
from convoy.plans import Layout, transfer
from convoy.plans.layout import WHOLE, consecutive
from convoy.plans.mesh import Axes
from convoy.plans.place import Batch, own_samples, sample_axes

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
