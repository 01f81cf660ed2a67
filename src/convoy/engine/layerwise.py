"""A network that cannot be captured: its own Python code runs, and every layer in it is divided by itself.

Nobody knows what the code does between its layers, so every rank runs it on the whole batch, and activations are whole
between the layers: this sends more than a program would, and never computes anything else than one device.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from convoy.comm.redistribution import redistribute
from convoy.engine.agreement import Form, arguments
from convoy.engine.network import Network
from convoy.engine.output import writable
from convoy.errors import ConvoyError
from convoy.graph.capture import nothing_left
from convoy.graph.given import copied
from convoy.graph.graph import CaptureError
from convoy.graph.tree import replace
from convoy.plans import Layout, transfer
from convoy.plans.layout import WHOLE, consecutive
from convoy.plans.mesh import Axes
from convoy.plans.place import Batch, own_samples, sample_axes

_DRAWS = (
    "{} draws random numbers that belong to no sample, or outside of dropout layers, in a network that cannot be "
    "captured, so that ranks would draw different ones: set its probability to 0, or use nn.Dropout on activations"
)
LAYERS = (_ConvNd, nn.Linear, _BatchNorm, _DropoutNd)


@dataclass
class Layerwise(Network):
    """Runs the model's own forward pass, with a `Network` in place of each of its layers.

    Attributes:
        parts: these networks, by the layer's name.
        alone: layers that run whole on every rank, and why.
    """

    def look(self, examples: Sequence[Tensor], training: bool, form: Form | None = None) -> None:
        """Run the examples once in each mode and find the layers that they reach."""
        self._training = training
        self.example, self.form = tuple((tuple(x.shape), x.dtype) for x in examples), form
        with nothing_left(self.model):  # hooks of a copy are the same
            self._seen = _inputs_of_layers(self.model, examples, form, self.plan.mesh.num_devices)
        self.layers = tuple((name, _op(self.model.get_submodule(name))) for name in self._seen)

    def place_parameters(self, axes: Axes | None = None) -> None:
        """Divide every layer that was found; all other parameters are whole on every rank, and so are gradients."""
        self.sample_axes = sample_axes(self.layers, self.plan) if axes is None else axes
        self.layouts = dict.fromkeys(self.shapes, WHOLE)
        self.context.draws = True
        self.parts: dict[str, Network] = {}
        self.alone: dict[str, str] = {}
        for name, shapes in self._seen.items():
            layer = self.model.get_submodule(name)
            if isinstance(layer, _DropoutNd) and shapes[0][0][:1] != self.example[0][0][:1]:
                self._refuse_draws(name, layer)
                continue
            part = Network(layer, self.plan, self.groups, self.context, prefix=name, whole_batch=True)
            inputs = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]
            part.channels_last, part.compile = self.channels_last, self.compile
            try:
                part.look(inputs, self._training)
                if any(graph.constants for graph in part._graphs):
                    raise CaptureError("it computes with a tensor that is made anew before it is called")
            except CaptureError as error:
                if isinstance(layer, _DropoutNd):
                    self._refuse_draws(name, layer)
                self.alone[name] = error.reason
                continue
            part.place_parameters(self.sample_axes)
            self.layouts |= {f"{name}.{key}": layout for key, layout in part.layouts.items()}
            self.parts[name] = part
        for name, part in self.parts.items():  # not before: a plan that is refused leaves the network as it was
            self.model.get_submodule(name).forward = part.inner_forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network's output for this rank's own samples."""
        inputs, form = arguments(self.model, args, kwargs, self._own_forward)
        inputs, samples = self.open_pass(inputs)
        batch = Batch(self.plan.mesh, self.sample_axes, consecutive(samples))
        self.begin_pass(samples, inputs[0].device)
        own = own_samples((sum(samples),), batch)
        whole = [writable(self._move(x, own, WHOLE, (sum(samples), *x.shape[1:]))) for x in inputs]
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
        """Not those of the network's own code between its layers."""
        return False

    def recast(self) -> None:
        """Take note that parameters have another type or device than before. All ranks call it."""
        super().recast()
        for part in self.parts.values():
            part.recast()

    def python_state(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Modules in another mode than the network, and changes of what its layers read; its own code runs as it is."""
        changed = [f"{name}.{text}" for name, part in self.parts.items() for text in part.python_state()[1]]
        return self._unchanged.exceptions(), tuple(changed)

    def _refuse_draws(self, name: str, layer: _DropoutNd) -> None:
        """On several devices, refuse a dropout layer whose numbers belong to no sample."""
        if layer.p > 0 and self.plan.mesh.num_devices > 1:
            raise ConvoyError(_DRAWS.format(f"layer {name}"))

    def _move(self, x: Tensor, source: Layout, target: Layout, shape: Sequence[int]) -> Tensor:
        mesh, groups = self.groups.mesh, self.groups
        steps = transfer(source, target, mesh, shape)
        return redistribute(steps, mesh, groups.coordinates, groups, shape, self.channels_last)(x) if steps else x


def _inputs_of_layers(
    model: nn.Module, examples: Sequence[Tensor], form: Form | None, num_devices: int
) -> dict[str, list[Any]]:
    """Shapes and types of what every layer is given in either mode, by the layer's name."""
    seen: dict[str, list[Any]] = {}
    model = copied(model)
    for name, layer in model.named_modules():
        if isinstance(layer, LAYERS):

            def note(layer: nn.Module, inputs: tuple[Any, ...], name: str = name) -> None:
                if inputs and all(isinstance(x, Tensor) for x in inputs):
                    seen.setdefault(name, [(tuple(x.shape), x.dtype) for x in inputs])

            layer.register_forward_pre_hook(note)
    with torch.no_grad(), _alike_on_all_ranks(num_devices, examples[0].device):
        for training in (False, True):
            for module in model.train(training).modules():
                if isinstance(module, (_BatchNorm, _DropoutNd)):
                    module.eval()
            given = [example.clone() for example in examples]
            positional, named = (given, {}) if form is None else form.fill(given)
            model(*positional, **named)
    return seen


@contextmanager
def _alike_on_all_ranks(num_devices: int, device: torch.device) -> Iterator[None]:
    """Refuse, on several devices, what draws random numbers; the states of their generators stay as they were."""
    before = random_state(device)
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
            drawn = not torch.equal(before, random_state(device))
        drawn |= random.getstate() != python or str(np.random.get_state()) != str(numpy)
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
    if drawn and num_devices > 1:
        raise ConvoyError(_DRAWS.format("the network"))


def random_state(device: torch.device) -> Tensor:
    """The state of torch's generators, of the CPU and of a GPU."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return torch.cat(states)


def _op(layer: nn.Module) -> str:
    return "conv" if isinstance(layer, _ConvNd) else "linear" if isinstance(layer, nn.Linear) else "other"
